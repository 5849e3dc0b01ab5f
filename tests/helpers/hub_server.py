"""A hub on loopback, as the client of `huggingface_hub` talks to one without Xet storage

Sign in, create a repository, ask how each file travels, large files by the LFS batch protocol, one commit.
A commit that names a large file which never arrived is refused, as by a real hub.
"""

import base64
import hashlib
import http.server
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import yaml
from local_server import serve

TOKEN = "hf_of_this_test"
LARGE = (".safetensors", ".bin")  # files that travel by LFS


@dataclass
class Hub:
    "What the hub holds"

    address: str = ""
    private: dict[str, bool] = field(default_factory=dict)  # repository -> its visibility
    files: dict[str, bytes] = field(default_factory=dict)  # repository/path -> content
    messages: list[str] = field(default_factory=list)  # of commits
    objects: dict[str, bytes] = field(default_factory=dict)  # sha256 -> large file
    calls: list[str] = field(default_factory=list)  # method and path, in order
    full: bool = False  # refuses large files

    def commit(self, repo: str, lines: list[dict]) -> dict:
        "Take a commit; raises `KeyError` when it names a file that never arrived"
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                self.files[f"{repo}/{value['path']}"] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[f"{repo}/{value['path']}"] = self.objects[value["oid"]]
        oid = hashlib.sha1(json.dumps(lines).encode()).hexdigest()
        url = f"{self.address}/{repo}/commit/{oid}"
        return {"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""}


class Handler(http.server.BaseHTTPRequestHandler):
    "Answers one client"

    hub: Hub
    protocol_version = "HTTP/1.1"

    def answer(self, code: int, content: object = None) -> None:
        body = b"" if content is None else json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def handle_call(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.calls.append(f"{self.command} {path}")
        body = self.body()
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if not known and not path.startswith("/lfs/"):
            self.answer(401, {"error": "Invalid username or password."})
        elif path == "/api/whoami-v2":
            self.answer(200, {"type": "user", "name": "me", "orgs": []})
        elif path == "/api/repos/create":
            self.create(json.loads(body))
        elif path == "/api/validate-yaml":
            self.answer(200, {"warnings": [], "errors": self.wrong_card(json.loads(body))})
        elif path.endswith("/preupload/main"):
            self.answer(200, {"files": [self.mode(f) for f in json.loads(body)["files"]]})
        elif path.endswith(".git/info/lfs/objects/batch"):
            self.answer(200, self.batch(json.loads(body)["objects"]))
        elif path.startswith("/lfs/") and self.command == "PUT":
            self.take(path.rpartition("/")[2], body)
        elif path.startswith("/verify/"):
            self.answer(200, {})
        elif path.endswith("/commit/main"):
            repo = path.removeprefix("/api/models/").removesuffix("/commit/main")
            lines = [json.loads(line) for line in body.splitlines()]
            self.answer(200, self.hub.commit(repo, lines))
        else:
            self.answer(404, {"error": "not found"})

    do_GET = do_POST = do_PUT = do_HEAD = handle_call

    def create(self, wanted: dict) -> None:
        "A repository; one that exists is a conflict"
        repo = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        if repo in self.hub.private:
            url = f"{self.hub.address}/{repo}"
            told = {"error": "You already created this model repo", "url": url}
            self.answer(409, told)
            return
        # what a client does not say is public
        self.hub.private[repo] = bool(wanted.get("private")) or (
            wanted.get("visibility") == "private"
        )
        self.answer(200, {"url": f"{self.hub.address}/{repo}", "name": repo})

    def wrong_card(self, asked: dict) -> list[dict]:
        "What is wrong with the metadata of a model card"
        _, metadata, _ = asked["content"].split("---\n", 2)
        known = {"library_name", "tags"}
        unknown = yaml.safe_load(metadata).keys() - known
        return [{"message": f"unknown key {name}"} for name in sorted(unknown)]

    def mode(self, file: dict) -> dict:
        large = file["path"].endswith(LARGE)
        mode = "lfs" if large else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}

    def batch(self, objects: list[dict]) -> dict:
        "Where each large file goes"
        answers = []
        for wanted in objects:
            answer = {"oid": wanted["oid"], "size": wanted["size"]}
            if self.hub.full:
                answer["error"] = {"code": 507, "message": "storage limit reached"}
            elif wanted["oid"] not in self.hub.objects:
                place = {"href": f"{self.hub.address}/lfs/{wanted['oid']}"}
                verify = {"href": f"{self.hub.address}/verify/{wanted['oid']}"}
                answer["actions"] = {"upload": place, "verify": verify}
            answers.append(answer)
        return {"transfer": "basic", "objects": answers}

    def take(self, oid: str, content: bytes) -> None:
        "A large file; one that is not what was announced is refused"
        if hashlib.sha256(content).hexdigest() != oid:
            self.answer(400, {"error": "checksum differs"})
            return
        self.hub.objects[oid] = content
        self.answer(200)

    def log_message(self, *args) -> None:
        "Be quiet"


@contextmanager
def serve_hub() -> Iterator[Hub]:
    "A hub that nobody else uses"
    hub = Hub()
    with serve(Handler, hub=hub) as hub.address:
        yield hub
