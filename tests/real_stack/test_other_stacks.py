"""The product on the other 910B stacks: the one for older images, and, as an early warning, the newest
release with a wheel. `make test-910b STACKS="vllm-ascend-0.18.0 vllm-ascend-0.26.0rc1"` installs them.
"""

import pytest
from real_stack import environment
from test_engine import MIB, TWO_ENGINES, suite


def written_by(fixture):
    "Two tiny models, written by a stack's transformers"

    @pytest.fixture(scope="module")
    def models(request, tmp_path_factory):
        stack = request.getfixturevalue(fixture)
        folder = tmp_path_factory.mktemp(fixture)
        stack.job("tiny", folder=folder)
        return folder

    return models


older_models, newest_models = written_by("older"), written_by("newest")


def assert_kept(stack, folder, checks):
    found = stack.job("conformance", folder=folder, family="qwen3", checks=checks)
    assert found == dict.fromkeys(checks, "")


@pytest.mark.parametrize("half", [0, 1])
def test_older_engine_keeps_every_promise(older, older_models, half):
    checks = [name for name in suite() if name not in TWO_ENGINES]
    assert_kept(older, older_models, checks[half::2])


def test_older_engine_after_an_update_equals_a_fresh_one(older, older_models):
    first, second = f"{older_models}/qwen30", f"{older_models}/qwen31"
    updated = older.job("responses", path=first, update=second)
    assert updated == older.job("responses", path=second)


def test_older_sleep_gives_memory_back_and_methods_update_weights(older, older_models):
    "vLLM 0.18 has no start_weight_update, so two methods are left"
    found = older.job("sleeping", folder=older_models)
    assert found["platform"] == "npu" and found["mode"] == "processed_logprobs"
    assert "no start_weight_update" in found["methods"]["update_weights"]
    for method in ("reload_weights", "load_weights"):
        awake, asleep, half, _, gap = found[method]
        assert asleep - awake > 8 * MIB and asleep > half
        assert gap < 1e-4 and found[f"{method} awake"] < 1e-4
    asleep, awake, gap = found["level 1"]
    assert asleep > awake and gap < 1e-4


def test_older_trainer_resumes(older, older_models, tmp_path):
    "Also that every import of the trainer works with NumPy 1, which this stack requires"
    common = dict(hf_path=f"{older_models}/qwen30", dtype="bfloat16")
    undisturbed = older.train(steps=3, **common)["history"]
    save = tmp_path / "state"
    begun = older.train(steps=2, save=save, **common)["history"]
    resumed = older.train(steps=1, load=save, **common)["history"]
    assert begun + resumed == undisturbed


def test_newest_engine_keeps_six_promises(newest, newest_models):
    checks = """greedy_equals_generate logprobs_are_teacher_forced truncation_renormalises
    altered_update_serves_nothing half_awake_sleeps sleep_wake_update""".split()
    assert_kept(newest, newest_models, checks)


def test_unknown_stack_is_named_with_those_there_are():
    with pytest.raises(SystemExit, match="'vllm-ascend-9'.* vllm-ascend-0.18.0, "):
        environment.main("vllm-ascend-9")
