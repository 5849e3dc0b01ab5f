"""Each tracker with its real package: what the package itself reads back is what metrics.jsonl holds."""

import importlib.util
import json
import os
import sqlite3
import struct
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
from tracker_jobs import SESSIONS

from cookbook_npu.runs.metrics import load_metrics, metric_points
from cookbook_npu.runs.trackers import TRACKERS

pytestmark = pytest.mark.lane("packages")

JOB = Path(__file__).parents[1] / "helpers" / "tracker_jobs.py"
Points = dict[str, list[tuple[int, float]]]  # by metric: step, value


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


def wandb_points(folder, run_id) -> Points:
    "The rows of all offline files of a run, in the protocol that wandb sends; its own counter rises"
    found, counters = defaultdict(list), []
    for file in sorted(folder.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb")):
        for record in wandb_records(file):
            if record.HasField("run"):
                run = record.run
                assert (run.run_id, run.project, run.run_group) == (
                    run_id,
                    "project",
                    "run",
                )
                assert "optim.learning_rate" in {i.key for i in run.config.update}
            if not record.HasField("history"):
                continue
            items = record.history.item
            row = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}
            assert row["step"] == row["_step"] == record.history.step.num
            counters.append(row["_step"])
            for name in row.keys() - {"step", "completions"}:
                if not name.startswith(("_", "completions")):
                    found[name].append((row["step"], row[name]))
    assert counters == sorted(set(counters))
    tables = list(folder.glob("wandb/offline-run-*/files/media/table/completions_*.json"))
    assert tables and "seventy-one" in tables[0].read_text()
    return found


def swanlab_points(folder, run_id) -> Points:
    "What SwanLab's dashboard reads: one experiment in its database, and its logs"
    database = sqlite3.connect(folder / "runs.swanlab")
    ((name,),) = database.execute("SELECT run_id FROM experiment").fetchall()
    assert name.endswith(run_id)
    found = {}
    for metric, place, kind in database.execute("SELECT name, folder, type FROM tag"):
        log = folder / name / "logs" / place / "1000.log"
        points = [json.loads(line) for line in log.read_text().splitlines()]
        if kind == "line":
            found[metric] = [(point["index"], point["data"]) for point in points]
        else:
            assert "seventy-one" in str(points)
    return found


def mlflow_points(folder, run_id) -> Points:
    "From MLflow's client; its names have fewer characters"
    from mlflow import MlflowClient

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = MlflowClient(tracking_uri=folder.as_uri())
    run = client.get_run(run_id)
    assert run.data.params["optim.learning_rate"]
    assert "replaces" in run.data.tags or len(list(folder.glob("*/*/meta.yaml"))) == 1
    texts = list(folder.glob(f"*/{run_id}/artifacts/completions/step_*.txt"))
    assert texts and "seventy-one" in texts[0].read_text()
    names = {"eval_pass_at_4": "eval_pass@4"}
    names["eval_accuracy.level_AIME_27_24 _28_hard_29_"] = (
        "eval_accuracy/level_AIME'24 (hard)"
    )
    return {
        names.get(name, name): [
            (m.step, m.value) for m in client.get_metric_history(run_id, name)
        ]
        for name in run.data.metrics
    }


READERS = {"wandb": wandb_points, "swanlab": swanlab_points, "mlflow": mlflow_points}


def test_every_tracker_is_read_back():
    assert READERS.keys() == TRACKERS.keys()


@pytest.mark.parametrize("name", READERS)
def test_a_tracker_holds_what_metrics_jsonl_holds(name, tmp_path):
    "After a first session, a resumed one, and one that repeats steps, also after the loss of its trainer"
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install 'cookbook-npu[{name}]'")
    # short: sockets lie there
    temporary = Path(tempfile.mkdtemp())
    environ = {**os.environ, "HOME": str(tmp_path), "TMPDIR": str(temporary)}
    for session in SESSIONS:
        done = subprocess.run(
            [sys.executable, JOB, name, tmp_path, session],
            capture_output=True,
            text=True,
            env=environ,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said = json.loads(done.stdout.splitlines()[-1])
        assert not said["lost"], done.stdout
        found = READERS[name](tmp_path / "run" / "trackers" / name, said["id"])
        metrics = load_metrics(tmp_path / "run")
        rows = {key: metric_points(metrics, key) for key in metrics if key != "step"}
        wanted = {key: points for key, points in rows.items() if points}
        assert {key: sorted(points) for key, points in found.items()} == wanted, session
    replaced = {"mlflow": 0, "swanlab": 3}.get(name, 2)
    assert len(list((tmp_path / "run").glob(f"truncated/*/{name}"))) == replaced
    assert not list(temporary.iterdir()), "left among temporary files"


def test_an_address_that_the_installed_mlflow_cannot_serve_names_the_remedy(tmp_path):
    if importlib.util.find_spec("mlflow") is None or importlib.util.find_spec("alembic"):
        pytest.skip("mlflow-skinny is not installed, or the whole mlflow is")
    environ = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/m.db"}
    words = [sys.executable, JOB, "mlflow", tmp_path, "first"]
    done = subprocess.run(words, capture_output=True, text=True, env=environ, timeout=300)
    assert "mlflow-skinny has no store for sqlite" in done.stdout, done.stdout + done.stderr
    assert "pip install mlflow" in done.stdout
