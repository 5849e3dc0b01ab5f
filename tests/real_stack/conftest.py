"""The lane as a fixture: the real software stack of a 910B; skipped with the reason where it is missing."""

import datetime
import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from real_stack import environment

MINDSPEED = "MindSpeed@core_r0.16.0"
# part of the stack -> tests that execute it, by the beginnings of their names
GRAPHS = "test_graphs_ test_runtime_names test_cann_without"
EXECUTED = {
    "engine: conformance suite of Qwen3": "test_engine_keeps test_update_eq test_stop_t",
    "engine: Qwen3.5 (gated delta nets, Triton kernels interpreted)": "test_engine_of_qwen3_5",
    "engine: Qwen3-VL with pictures": "test_engine_with_pictures",
    "engine: sleep levels 1 and 2, three ways to update weights": "test_sleep",
    "engine: captured graphs after every update and sleep, seeded faults": GRAPHS,
    "engine: imports in the product's order": "test_order_of_imports",
    "trainer: bfloat16 and float32, equal to the simulated NPU": "test_trains_like",
    "trainer: save and resume at TP1, TP2 and from one into the other": "test_resumed_run",
    "every recipe: train, save, resume": "test_recipe_trains",
    "SIGTERM and resume": "test_run_resumes",
    "loss of a trainer": "test_lost_trainer",
    "TP2 trainer and engine, weights through device handles": "test_tensor_parallel",
    "RUN lines of the container, without its image": "test_run_lines",
    "doctor on the machine; the simulated NPU of a rehearsal": "test_doctor test_simulated",
}
# the same of test_other_stacks.py
OTHER_STACKS = {
    "vllm-ascend-0.18.0": {
        "engine: conformance suite of Qwen3": "test_older_engine",
        "engine: sleep levels 1 and 2, two ways to update weights": "test_older_sleep",
        "trainer: steps in bfloat16, save and resume": "test_older_trainer",
    },
    "vllm-ascend-0.26.0rc1": {
        "engine: six checks of the conformance suite": "test_newest_engine"
    },
}
NOT_EXECUTED_ELSEWHERE = {
    "recipes, tensor parallelism, other families, captured graphs": "only on "
    + environment.DEFAULT
}
NOT_EXECUTED = {
    "kernels": "formulas and interpreters in host memory stand in: no numerics, no speed of an NPU",
    "HCCL": "collectives are gloo's",
    "limits and timing of a capture, NZ weights": "no fractal layouts in host memory, one order of launches",
}


outcomes: dict[str, str] = {}  # test -> "passed", or why not
MATRIX = "graphs: "
matrix: dict[
    str, str
] = {}  # case of test_graphs.py, with MATRIX before it -> what it found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", help="file for the table of the 910B page")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    "Note what became of each test; under pytest-xdist in the process that starts the others"
    outcomes.setdefault(report.nodeid, "passed")
    if report.when == "call" and report.passed:
        matrix.update((k, v) for k, v in report.user_properties if k.startswith(MATRIX))
    if report.outcome != "passed":
        skipped = isinstance(report.longrepr, tuple)  # file, line, reason
        reason = report.longrepr[2] if skipped else getattr(report, "wasxfail", "failed")
        outcomes[report.nodeid] = str(reason)


Texts = dict[str, str]


def _rows(executed: Texts, missing: Texts, detail: str) -> list[Texts]:
    rows = []
    for what, tests in executed.items():
        own = [v for k, v in outcomes.items() if any(f"::{t}" in k for t in tests.split())]
        failed = sorted({v for v in own if v != "passed"})
        state = "executed" if "passed" in own and not failed else "not"
        text = "; ".join(failed) or (detail if own else "not run")
        rows.append(dict(what=what, state=state, detail=text))
    return rows + [dict(what=k, state="not", detail=v) for k, v in missing.items()]


def pytest_sessionfinish(session: pytest.Session) -> None:
    "Write what ran, where a file is named"
    file = session.config.getoption("--record")
    if not file or hasattr(session.config, "workerinput"):
        return
    found = mindspeed_folder()
    detail = f"with {MINDSPEED}" if found else "without MindSpeed"
    target = Path(file)
    known = json.loads(target.read_text()) if target.exists() else {"stacks": {}}
    date = datetime.date.today().isoformat()
    record = known["stacks"].setdefault(environment.DEFAULT, {"date": date, "rows": []})
    cells = {r["what"]: r for r in record["rows"] if r["what"].startswith(MATRIX)}
    for what, found in matrix.items():
        cells[what] = dict(what=what, state="executed", detail=f"{found} ({date})")
    rows = _rows(EXECUTED, NOT_EXECUTED, detail)
    if any(row["detail"] == "not run" for row in rows):  # a part of the lane
        date = record["date"]
        rows = [row for row in record["rows"] if row["what"] not in cells]
    record |= {"date": date, "rows": rows + [cells[what] for what in sorted(cells)]}
    date = datetime.date.today().isoformat()
    for stack, parts in OTHER_STACKS.items():
        if stack not in os.environ.get("COOKBOOK_STACKS", "").split():
            continue  # keep what an earlier run recorded
        missing = {**NOT_EXECUTED_ELSEWHERE, **NOT_EXECUTED}
        rows = _rows(parts, missing, "without MindSpeed")
        known["stacks"][stack] = {"date": date, "rows": rows}
    target.write_text(json.dumps(known, indent=1) + "\n")


