// Below each search result: the place where its words stand. Sphinx fetches the page for this, which a
// browser refuses when the site is read from files; here a script holds the texts.
(() => {
  const BEFORE = 60, LENGTH = 220;
  const query = (new URLSearchParams(window.location.search).get("q") || "").toLowerCase().trim();
  const words = [query, ...query.split(/\s+/).sort((a, b) => b.length - a.length)];

  const addSnippet = (item) => {
    const link = item.querySelector("a");
    const [page] = link.getAttribute("href").split(".html");
    const text = window.SEARCH_TEXTS[page];
    if (!text || item.querySelector(".context")) return;
    const lower = text.toLowerCase();
    const section = link.textContent.split(" > ")[1];
    const from = section ? Math.max(lower.indexOf(section.toLowerCase()), 0) : 0;
    const found = words.map((word) => [lower.indexOf(word, from), word.length]);
    const [place, length] = found.find(([place]) => place >= 0) || [from, 0];
    const start = Math.max(place - BEFORE, 0);
    const snippet = item.appendChild(document.createElement("p"));
    snippet.className = "context";
    const mark = document.createElement("mark");
    mark.textContent = text.slice(place, place + length);
    snippet.append(start ? "…" : "", text.slice(start, place), mark,
      text.slice(place + length, start + LENGTH), "…");
  };

  const script = document.createElement("script");
  script.src = "_static/search_texts.js";
  script.onload = () => {
    const results = document.getElementById("search-results");
    const addAll = () => results.querySelectorAll("ul.search > li").forEach(addSnippet);
    addAll();
    new MutationObserver(addAll).observe(results, { childList: true, subtree: true });
  };
  if (query) document.head.append(script);
})();
