"""A run with one real tracker: `python tracker_jobs.py NAME ROOT fails`; `... finishes` goes on with it."""

import json
import signal
import sys
from pathlib import Path

from cookbook_npu.config import override
from cookbook_npu.recipes import qwen3_4b_colocate
from cookbook_npu.runs.answers import AnswerRow, AnswerTable
from cookbook_npu.runs.folder import RunFolder
from cookbook_npu.runs.metrics import Tracker
from cookbook_npu.runs.trackers import open_trackers

# names as a run has them, and what is left out
METRICS = {
    "raw_reward": 0.5,
    "eval_accuracy": 0.25,
    "eval_pass@4": 0.25,
    "time/rollout": 1.5,
    "loss": float("nan"),
    "env/failed_groups": None,
}

ROW = AnswerRow("34+28=", "62", (("seventy-one", False),))
ANSWERS = AnswerTable(("after 10 steps",), (ROW,))


def handlers():
    "What a stop and an uncaught error do"
    numbers = (signal.SIGINT, signal.SIGTERM)
    return [signal.getsignal(number) for number in numbers], sys.excepthook


def main(name, root, ends):
    values = {
        "output.trackers": [name],
        "output.root": root,
        "output.name": "run",
        "output.project": "project",
    }
    config = override(qwen3_4b_colocate("laptop"), values)
    again = ends == "finishes"
    if again:
        folder = RunFolder.open(Path(root, "run"), write=True)
    else:
        folder = RunFolder.create(config)
    before = handlers()
    with folder:
        sinks = open_trackers(config, folder, resume=again)
        assert handlers() == before, "a handler was left behind"
        tracker = Tracker(sinks, answers=lambda: ANSWERS)
        first = 2 if again else 0
        for step in range(first, first + 3):
            tracker.log(step, {**METRICS, "raw_reward": 0.5 + step})
        tracker.close(failed=not again)
    assert handlers() == before, "a handler was left behind"
    print(json.dumps({"id": sinks[0].run_id, "lost": sinks[0].lost}))


if __name__ == "__main__":
    main(*sys.argv[1:])
