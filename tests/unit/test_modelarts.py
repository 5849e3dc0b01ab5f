"""Training jobs of ModelArts: the real SDK, against a service made from the classes of the SDK."""

import shlex
import subprocess

import pytest

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
from cookbook_npu.errors import ConfigError

pytestmark = pytest.mark.lane("schedulers")

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
def test_the_command_starts_and_resumes_and_gets_the_signal_of_a_stop(exists, tmp_path):
    "In a shell whose `cookbook-npu` prints its words; the service signals the command's process"
    run = tmp_path / "runs" / "first"
    if exists:
        run.mkdir(parents=True)
    program = tmp_path / "cookbook-npu"
    program.write_text(
        "#!/bin/sh\ntrap 'exit 5' TERM\necho \"$@\"\nwhile :; do sleep 0.1; done\n"
    )
    program.chmod(0o755)
    line = shlex.split(resumable_command("qwen3_4b_colocate", "/data/a b.json", str(run)))
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    options = dict(env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)
    with subprocess.Popen(line, **options) as job:
        start = f"run --resume {run} --restart" if exists else "run qwen3_4b_colocate"
        assert job.stdout.readline().strip() == f"{start} -f /data/a b.json"
        job.terminate()
        assert job.wait(timeout=60) == 5


def test_a_lost_connection_is_not_a_lost_job(service):
    service.script = [("Running", 60), ("Completed", 90)]
    client = client_of(service)
    job_id = submit(client, JOB)
    service.drop = 3
    assert phases(client, job_id) == ["Running", "Completed"]
    service.refuse["GET training-jobs"] = (503, "APIGW.0202", "backend unavailable")
    with pytest.raises(ServiceUnreachable, match="a submitted job continues"):
        phases(client, job_id, patience_s=0.05)


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
