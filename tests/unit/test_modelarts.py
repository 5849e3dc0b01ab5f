"""Training jobs of ModelArts: the real SDK, against a service made from the classes of the SDK."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import papermill
import pytest
from places import ROOT
from whole_runs import STEPS, parameters, preloaded, rows

from cookbook_npu.cluster.modelarts import (
    ServiceError,
    ServiceUnreachable,
    job_request,
    open_client,
    resumable_command,
    stop,
    submit,
    watch,
)
from cookbook_npu.config import OutputConfig, save_config
from cookbook_npu.errors import ConfigError
from cookbook_npu.recipes import find_recipe, qwen3_4b_colocate
from cookbook_npu.runs.folder import RunFolder, append_line

pytestmark = pytest.mark.lane("schedulers")

NOTEBOOK = ROOT / "nbs" / "tutorials" / "modelarts.ipynb"
KEYS = {"HUAWEICLOUD_SDK_AK": "access", "HUAWEICLOUD_SDK_SK": "secret", "PROJECT_ID": "p1"}
JOB = job_request(
    "first",
    resumable_command("qwen3_4b_colocate", "/data/first.json", "/data/runs/first"),
    image="lab/cookbook-npu:910b",
    flavor="modelarts.pool.visual.8xlarge",
    hours=4,
    disk="192.168.0.10:/",
    pool="pool-1",
    log="obs://bucket/logs/",
    preemptible=True,
)


@pytest.fixture
def service():
    pytest.importorskip(
        "huaweicloudsdkmodelarts.v1",
        reason="huaweicloudsdkmodelarts is not installed (pip install huaweicloudsdkmodelarts)",
    )
    from modelarts_server import serve_modelarts

    with serve_modelarts() as found:
        yield found


def client_of(service):
    return open_client(KEYS | {"MODELARTS_ENDPOINT": service.address})


def phases(client, job_id, **options):
    found = watch(client, job_id, **{"hours": 4, "every_s": 0.01} | options)
    return [state.phase for state in found]


def test_a_job_is_submitted_watched_and_not_twice(service):
    service.script = [("Pending", 0), ("Running", 60), ("Running", 120), ("Completed", 180)]
    client = client_of(service)
    job_id = submit(client, JOB)
    assert service.jobs[job_id].body == JOB
    with pytest.raises(ConfigError, match=f"first .{job_id}. Pending.*Watch it by its id"):
        submit(client, JOB)
    assert phases(client, job_id) == ["Pending", "Running", "Running", "Completed"]
    assert submit(client, JOB) != job_id


def test_the_service_knows_every_key_of_the_request(service):
    client = client_of(service)
    with pytest.raises(ServiceError, match="400 ModelArts.0104.*flavour"):
        submit(client, JOB | {"spec": JOB["spec"] | {"flavour": "8x"}})


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((400, "ModelArts.2775", "insufficient quota of the pool"), "smaller flavor"),
        ((403, "ModelArts.0203", "no permission"), "CommonOperations"),
        (
            (401, "APIGW.0301", "Incorrect IAM authentication: token expired"),
            "Get new keys",
        ),
    ],
)
def test_a_refusal_names_the_remedy(answer, words, service):
    service.refuse["POST training-jobs"] = answer
    with pytest.raises(ServiceError, match=words) as raised:
        submit(client_of(service), JOB)
    assert not isinstance(raised.value, ServiceUnreachable)
    assert not service.jobs


def test_a_preempted_job_goes_on(service):
    "The platform takes the devices away and starts the job again: the same command resumes"
    service.script = [("Running", 60), ("Pending", 60), ("Running", 90), ("Completed", 99)]
    client = client_of(service)
    job_id = submit(client, JOB)
    assert phases(client, job_id) == ["Running", "Pending", "Running", "Completed"]


@pytest.mark.parametrize("exists", [False, True])
def test_the_command_starts_and_resumes(exists, tmp_path):
    "In a shell whose `cookbook-npu` prints its words"
    run = tmp_path / "runs" / "first"
    if exists:
        run.mkdir(parents=True)
    program = tmp_path / "cookbook-npu"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    line = resumable_command("qwen3_4b_colocate", "/data/a b.json", str(run))
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(["sh", "-c", line], env=env, capture_output=True, text=True)
    start = f"run --resume {run} --restart" if exists else "run qwen3_4b_colocate"
    assert done.stdout.strip() == f"{start} -f /data/a b.json"


@pytest.mark.lane("runs")
def test_more_steps_in_the_file_continue_a_finished_run(undisturbed, tmp_path):
    "The command as a job executes it: a run of all its steps is left alone until one more is asked for"
    run = tmp_path / "runs" / "first"
    shutil.copytree(undisturbed, run, symlinks=True)
    file = tmp_path / "first.json"
    line = resumable_command("qwen3_4b_colocate", str(file), str(run))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for steps in (STEPS, STEPS + 1):
        given = parameters(run.parent, "first", steps=steps)
        del given["overrides"]["output.resume"], given["overrides"]["output.restart"]
        file.write_text(json.dumps(given))
        env = preloaded() | {"PATH": path}
        done = subprocess.run(
            ["sh", "-c", line], cwd=ROOT, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("has all its steps" in done.stdout) is (steps == STEPS)
        assert rows(run)[-1]["step"] == steps


def test_a_lost_connection_is_not_a_lost_job(service):
    service.script = [("Running", 60), ("Completed", 90)]
    client = client_of(service)
    job_id = submit(client, JOB)
    service.drop = 3
    assert phases(client, job_id) == ["Running", "Completed"]
    service.refuse["GET training-jobs"] = (503, "APIGW.0202", "backend unavailable")
    with pytest.raises(ServiceUnreachable, match="a submitted job continues"):
        phases(client, job_id, patience_s=0.05)


def test_keys_that_expire_end_the_watching_alone(service):
    service.script = [("Running", 60), ("Running", 90), ("Completed", 90)]
    client = client_of(service)
    job_id = submit(client, JOB)
    states = watch(client, job_id, hours=4, every_s=0.01)
    assert next(states).phase == "Running"
    service.refuse["GET training-jobs"] = (401, "APIGW.0301", "token expired")
    with pytest.raises(ServiceError, match="watch the job by its id: it continues"):
        next(states)
    assert not service.jobs[job_id].stopped
    service.refuse.clear()
    assert phases(client_of(service), job_id)[-1] == "Completed"


def test_the_budget_stops_the_job(service):
    service.script = [("Running", 3000), ("Running", 3700), ("Running", 3700)]
    client = client_of(service)
    job_id = submit(client, JOB)
    assert phases(client, job_id, hours=1)[-1] == "Terminated"
    assert service.jobs[job_id].stopped
    assert service.calls.count("POST training-jobs actions") == 1


def test_stop(service):
    service.script = [("Running", 60)]
    client = client_of(service)
    job_id = submit(client, JOB)
    stop(client, job_id)
    assert phases(client, job_id) == ["Terminating", "Terminated"]


def run_of(folder):
    "What the job writes to the shared disk: a run of two steps"
    output = OutputConfig(root=str(folder / "runs"), name="first")
    config = qwen3_4b_colocate(num_steps=2).model_copy(update={"output": output})
    with RunFolder.create(config) as run:
        run.save_stack({"name": "simulated NPU", "count": 2, "simulated": True})
        for step, reward in enumerate((0.25, 0.5), 1):
            append_line(run.metrics_file, {"step": step, "raw_reward": reward})


def test_the_notebook_submits_watches_and_reports(service, tmp_path, monkeypatch):
    for key, value in (KEYS | {"MODELARTS_ENDPOINT": service.address}).items():
        monkeypatch.setenv(key, value)
    service.script = [("Pending", 0), ("Running", 60), ("Running", 90), ("Completed", 99)]

    def on_look(job, phase):
        "The run appears while the job runs"
        if phase == "Running" and not (tmp_path / "runs").exists():
            run_of(tmp_path)

    service.on_look = on_look
    given = {"disk_here": str(tmp_path), "submit_job": True, "every_s": 0.1}
    made = tmp_path / "made.ipynb"
    papermill.execute_notebook(NOTEBOOK, made, given, cwd=tmp_path, kernel_name="python3")
    cells = json.loads(made.read_text())["cells"]
    text = "".join(
        "".join(output.get("text", ()))
        for cell in cells
        for output in cell.get("outputs", ())
    )
    assert "first (job-1) Completed" in text and "step 2 raw_reward 0.500" in text
    assert f"{tmp_path}/runs/first/report.html" in text
    assert (tmp_path / "runs" / "first" / "report.html").is_file()
    (job,) = service.jobs.values()
    told = json.loads((tmp_path / "first.json").read_text())
    assert "/data/first.json" in job.body["algorithm"]["command"]
    place = {"output.root": "/data/runs", "output.name": "first"}
    assert place.items() <= told["overrides"].items()
    assert told["overrides"]["data.eval_data"].startswith("/data/")


def cells_of_the_plan(given):
    "The parameters of the notebook with some replaced, and its cell with the plan, executed"
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names = {}
    exec(code[0] + "\n" + code[1], names)
    names |= given
    (plan,) = [text for text in code if "check_hours" in text]
    exec(plan, names)
    return names


def test_the_notebook_fits_its_hours_and_refuses_a_run_that_does_not(tmp_path):
    given = {"disk_here": str(tmp_path)}
    names = cells_of_the_plan(given)
    assert 0 < names["plan"].run_seconds() < 3600 * names["hours"]
    assert names["here"]["model"] == f"{tmp_path}/Qwen3-4B"
    assert names["parameters"]["model"] == "/data/Qwen3-4B"
    with pytest.raises(ConfigError, match="stopped after 6 hours, near step"):
        cells_of_the_plan(given | {"num_steps": 100})
    run = names["folder"]
    run.mkdir(parents=True)
    save_config(find_recipe(names["recipe"])(**names["parameters"]), run / "config.json")
    for step in (1, 2):
        append_line(run / "metrics.jsonl", {"step": step, "raw_reward": 0.5})
    with pytest.raises(ConfigError, match="the run has 2 steps .* nothing is left to do"):
        cells_of_the_plan(given | {"num_steps": 2})
    cells_of_the_plan(given | {"num_steps": 2, "job_id": "job-1"})  # only watched
    cells_of_the_plan(given | {"num_steps": 21})  # more steps: the run is resumed
    with pytest.raises(ConfigError, match="differs in model.path"):
        cells_of_the_plan(given | {"model": "/data/Qwen3-8B"})


@pytest.mark.parametrize(("user", "flag"), [("0", True), ("1000", False)])
def test_make_lab_allows_root_to_root_alone(user, flag, tmp_path):
    "Most NPU containers run as root, where JupyterLab refuses to start"
    fake = tmp_path / "id"
    fake.write_text(f"#!/bin/sh\necho {user}\n")
    fake.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    words = ["make", "-n", "lab"]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    (line,) = [line for line in done.stdout.splitlines() if "jupyter lab" in line]
    assert ("--allow-root" in line) is flag
    assert "--ServerApp.ip=127.0.0.1" in line
