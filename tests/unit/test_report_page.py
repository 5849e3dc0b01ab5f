"""The report and the page of all runs in a real browser, as wide as a screen and as a phone

Nothing sticks out, nothing is logged, nothing is fetched."""

import re

import pytest

from cookbook_npu.config import RunConfig
from cookbook_npu.runs.folder import RunFolder, append_line, write_json
from cookbook_npu.runs.report import write_report

pytestmark = pytest.mark.lane("docs")

SHIM = {
    "name": "megatron.a_shim_with_a_long_name",
    "target": "megatron.core.tensor_parallel.random._set_cuda_rng_state." * 2,
    "state": "applied",
    "detail": "the sum of a uint32 view fails: " * 4,
    "reason": "a reason of some length, " * 8,
}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    "A run with all that a page can show, words of hostile length among it"
    config = RunConfig(
        recipe="demo", num_steps=200, output={"root": str(tmp_path_factory.mktemp("r"))}
    )
    record = {
        "group_id": "g",
        "loss_mask": [1, 0],
        "versions": [1, 2],
        "finish_reason": "stop",
        "text": "x" * 900,
        "reward": 0.5,
        "label": "L" * 300,
        "metadata": {"prompt": "<script>alert(1)</script>" + "p" * 400},
        "turns": [{"role": "policy"}, {"role": "observation"}],
    }
    with RunFolder.create(config) as run:
        run.save_stack(
            {"name": "simulated NPU", "count": 2, "simulated": True}, [SHIM] * 60
        )
        run.event("failure", error="e" * 500)
        run.save_settings(config)
        rows = [{"key": "data.prompt_data", "value": "v" * 300, "source": "s" * 200}]
        write_json(run.settings_file, [*run.settings(), *rows])
        for step in range(1, 201):
            row = {
                "step": step,
                "raw_reward": step / 200,
                "response_length_max": 9,
                "time/step": 1.0,
            }
            row |= {
                "response_length_mean": 3,
                "staleness/age_0_samples": 5,
                "time/rollout": 0.5,
            }
            append_line(run.metrics_file, row)
        run.save_samples(199, [record, record | {"reward": 0.0}, record | {"reward": 1.0}])
        return write_report(run)


def test_it_is_small_and_asks_nobody(page):
    text = page.read_text()
    assert len(text) < 2_000_000
    assert not re.search(r"<script|<link|@import|src=|url\(https?:", text)


def test_it_says_where_settings_came_from_and_whether_it_is_as_expected(page):
    text = page.read_text()
    assert re.search(r"num_steps</code></th>.*200</code>.*the notebook or program", text)
    assert "s" * 200 in text and "Everything else is at its default" in text
    # whether it is as expected is the first thing in the result
    result = text.index('<h2 id="result">')
    assert result < text.index("Not judged: no numbers are expected") < text.index("<dl")
