// Ranking of search results: pages that explain a task before modules, modules before single methods.
const GUIDES = /^(howto|recipes|tutorials|nbs\/tutorials|nbs\/index)/;
const TABLES = /^reference\/(metrics|commands|configuration)/;
const LAST = /^(reference\/api|changelog|contributing|lab_log|_modules|zh\/index)/;
const CHINESE = /\p{Script=Han}/u;

var Scorer = {
  score: ([docname, title, anchor, descr, score, filename, kind]) => {
    const query = new URLSearchParams(window.location.search).get("q") || "";
    if (docname.startsWith("zh/")) score += CHINESE.test(query) ? 20 : -10;
    if (GUIDES.test(docname)) score += 20;
    if (TABLES.test(docname)) score += 8;
    if (LAST.test(docname)) score -= 10;
    // a section found by its title before a page in which the word merely occurs
    if (kind === "title" || kind === "index") score += 5;
    return kind === "object" ? score - 10 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
