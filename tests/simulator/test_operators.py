"""Operators on the simulated NPU: one process runs the checks of simulator_jobs/operators.py."""

import re

import pytest
from places import HELPERS
from ranks import run_ranks

JOBS = HELPERS / "simulator_jobs"


@pytest.fixture(scope="module")
def results():
    return run_ranks(
        "simulator_jobs.operators:everything",
        1,
        bootstrap="simulator",
        timeout=300,
    )[0]


@pytest.mark.parametrize(
    "name", re.findall(r"^def (check_\w+)", (JOBS / "operators.py").read_text(), re.M)
)
def test_operators(results, name):
    assert results[name] == ""
