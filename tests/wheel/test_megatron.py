"""Megatron on the real torch_npu: two tensor-parallel ranks train as they do on the simulated NPU."""

import pytest
from places import HELPERS
from ranks import run_ranks

TARGET = f"{HELPERS / 'shims_targets.py'}:train"


@pytest.mark.parametrize(
    "layers, sequence", [("local", True), ("transformer_engine", False)]
)
def test_both_lanes_train_alike(lane, layers, sequence):
    """Same losses and gradient norms over three steps of the distributed optimizer: same kernels,
    different runtimes.
    """
    settings = dict(tensor=2, layers=layers, sequence=sequence)
    simulated = run_ranks(TARGET, 2, settings, bootstrap="trainer", timeout=300)
    real = lane(TARGET, ranks=2, kwargs=settings, enter="trainer")
    for (history, _), (expected, _) in zip(real, simulated, strict=True):
        for got, want in zip(history, expected, strict=True):
            assert got == pytest.approx(want, abs=1e-6)


def test_an_optimizer_on_the_host_trains_alike(lane):
    "HybridDeviceOptimizer takes the NPU for its device, with streams and pinned memory of torch_npu"
    settings = dict(dtype="bfloat16", offload=True)
    ((simulated, _),) = run_ranks(TARGET, 1, settings, bootstrap="trainer", timeout=300)
    ((real, _),) = lane(TARGET, kwargs=settings, enter="trainer")
    for got, want in zip(real, simulated, strict=True):
        assert got == pytest.approx(want, abs=1e-3)
    assert real[-1][0] < real[0][0] - 0.01


def test_a_checkpoint_comes_back(lane, tmp_path):
    (history, changed), (_, also) = lane(
        "checkpointed", ranks=2, kwargs=dict(folder=str(tmp_path)), enter="trainer"
    )
    assert history[-1][0] < history[0][0] and changed == also == []
    assert list(tmp_path.glob("*.distcp")) and (tmp_path / "metadata.json").is_file()
