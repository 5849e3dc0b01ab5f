"""The product's engine on the real vllm-ascend: its conformance suite, sleep, every weight update method."""

import pytest

# checks that build an engine again; vllm-ascend allows one engine a process
REBUILD = (
    "update_equals_a_fresh_engine",
    "update_in_flight_keeps",
    "streaming_is_refused",
    "stop_tokens_end_a_response",
)
MIB = 2**20


def suite() -> list[str]:
    from cookbook_npu.testing.conformance import ENGINE_CHECKS

    return [check.__name__ for check in ENGINE_CHECKS]


def test_engine_keeps_every_promise(stack, models):
    "All checks that one engine can answer"
    checks = [name for name in suite() if name not in REBUILD]
    found = stack.job("conformance", folder=models, family="qwen3", checks=checks)
    assert sorted(found) == sorted(checks)
    assert {name: error for name, error in found.items() if error} == {}


@pytest.mark.parametrize("check", REBUILD)
def test_engine_built_again(stack, models, check):
    "A check that needs an engine with other settings, in a process of its own"
    found = stack.job("conformance", folder=models, family="qwen3", checks=[check])
    assert found == {check: ""}


@pytest.mark.parametrize("family", ["qwen3_5"])
def test_engine_of_another_family(stack, models, family):
    checks = ["greedy_equals_generate", "logprobs_are_teacher_forced"]
    found = stack.job("conformance", folder=models, family=family, checks=checks)
    assert found == dict.fromkeys(checks, "")


def test_engine_with_pictures(stack, models):
    found = stack.job(
        "conformance",
        folder=models,
        family="qwen3_vl",
        checks=["logprobs_are_teacher_forced", "placeholders_are_never_sampled"],
    )
    assert found and not any(found.values())


def test_sleep_gives_memory_back_and_every_method_updates_weights(stack, models):
    """The real CaMemAllocator. A sleeping tensor has no memory, so that reading one ends the process;
    log-probs at temperature 0.7 equal a teacher-forced pass
    """
    found = stack.job("sleeping", folder=models)
    assert found["platform"] == "npu" and found["mode"] == "processed_logprobs"
    assert found["start"][1] < 1e-4
    for method in ("reload_weights", "update_weights", "load_weights"):
        awake, asleep, half, again, gap = found[method]
        assert asleep - awake > 8 * MIB and asleep > half > again and again == awake
        assert gap < 1e-4 and found[f"{method} awake"] < 1e-4
    asleep, awake, gap = found["level 1"]
    assert asleep > awake and gap < 1e-4


def test_second_engine_in_a_process_is_refused(stack, models):
    "The allocator keeps what the first one had, so closing it is no remedy"
    error = stack.job("sleeping", folder=models)["second"]
    assert error.startswith("EngineError") and "process" in error
