"""The smoke notebook from the command line: a layout passes, and a damaged number is named."""

import json

import pytest
from test_recipe import command
from whole_runs import preloaded

from cookbook_npu.errors import SmokeFailed
from cookbook_npu.runs.smoke import check_smoke, smoke_checks

pytestmark = pytest.mark.lane("runs")


def test_a_layout_passes_and_a_damaged_number_fails(tmp_path):
    "Experts, routing replay, and a resume; then the same folder with another last step"
    place = {"output.root": str(tmp_path), "output.name": "moe"}
    words = ("run", "smoke", "-p", "layout", "moe", "-p", "overrides", json.dumps(place))
    done = command(*words, env=preloaded())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "all 7 checks passed" in done.stdout and "from step 2" in done.stdout
    folder = tmp_path / "moe"
    checks = {check.name: check.value for check in smoke_checks(folder)}
    assert checks["steps, the last after a resume"] == 3
    assert 0 < checks["largest train_rollout_logprob_abs_diff"] < 1e-5
    metrics = folder / "metrics.jsonl"
    *lines, last = metrics.read_text().splitlines()
    row = json.loads(last)
    assert row["routing_replay/bytes_per_token"] > 3
    row["train_rollout_logprob_abs_diff"] = 0.3
    metrics.write_text("\n".join([*lines, json.dumps(row)]) + "\n")
    with pytest.raises(SmokeFailed, match="abs_diff is 0.3, expected at most 0.0001"):
        check_smoke(folder)
