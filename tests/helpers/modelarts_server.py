"""A ModelArts for tests: training jobs whose requests and answers are the classes of Huawei's SDK.

A request with a key that its class in the SDK does not have is refused, and an answer is made from its class,
so neither can drift from the published interface unnoticed.
"""

import http.server
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from huaweicloudsdkmodelarts import v1 as sdk
from local_server import serve


def unknown_keys(kind: type, value: dict) -> list[str]:
    "Keys of a body that a class of the SDK does not have, inner classes included"
    names = {kind.attribute_map[name]: inner for name, inner in kind.openapi_types.items()}
    found = []
    for key, inner in value.items():
        if key not in names:
            found.append(key)
            continue
        name = names[key].removeprefix("list[").removesuffix("]")
        for part in inner if isinstance(inner, list) else [inner]:
            if isinstance(part, dict) and hasattr(sdk, name):
                found += unknown_keys(getattr(sdk, name), part)
    return found


@dataclass
class Job:
    "A submitted job"

    body: dict
    phases: list[tuple[str, float]]  # (phase, seconds that it ran) of each look
    stopped: bool = False

    def look(self) -> tuple[str, float]:
        "The next phase; the last one stays"
        return self.phases.pop(0) if len(self.phases) > 1 else self.phases[0]


@dataclass
class Service:
    "The jobs of the service, and what goes wrong"

    address: str = ""
    script: list[tuple[str, float]] = field(default_factory=lambda: [("Completed", 60.0)])
    jobs: dict[str, Job] = field(default_factory=dict)
    refuse: dict[str, tuple[int, str, str]] = field(default_factory=dict)  # call -> error
    drop: int = 0  # so many answers are cut off
    on_look: Callable[[Job, str], None] = lambda job, phase: None  # e.g. writes the run
    calls: list[str] = field(default_factory=list)

    def answer(self, job_id: str, look: bool) -> dict:
        "A job, as the SDK's class has it"
        job = self.jobs[job_id]
        phase, seconds = job.look() if look else job.phases[0]
        if look:
            self.on_look(job, phase)
        response = sdk.JobResponse(
            kind="job",
            metadata=sdk.JobMetadataResponse(id=job_id, name=job.body["metadata"]["name"]),
            status=sdk.Status(phase=phase, duration=int(seconds * 1000)),
        )
        return plain(response)


def plain(model: Any) -> Any:
    "An object of the SDK as the service sends it"
    if hasattr(model, "attribute_map"):
        values = {
            model.attribute_map[name]: getattr(model, name) for name in model.openapi_types
        }
        return {key: plain(value) for key, value in values.items() if value is not None}
    return [plain(one) for one in model] if isinstance(model, list) else model


class Handler(http.server.BaseHTTPRequestHandler):
    "Answers one client"

    service: Service

    def answer(self, code: int, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        service = self.service
        body = json.loads(
            self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}"
        )
        parts = self.path.partition("?")[0].strip("/").split("/")[2:]  # v2, project
        call = " ".join([self.command, parts[0], *parts[2:]])
        service.calls.append(call)
        if service.drop > 0:
            service.drop -= 1
            self.connection.close()
            return
        if call in service.refuse:
            code, name, text = service.refuse[call]
            self.answer(code, {"error_code": name, "error_msg": text})
        elif call == "POST training-job-searches":
            jobs = [service.answer(one, look=False) for one in service.jobs]
            self.answer(200, {"total": len(jobs), "items": jobs})
        elif call == "POST training-jobs":
            self.create(body)
        elif call == "GET training-jobs":
            self.answer(200, service.answer(parts[1], look=True))
        elif call == "POST training-jobs actions":
            assert unknown_keys(sdk.JobActionType, body) == [], body
            job = service.jobs[parts[1]]
            job.stopped = body["action_type"] == "terminate"
            job.phases = [("Terminating", 0.0), ("Terminated", job.phases[0][1])]
            self.answer(202, service.answer(parts[1], look=False))
        else:
            self.answer(404, {"error_code": "APIGW.0101", "error_msg": "no such call"})

    do_POST = do_GET

    def create(self, body: dict) -> None:
        unknown = unknown_keys(sdk.Job, body)
        if unknown:
            told = f"unknown parameters {unknown}"
            self.answer(400, {"error_code": "ModelArts.0104", "error_msg": told})
            return
        name = f"job-{len(self.service.jobs) + 1}"
        self.service.jobs[name] = Job(body, list(self.service.script))
        self.answer(201, self.service.answer(name, look=False))


@contextmanager
def serve_modelarts() -> Iterator[Service]:
    "A service that nobody else uses"
    service = Service()
    with serve(Handler, service=service) as service.address:
        yield service
