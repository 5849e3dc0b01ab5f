"""Each tracker with its real package: a run, the same run resumed, and what the package itself reads back."""

import importlib.util
import json
import os
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from cookbook_npu.runs.trackers import TRACKERS

pytestmark = pytest.mark.lane("packages")

JOB = Path(__file__).parents[1] / "helpers" / "tracker_jobs.py"
# step 2 is done again after the resume; the newer value is the one that counts
STEPS = [0, 1, 2, 2, 3, 4]


def wandb_records(file):
    "Each record of an offline file: a log in LevelDB's format of 32 KiB blocks, after a header of 7 bytes"
    from wandb.proto.wandb_internal_pb2 import Record

    data = file.read_bytes()
    assert data[:4] == b":W&B"
    place, parts = 7, b""
    while place < len(data):
        rest = 32768 - place % 32768
        if rest < 7:  # too little for a header: filled with zeros
            place += rest
            continue
        size, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def wandb_points(folder, run_id):
    "Step and reward of each row of both offline files, in the protocol that wandb sends"
    files = sorted(folder.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(files) == 2
    rows, ends = [], []
    for record in [record for file in files for record in wandb_records(file)]:
        if record.HasField("run"):
            assert (record.run.run_id, record.run.project) == (run_id, "project")
            assert "optim.learning_rate" in {i.key for i in record.run.config.update}
        if record.HasField("history"):
            items = record.history.item
            row = {i.key or i.nested_key[0]: json.loads(i.value_json) for i in items}
            if "raw_reward" not in row:  # the table of answers
                continue
            assert row["eval_pass@4"] == 0.25 and row["time/rollout"] == 1.5
            assert "loss" not in row and "env/failed_groups" not in row
            rows.append((row["step"], row["raw_reward"]))
        if record.HasField("exit"):
            ends.append(record.exit.exit_code)
    assert ends == [1, 0]  # the first start was cut off
    tables = list(folder.glob("wandb/offline-run-*/files/media/table/completions_*.json"))
    assert len(tables) == 6 and "seventy-one" in tables[0].read_text()
    return rows


def swanlab_points(folder, run_id):
    "Step and reward of each point that SwanLab's dashboard reads"
    rows = []
    for run in sorted(folder.glob(f"run-*-{run_id}")):
        found = []
        for log in run.glob("logs/*/*.log"):
            points = [json.loads(line) for line in log.read_text().splitlines()]
            if isinstance(points[0]["data"], list):
                continue  # a text
            if points[0]["data"] >= 0.5 and len({p["data"] for p in points}) == 3:
                found = [(p["index"], p["data"]) for p in points]
        rows += found
    texts = list(folder.glob("run-*/media/text/*.txt"))
    assert texts and "seventy-one" in texts[0].read_text()
    assert (folder / "runs.swanlab").exists()  # the dashboard's database
    return rows


def mlflow_points(folder, run_id):
    "Step and reward, from MLflow's client"
    from mlflow import MlflowClient

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = MlflowClient(tracking_uri=folder.as_uri())
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["optim.learning_rate"]
    assert run.data.metrics["eval_pass_at_4"] == 0.25
    assert set(run.data.metrics) == {
        "raw_reward",
        "eval_accuracy",
        "eval_pass_at_4",
        "time/rollout",
    }
    texts = list(folder.glob(f"*/{run_id}/artifacts/completions/step_*.txt"))
    assert len(texts) == 5 and "seventy-one" in texts[0].read_text()
    history = client.get_metric_history(run_id, "raw_reward")
    return sorted((point.step, point.value) for point in history)


def clearml_points(folder, run_id):
    "Step and reward, from the session that ClearML would send"
    rows = []
    with zipfile.ZipFile(folder / "offline" / f"{run_id}.zip") as session:
        task = json.loads(session.read("task.json"))
        assert (task["id"], task["name"]) == (run_id, "run")
        assert "seventy-one" in session.read("log.jsonl").decode()
        for line in session.read("metrics.jsonl").decode().splitlines():
            for event in json.loads(line):
                if event["metric"] == "raw_reward":
                    rows.append((event["iter"], event["value"]))
    return rows


READERS = {
    "wandb": wandb_points,
    "swanlab": swanlab_points,
    "mlflow": mlflow_points,
    "clearml": clearml_points,
}


def test_every_tracker_is_read_back():
    assert READERS.keys() == TRACKERS.keys()


LONG = ("clearml",)
CASES = [
    pytest.param(name, marks=pytest.mark.lane("runs")) if name in LONG else name
    for name in READERS
]


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_continues_its_tracker_run(name, tmp_path):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install 'cookbook-npu[{name}]'")
    # short: sockets lie there
    temporary = Path(tempfile.mkdtemp())
    environ = {**os.environ, "HOME": str(tmp_path), "TMPDIR": str(temporary)}
    ids = set()
    for ends in ("fails", "finishes"):
        done = subprocess.run(
            [sys.executable, JOB, name, tmp_path, ends],
            capture_output=True,
            text=True,
            env=environ,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said = json.loads(done.stdout.splitlines()[-1])
        assert not said["lost"], done.stdout
        ids.add(said["id"])
    assert not list(temporary.iterdir()), "left among temporary files"
    (run_id,) = ids
    rows = READERS[name](tmp_path / "run" / "trackers" / name, run_id)
    assert rows == [(step, 0.5 + step) for step in STEPS]
