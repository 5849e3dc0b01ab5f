"""A run with one real tracker: `python tracker_jobs.py NAME ROOT SESSION`, one session after the other."""

import json
import os
import signal
import sys
from pathlib import Path

from cookbook_npu.config import override
from cookbook_npu.recipes import qwen3_4b_colocate
from cookbook_npu.runs.answers import AnswerRow, AnswerTable
from cookbook_npu.runs.folder import RunFolder
from cookbook_npu.runs.metrics import Tracker
from cookbook_npu.runs.trackers import PROJECT_ENV, open_trackers

# names as a run has them, one from the data, and what is left out
METRICS = {
    "eval_accuracy": 0.25,
    "eval_pass@4": 0.25,
    "eval_accuracy/level_AIME'24 (hard)": 0.125,
    "time/rollout": 1.5,
    "loss": float("nan"),
    "env/failed_groups": None,
}
# what each session keeps and takes: the last step of its checkpoint, and the steps after it
SESSIONS = {
    "first": [(-1, range(3))],
    "continues": [(2, range(3, 5))],
    "repeats": [(3, range(4, 7)), (4, range(5, 8))],  # the second time after a loss
}
ROW = AnswerRow("34+28=", "62", (("seventy-one", False),))
ANSWERS = AnswerTable(("after 10 steps",), (ROW,))


def handlers():
    "What a stop and an uncaught error do"
    numbers = (signal.SIGINT, signal.SIGTERM)
    return [signal.getsignal(number) for number in numbers], sys.excepthook


def main(name, root, session):
    values = {
        "output.trackers": [name],
        "output.root": root,
        "output.name": "run",
    }
    os.environ[PROJECT_ENV[name]] = "project"
    config = override(qwen3_4b_colocate("laptop"), values)
    if session == "first":
        folder = RunFolder.create(config)
    else:
        folder = RunFolder.open(Path(root, "run"), write=True)
    before = handlers()
    with folder:
        sinks = open_trackers(config, folder, SESSIONS[session][0][0])
        assert handlers() == before, "a handler was left behind"
        tracker = Tracker(sinks, None, folder.metrics_file, lambda: ANSWERS)
        for last, steps in SESSIONS[session]:
            folder.truncate_after(last)
            tracker.restart(last)
            for step in steps:
                reward = last + step / 8  # another one when the step is repeated
                tracker.log(step, {**METRICS, "raw_reward": reward})
        tracker.close(failed=session != "repeats")
    assert handlers() == before, "a handler was left behind"
    for sink in sinks:
        print(json.dumps({"id": sink.run_id, "lost": sink.lost}))


if __name__ == "__main__":
    main(*sys.argv[1:])
