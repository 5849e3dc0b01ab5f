"""The names that the site's dictionary of metrics explains."""

import re
from collections.abc import Iterable
from functools import cache

from places import ROOT

PAGE = ROOT / ".docs" / "pages" / "reference" / "metrics.md"


@cache
def entries() -> list[str]:
    "The names of the page, `<k>` for a number"
    return re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.M)


def unknown_metrics(names: Iterable[str]) -> list[str]:
    "Names that the page does not hold"
    patterns = [re.sub(r"<\w+>", r"[\\w.-]+", re.escape(name)) for name in entries()]
    known = re.compile("|".join(patterns))
    own = {name: re.sub(r"^tenants/[^/]+/", "", name) for name in names}  # of a tenant
    return sorted(name for name in own if not known.fullmatch(own[name]))


def explained(rows: list[dict]) -> list[dict]:
    "Records of steps, all of whose metrics have an entry"
    unknown = unknown_metrics({name for row in rows for name in row})
    assert not unknown, f"add these metrics to {PAGE.relative_to(ROOT)}: {unknown}"
    return rows