def mindspeed_folder() -> Path | None:
    "A checkout of MindSpeed, which no registry serves"
    upstream = os.environ.get("COOKBOOK_UPSTREAM")
    folder = Path(upstream or "").expanduser() / MINDSPEED
    return folder if upstream and folder.is_dir() else None


@dataclass
class Stack:
    "Processes on the real stack"

    variables: dict[str, str]
    mindspeed: bool
    name: str = environment.DEFAULT

    def environment(self, **changes: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("COOKBOOK_NPU_SIM")}
        return {**kept, **self.variables, **changes}

    def run(
        self, *command: Any, cwd: Path | None = None, timeout: float = 600, **changes: str
    ) -> subprocess.CompletedProcess[str]:
        "A command in the lane's environment"
        return subprocess.run(
            list(map(str, command)),
            cwd=cwd,
            timeout=timeout,
            env=self.environment(**changes),
            capture_output=True,
            text=True,
        )

    def job(
        self, name: str, timeout: float = 600, env: Any = None, **arguments: Any
    ) -> Any:
        "The result of a function of `real_stack.jobs`"
        given = json.dumps(arguments, default=str)
        command = (environment.python(self.name), "-m", "real_stack.jobs", name, given)
        done = self.run(*command, timeout=timeout, **(env or {}))
        found = re.findall(r"^RESULT (.*)$", done.stdout, re.M)
        assert done.returncode == 0 and found, (done.stdout + done.stderr)[-6000:]
        return json.loads(found[-1])

    def train(self, count: int = 1, **arguments: Any) -> dict[str, Any]:
        "Rank 0's result of `real_stack.jobs:train`"
        return self.job(
            "ranks", target="real_stack.jobs:train", count=count, kwargs=arguments
        )[0]


def lane_environment(
    mindspeed: Path | None, stack: str = environment.DEFAULT
) -> dict[str, str]:
    if reason := environment.misfit():
        pytest.skip(reason)
    if not environment.have(stack):
        command = f"PYTHONPATH=tests/helpers python -m real_stack.environment {stack}"
        pytest.skip(f"{stack} is not installed: run `{command}`")
    return environment.environment(stack, mindspeed)


@pytest.fixture(scope="session")
def stack() -> Stack:
    "With MindSpeed, as on a 910B, where there is a checkout of it; else with the product's own layers"
    folder = mindspeed_folder()
    return Stack(lane_environment(folder), folder is not None)


@pytest.fixture(scope="session")
def without_mindspeed() -> Stack:
    return Stack(lane_environment(None), False)


@pytest.fixture(scope="session")
def with_mindspeed() -> Stack:
    if mindspeed_folder() is None:
        pytest.skip(f"set COOKBOOK_UPSTREAM to a folder with {MINDSPEED}")
    return Stack(lane_environment(mindspeed_folder()), True)


@pytest.fixture(scope="session", params=["without_mindspeed", "with_mindspeed"])
def either(request: pytest.FixtureRequest) -> Stack:
    "Both, one after the other"
    return request.getfixturevalue(request.param)


def other_stack(name: str) -> Stack:
    if name not in os.environ.get("COOKBOOK_STACKS", "").split():
        pytest.skip(f'not asked for: make test-910b STACKS="{name}"')
    return Stack(lane_environment(None, name), False, name)


@pytest.fixture(scope="session")
def older() -> Stack:
    name, _ = OTHER_STACKS
    return other_stack(name)


@pytest.fixture(scope="session")
def newest() -> Stack:
    _, name = OTHER_STACKS
    return other_stack(name)


@pytest.fixture(scope="session")
def models(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    "Two tiny models of each family"
    folder = tmp_path_factory.mktemp("models")
    for family in ("qwen3", "qwen3_moe", "qwen3_5", "qwen3_vl"):
        stack.job("tiny", folder=folder, family=family)
    return folder
