"""The lane as a fixture: the real software stack of a 910B; skipped with the reason where it is missing."""

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
        python = environment.python(environment.DEFAULT)
        command = (
            python,
            "-m",
            "real_stack.jobs",
            name,
            json.dumps(arguments, default=str),
        )
        done = self.run(*command, timeout=timeout, **(env or {}))
        found = re.findall(r"^RESULT (.*)$", done.stdout, re.M)
        assert done.returncode == 0 and found, (done.stdout + done.stderr)[-6000:]
        return json.loads(found[-1])

    def train(self, count: int = 1, **arguments: Any) -> dict[str, Any]:
        "Rank 0's result of `real_stack.jobs:train`"
        return self.job(
            "ranks", target="real_stack.jobs:train", count=count, kwargs=arguments
        )[0]


def lane_environment(mindspeed: Path | None) -> dict[str, str]:
    if reason := environment.misfit():
        pytest.skip(reason)
    if not environment.have():
        pytest.skip("the 910B stack is not installed: run `make test-910b`")
    return environment.environment(mindspeed=mindspeed)


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


@pytest.fixture(scope="session")
def models(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    "Two tiny models of each family"
    folder = tmp_path_factory.mktemp("models")
    for family in ("qwen3", "qwen3_5", "qwen3_vl"):
        stack.job("tiny", folder=folder, family=family)
    return folder
