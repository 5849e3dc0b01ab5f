"""Losses give on 2 and 4 processes the gradients that they give on one."""

import pytest
import rl_jobs
import torch
from places import HELPERS
from ranks import run_ranks

from cookbook_npu.rl.loss_aggregation import LOSS_AGG_MODES


@pytest.fixture(scope="module", params=[2, 4])
def answers(request):
    "What each rank found"
    return run_ranks(f"{HELPERS / 'rl_jobs.py'}:gradients", request.param, timeout=240)


@pytest.mark.parametrize("loss_agg_mode", LOSS_AGG_MODES)
def test_gradients_do_not_depend_on_data_parallelism(answers, loss_agg_mode):
    alone = torch.tensor(rl_jobs.data_parallel(0, 1, None)[loss_agg_mode])
    for answer in answers:
        assert torch.allclose(
            torch.tensor(answer[loss_agg_mode]),
            alone,
            rtol=1e-12,
            atol=1e-14,
        )
