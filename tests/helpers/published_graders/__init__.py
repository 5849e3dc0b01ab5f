"""The graders that others publish, as the package index serves them.

Nothing is installed. A wheel is downloaded once, checked against its SHA-256 and unpacked in the user's
cache; a grader is imported from there. TRL, transformers and math-verify are those of the environment.
"""

import ast
import contextlib
import importlib
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import package_index

from published_graders.cases import CASES, Case

__all__ = ["CASES", "Case", "GRADERS", "Unavailable", "score"]

# requirement -> SHA-256 of its wheel
WHEELS = {
    "verl==0.9.1": "db6e6f2a8d9d5808d9ec32d357a42319fdc6967df688ff9d9810050f49bfdd14",
    "mathruler==0.1.0": "e8ce0d9e07e892bf971fbff5e6eee330f6a66fd022666c99828a0000c788079f",
    "pylatexenc==2.11": "e78e7391d6c104f1ed150e21cfaa58016cdb50aa54406a2eecb793649ffdfdd0",
    "nvidia-simple-evals==26.3": "eeb4cee3dff5cd54ae0988e0e577fff3e7b08a14d74e85b8f75e157029aa430d",
}


class Unavailable(Exception):
    "A wheel cannot be had here; the message says why"


def unpacked(requirement: str) -> Path:
    "The folder of an unpacked wheel; raises `Unavailable` without a package index"
    name, _, release = requirement.partition("==")
    try:
        return package_index.sources(name, release, sha256=WHEELS[requirement])
    except OSError as error:
        raise Unavailable(f"{requirement} cannot be downloaded: {error}") from error


@contextlib.contextmanager
def _importable(*sites: Path) -> Iterator[None]:
    "Import from these folders, too"
    before = list(sys.path)
    sys.path[:0] = [str(site) for site in sites]
    try:
        yield
    finally:
        sys.path[:] = before


def from_file(name: str, path: Path) -> ModuleType:
    "A module of a package whose `__init__` needs more than the module does"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# A grader: (response, label) -> score. Loading one may raise `Unavailable`.
Grader = Callable[[Case], float]


def _verl(module: str) -> ModuleType:
    site = unpacked("verl==0.9.1")
    return from_file(f"verl_{module}", site / f"verl/utils/reward_score/{module}.py")


def verl_math_verify() -> Grader:
    "verl's math_verify, without the pool of processes around it"
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    grade = _verl("math_verify")._verify_in_subprocess

    return lambda case: grade(f"\\boxed{{{case.label}}}", case.text)


def verl_math_dapo() -> Grader:
    compute_score = _verl("math_dapo").compute_score

    def grade(case: Case) -> float:
        return compute_score(case.text, str(case.label))["score"]

    return grade


def math_verify() -> Grader:
    "math-verify with its defaults"
    from math_verify import parse, verify

    return lambda case: verify(parse(f"${case.label}$"), parse(case.text))


def trl() -> Grader:
    "TRL's accuracy_reward; a label that it cannot parse is skipped, here 0"
    from trl.rewards import accuracy_reward

    def grade(case: Case) -> float:
        found = accuracy_reward([[{"content": case.text}]], [f"${case.label}$"])
        return found[0] or 0.0

    return grade


def mathruler() -> Grader:
    "The grader of verl's geo3k; slime's math and deepscaler come from the same source"
    sites = unpacked("mathruler==0.1.0"), unpacked("pylatexenc==2.11")
    with _importable(*sites):
        found = importlib.import_module("mathruler.grader")

    def grade(case: Case) -> float:
        text = case.text.rpartition("</think>")[2]
        return float(found.grade_answer(found.extract_boxed_content(text), case.label))

    return grade


def simple_evals() -> Grader:
    "The pattern and the comparison of the GPQA evaluation of simple-evals; labels are letters"
    site = unpacked("nvidia-simple-evals==26.3")
    source = (site / "simple_evals/common.py").read_text()
    (written,) = re.findall(r"^ANSWER_PATTERN_MULTICHOICE = (.+)$", source, re.MULTILINE)
    pattern = ast.literal_eval(written)

    def grade(case: Case) -> float:
        found = re.search(pattern, case.text)
        return float(found is not None and found.group(1) == case.label)

    return grade


def squad() -> Grader:
    "The F1 of SQuAD, as transformers has it"
    from transformers.data.metrics.squad_metrics import compute_f1

    return lambda case: float(compute_f1(case.label, case.text))


def _slime(module: str) -> ModuleType:
    "A module of slime's rm_hub, which no package index has"
    checkouts = os.environ.get("COOKBOOK_UPSTREAM")
    hub = Path(checkouts or "", "slime@v0.2.2/slime/rollout/rm_hub")
    if not checkouts or not hub.is_dir():
        raise Unavailable(
            "slime is in no package index: set COOKBOOK_UPSTREAM to a folder of upstream "
            "checkouts (see tests/README.md)"
        )
    package = ModuleType("slime_rm_hub")  # its own __init__ needs all of slime
    package.__path__ = [str(hub)]
    sys.modules.setdefault(package.__name__, package)
    with _importable(unpacked("pylatexenc==2.11")):
        return importlib.import_module(f"slime_rm_hub.{module}")


def slime_math() -> Grader:
    grade = _slime("math_utils").grade_answer_verl

    return lambda case: grade(case.text, case.label)


def slime_deepscaler() -> Grader:
    grade = _slime("deepscaler").get_deepscaler_rule_based_reward

    return lambda case: grade(case.text, case.label)


def slime_dapo() -> Grader:
    compute_score = _slime("math_dapo_utils").compute_score

    return lambda case: compute_score(case.text, case.label)["score"]


def slime_gpqa() -> Grader:
    grade = _slime("gpqa").compute_gpqa_reward

    return lambda case: grade(case.text, case.label, metadata=dict(case.metadata))


def slime_f1() -> Grader:
    grade = _slime("f1").f1_score

    return lambda case: grade(case.text, case.label)[0]


# (our scorer, name of theirs) -> its loader
GRADERS: dict[tuple[str, str], Callable[[], Grader]] = {
    ("math", "verl math_verify"): verl_math_verify,
    ("math", "math-verify"): math_verify,
    ("math", "TRL"): trl,
    ("math", "mathruler"): mathruler,
    ("deepscaler", "mathruler"): mathruler,
    ("dapo", "verl math_dapo"): verl_math_dapo,
    ("gpqa", "simple-evals"): simple_evals,
    ("f1", "squad"): squad,
    ("math", "slime"): slime_math,
    ("deepscaler", "slime"): slime_deepscaler,
    ("dapo", "slime"): slime_dapo,
    ("gpqa", "slime"): slime_gpqa,
    ("f1", "slime"): slime_f1,
}


def score(grade: Grader, case: Case) -> float | str:
    "Their score, or the name of the error they raise"
    try:
        return float(grade(case))
    except Exception as e:
        return type(e).__name__
