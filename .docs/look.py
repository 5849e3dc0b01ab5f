"""The built site in a real browser: `python .docs/look.py FOLDER` names what is wrong with its pages

As wide as a laptop and as a phone: nothing sticks out, no code or picture is cut, no script complains,
and the search, also in Chinese, leads to the right page although the pages are files.
"""

import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

from browser import console_errors, missing_browser, open_browser  # noqa: E402

WIDTHS = (1360, 420)  # of a laptop, where both sidebars are in sight, and of a phone
# what reaches over the right edge of the page, or of its own frame without a scroll bar
PROBE = """
const out = [];
const page = document.documentElement;
if (page.scrollWidth > innerWidth) out.push(`page is ${page.scrollWidth} wide`);
for (const box of document.querySelectorAll("article pre, article img, article svg")) {
  const edge = box.getBoundingClientRect().right;
  const scrolls = box.closest(".table-wrapper, .output, .cell_output");
  if (edge > innerWidth + 1 && !scrolls) out.push(`${box.tagName} ends at ${edge}`);
  if (box.tagName === "PRE" && box.scrollWidth > box.clientWidth + 1)
    out.push(`code is cut: ${box.innerText.slice(0, 60)}`);
  if (box.tagName === "IMG" && box.complete && !box.naturalWidth)
    out.push(`no picture: ${box.src}`);
}
const code = document.querySelectorAll("div:not(.output) > div.highlight > pre").length;
const buttons = document.querySelectorAll("button.copybtn").length;
if (buttons < code) out.push(`${code} blocks of code, ${buttons} copy buttons`);
return out;
"""


def set_width(driver, width: int) -> None:
    "Make the page as wide as a laptop or a phone"
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


# query -> where its first result leads
SEARCHES = {
    "奖励": "zh/",
    "权重": "zh/",
    "显存不足": "zh/troubleshooting",
    "resume": "howto/resume",
    "out of memory": "howto/troubleshooting",
}


def problems(site: Path, searches: dict[str, str] = SEARCHES) -> list[str]:
    "What a reader would stumble on: `page: what`"
    found = []
    with tempfile.TemporaryDirectory() as profile, open_browser(Path(profile)) as driver:
        # all pages but listings of source code, which are made alike
        pages = [p for p in site.rglob("*.html") if "_modules" not in p.parts]
        for page in sorted(pages):
            driver.get(page.as_uri())
            seen = [f"console: {message}" for message in console_errors(driver)]
            for width in WIDTHS:
                set_width(driver, width)
                seen += [f"at {width}: {what}" for what in driver.execute_script(PROBE)]
            found += [f"{page.relative_to(site)}: {what}" for what in seen]
        for query, target in searches.items():
            found += search_problems(driver, site, query, target)
    return found


def search_problems(driver, site: Path, query: str, target: str) -> list[str]:
    "Whether the search, of pages that are files, leads to a page first and quotes it"
    from selenium.common.exceptions import TimeoutException
    from selenium.webdriver.support.wait import WebDriverWait

    where = f"search.html: {query}"
    driver.get(f"{(site / 'search.html').as_uri()}?q={query}")
    quoted = "#search-results li:first-child .context"
    try:
        WebDriverWait(driver, 20).until(lambda d: d.find_elements("css selector", quoted))
    except TimeoutException:
        return [f"{where}: finds nothing, or quotes nothing"]
    seen = [f"{where}: console: {message}" for message in console_errors(driver)]
    first = driver.find_element("css selector", "#search-results li a")
    if not first.get_dom_attribute("href").startswith(target):
        seen.append(f"{where}: {first.get_dom_attribute('href')} comes before {target}")
    return seen


def main() -> int:
    "1 when something is wrong"
    if missing_browser():
        print(f"the pages were not looked at: {missing_browser()}")
        return 0
    wrong = problems(Path(sys.argv[1]))
    print("\n".join(wrong) or "looked at every page")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
