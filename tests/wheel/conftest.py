"""The lane as a fixture: skipped, with the reason, where the wheel is not here."""

import pytest
from npu_wheel import build
from ranks import run_ranks


@pytest.fixture(scope="session")
def lane():
    """run(target, ranks=1, kwargs=None, enter='load', env=None): results of processes on the real
    torch_npu; run.environment: their variables
    """
    if reason := build.misfit():
        pytest.skip(reason)
    if not build.have():
        pytest.skip(
            "the torch_npu wheel is not in the cache: run `make test-npu-wheel`, which downloads it"
        )
    environment = build.environment()

    def run(target, ranks=1, kwargs=None, enter="load", env=None):
        where = target if ":" in target else f"npu_wheel.jobs:{target}"
        return run_ranks(
            where,
            ranks,
            kwargs,
            {**environment, **(env or {})},
            timeout=300,
            bootstrap=f"npu_wheel.lane:{enter}",
            preload=["npu_wheel.lane"],
        )

    run.environment = environment
    return run
