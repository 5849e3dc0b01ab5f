"""The product's engine on the real vllm-ascend: its conformance suite, sleep, every weight update method."""

# checks that compare two engines: below, in two processes
TWO_ENGINES = ("update_equals_a_fresh_engine", "stop_tokens_end_a_response")
MIB = 2**20


def suite() -> list[str]:
    from conformance import ENGINE_CHECKS

    return [check.__name__ for check in ENGINE_CHECKS]


def test_engine_keeps_every_promise(stack, models):
    "All checks that one engine can answer"
    checks = [name for name in suite() if name not in TWO_ENGINES]
    found = stack.job("conformance", folder=models, family="qwen3", checks=checks)
    assert sorted(found) == sorted(checks)
    assert {name: error for name, error in found.items() if error} == {}


def test_update_equals_a_fresh_engine(stack, models):
    first, second = f"{models}/qwen30", f"{models}/qwen31"
    fresh = stack.job("responses", path=second)
    assert stack.job("responses", path=first, update=second) == fresh
    assert stack.job("responses", path=first) != fresh


def test_stop_tokens_end_a_response(stack, models):
    path, stops = f"{models}/qwen30", set(range(0, 264, 3))
    plain = stack.job("responses", path=path)
    stopped = stack.job("responses", path=path, stop_token_ids=sorted(stops))
    for (ids, _), (cut, _) in zip(plain, stopped, strict=True):
        ends = [i + 1 for i, token in enumerate(ids) if token in stops]
        assert cut == (ids[: ends[0]] if ends else ids)
    assert plain != stopped


def test_engine_of_qwen3_5(stack, models):
    "Gated delta nets: vllm-ascend's Triton kernels know bfloat16 alone"
    checks = ["logprobs_are_teacher_forced", "group_is_diverse", "sleep_wake_update"]
    found = stack.job(
        "conformance", folder=models, family="qwen3_5", checks=checks, dtype="bfloat16"
    )
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
        assert asleep - awake > 8 * MIB and asleep > half > again
        assert abs(again - awake) < 8 * MIB
        assert gap < 1e-4 and found[f"{method} awake"] < 1e-4
    asleep, awake, gap = found["level 1"]
    assert asleep > awake and gap < 1e-4
    # a second engine: the allocator keeps what the first one had, so closing it is no remedy
    assert found["second"].startswith("EngineError") and "process" in found["second"]
