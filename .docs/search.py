"""Search of the site: Chinese words in the index, and the texts that results quote"""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

from sphinx.search.en import SearchEnglish

HAN = re.compile(r"[\u3400-\u9fff]+")
# the same split for the query, in the browser
SPLIT_QUERY = r"""
var splitQuery = (query) =>
  query.split(/[^\p{Letter}\p{Number}_\p{Emoji_Presentation}]+/gu).filter((word) => word)
    .flatMap((word) => word.split(/([\u3400-\u9fff]+)/).filter((part) => part))
    .flatMap((part) => /[\u3400-\u9fff]/.test(part) && part.length > 2
      ? [...part].slice(1).map((sign, i) => part[i] + sign) : [part]);
"""


class SearchBoth(SearchEnglish):
    "English words, and Chinese text as pairs of characters: it has no spaces to split at"

    js_splitter_code = SPLIT_QUERY

    def split(self, input: str) -> list[str]:
        "Words and pairs of characters"
        words = []
        for word in super().split(input):
            words += [part for part in HAN.split(word) if part]
            for run in HAN.findall(word):
                words += [run[i : i + 2] for i in range(max(len(run) - 1, 1))]
        return words


class PageText(HTMLParser):
    "The prose of a page, without code, navigation and the signs for links"

    SKIPPED = ("script", "style", "pre", "svg", "math", "button")

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0  # of skipped elements
        self.inside = False  # of the article
        self.parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        "Called for each element"
        self.inside |= tag == "article"
        self.depth += tag in self.SKIPPED
        if tag in ("p", "li", "td", "th", "tr", "h1", "h2", "h3", "h4", "dt"):
            self.parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        "Called at the end of each element"
        self.depth -= tag in self.SKIPPED
        self.inside &= tag != "article"

    def handle_data(self, data: str) -> None:
        "Called for text"
        if self.inside and not self.depth and data != "¶":
            self.parts.append(data)


def page_text(html: str) -> str:
    "The prose of a page on one line"
    parser = PageText()
    parser.feed(html)
    return " ".join("".join(parser.parts).split())


def write_texts(site: Path) -> None:
    "Write the texts that search results quote, but of the listings of functions and sources"
    texts = {}
    for page in sorted(site.rglob("*.html")):
        name = page.relative_to(site).with_suffix("").as_posix()
        if not name.startswith(("_modules/", "reference/api/", "genindex", "search")):
            texts[name] = page_text(page.read_text(encoding="utf-8"))
    file = site / "_static" / "search_texts.js"
    file.write_text(
        f"window.SEARCH_TEXTS = {json.dumps(texts, ensure_ascii=False)};\n", "utf-8"
    )
