"""Megatron, its optimizer and checkpoints on the real torch_npu and MindSpeed, as the product builds them."""

import pytest
from ranks import run_ranks

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


@pytest.fixture(scope="session")
def simulated(models):
    "The same three steps on the simulated NPU, in the environment of the other tests"
    kwargs = dict(hf_path=f"{models}/qwen30")
    return run_ranks("real_stack.jobs:train", 1, kwargs, bootstrap="trainer")[0]["history"]


def close(found, wanted, dtype):
    for got, want in zip(found, wanted, strict=True):
        assert got == pytest.approx(want, rel=TOLERANCE[dtype], abs=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trains_like_the_simulated_npu(either, models, simulated, dtype):
    found = either.train(hf_path=f"{models}/qwen30", dtype=dtype)
    assert found["adaptor"] == ("mindspeed" if either.mindspeed else "none")
    # MindSpeed's norms come in float32, which the distributed optimizer cannot save
    assert found["types"] == [f"torch.{dtype}"]
    close(found["history"], simulated, dtype)


def test_experts_of_mindspeed_equal_the_products_own(
    with_mindspeed, without_mindspeed, models
):
    "EP2: a grouped matmul of the NPU against one matmul for each expert"
    options = dict(hf_path=f"{models}/qwen3_moe0", dtype="bfloat16", expert=2)
    theirs = with_mindspeed.train(2, **options)["history"]
    ours = without_mindspeed.train(2, **options)["history"]
    close(theirs, ours, "bfloat16")


@pytest.mark.parametrize(
    "first, second, offload",
    [
        (1, 1, False),
        (2, 2, False),
        (2, 1, False),
        (1, 2, False),
        (1, 1, True),
        (2, 2, True),
    ],
)
def test_resumed_run_equals_an_undisturbed_one(
    stack, models, tmp_path, first, second, offload
):
    "Two steps, a checkpoint, two more in fresh processes, in bfloat16; from one layout into another, too"
    common = dict(hf_path=f"{models}/qwen30", dtype="bfloat16", offload=offload)
    train = stack.train
    undisturbed = train(first, tensor=first, steps=4, **common)["history"]
    save = tmp_path / "state"
    begun = train(first, tensor=first, steps=2, save=save, **common)["history"]
    resumed = train(second, tensor=second, steps=2, load=save, **common)
    assert begun == undisturbed[:2]
    if stack.mindspeed:
        assert resumed["shims"]["mindspeed.optimizer_state"] == "applied"
    if first == second:
        assert resumed["history"] == undisturbed[2:]
    else:
        close(resumed["history"], undisturbed[2:], "bfloat16")
