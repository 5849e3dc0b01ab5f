"""A tiny GPT of megatron-core trains on the simulated NPU after nothing but `bootstrap("trainer")`."""

import pytest
from places import HELPERS
from ranks import run_ranks

pytestmark = pytest.mark.lane("devices")

TARGET = f"{HELPERS / 'shims_targets.py'}:train"


def train(ranks, **kwargs):
    """History of rank 0, after checking that all ranks agree, and the states of the shims."""
    (history, shims), *others = run_ranks(
        TARGET, ranks, kwargs=kwargs, bootstrap="trainer", timeout=300
    )
    assert all(other[0] == history for other in others)
    assert {state for _, state in shims} <= {"applied", "not needed"}
    return history


@pytest.fixture(scope="module")
def one_rank():
    return train(1)


def test_it_learns(one_rank):
    losses = [loss for loss, _ in one_rank]
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("layers", ["transformer_engine", "local"])
def test_two_ranks_with_sequence_parallelism_equal_one(one_rank, layers):
    """Stub layers and Megatron's own layers, with and without tensor parallelism, are the same model."""
    for (loss, norm), (loss_1, norm_1) in zip(
        train(2, tensor=2, sequence=True, layers=layers), one_rank, strict=True
    ):
        assert loss == pytest.approx(loss_1, abs=2e-5) and norm == pytest.approx(
            norm_1, rel=1e-4
        )


def test_two_data_parallel_ranks_equal_one(one_rank):
    """Each rank sees the same batch here, so the sharded optimizer must reproduce the single rank."""
    for got, expected in zip(train(2, tensor=1), one_rank, strict=True):
        assert got == pytest.approx(expected, rel=1e-5)


def test_bfloat16_with_recomputation_stays_close(one_rank):
    for (loss, norm), (loss_1, norm_1) in zip(
        train(2, tensor=2, sequence=True, dtype="bfloat16", recompute=True),
        one_rank,
        strict=True,
    ):
        assert loss == pytest.approx(loss_1, abs=0.02) and norm == pytest.approx(
            norm_1, rel=0.1
        )


def test_recomputation_changes_nothing_with_dropout():
    assert train(1, dropout=0.1, recompute=True) == train(1, dropout=0.1)
