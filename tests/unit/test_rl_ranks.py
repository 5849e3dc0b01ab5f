"""The rl functions give on 2 and 4 processes what they give on one: gradients, sums, whitening, errors."""

import pytest
import rl_jobs
import torch
from places import HELPERS

from cookbook_npu.rl.loss_aggregation import LOSS_AGG_MODES
from cookbook_npu.testing.ranks import run_ranks


@pytest.fixture(scope="module", params=[2, 4])
def answers(request):
    "What each rank found"
    return run_ranks(f"{HELPERS / 'rl_jobs.py'}:everything", request.param, timeout=240)


@pytest.mark.parametrize("loss_agg_mode", LOSS_AGG_MODES)
def test_gradients_do_not_depend_on_data_parallelism(answers, loss_agg_mode):
    alone = torch.tensor(rl_jobs.data_parallel(0, 1, None)[loss_agg_mode])
    for answer in answers:
        assert torch.allclose(
            torch.tensor(answer["data_parallel"][loss_agg_mode]),
            alone,
            rtol=1e-12,
            atol=1e-14,
        )


def test_sequence_ratios_do_not_depend_on_context_parallelism(answers):
    gradient, weights = rl_jobs.context_parallel(0, 1, None)
    for answer in answers:
        assert torch.allclose(
            torch.tensor(answer["context_parallel"][0]),
            torch.tensor(gradient),
            rtol=1e-12,
            atol=1e-14,
        )
    for i, whole in enumerate(weights):
        assert [
            w for answer in answers for w in answer["context_parallel"][1][i]
        ] == pytest.approx(whole, abs=1e-12)
    # The veto acted on some sequence and not on all, so the comparison saw both.
    flat = [w for row in weights for w in row]
    assert any(w == 0 for w in flat) and any(w > 0 for w in flat)


def test_whitening_spans_ranks_of_which_one_is_empty(answers):
    values = (
        torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        + 100
    )
    found = torch.tensor(
        [x for answer in answers for x in answer["fine"]], dtype=torch.float64
    )
    assert torch.allclose(
        found, (values - values.mean()) / (values.var() + 1e-8).sqrt(), rtol=0, atol=1e-9
    )


def test_a_bad_rank_fails_all_ranks_alike(answers):
    errors = [answer["nan"] for answer in answers]
    message = "NumericsError: values to whiten are not finite"
    assert len(set(errors)) == 1 and errors[0].startswith(message), errors


def test_nothing_to_whiten_is_zero_on_every_rank(answers):
    assert not any(value for answer in answers for value in answer["masked"])


def test_a_wrong_shape_on_one_rank_leaves_no_rank_waiting(answers):
    kinds = [answer["shape"].split(":")[0] for answer in answers]
    assert kinds == ["NumericsError", "DataError", *["NumericsError"] * (len(answers) - 2)]
    assert "on rank 1 (1) of" in answers[0]["shape"]
