"""A model hub on loopback that answers the real clients of `huggingface_hub` and `modelscope`."""

import hashlib
import http.server
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from local_server import serve


@dataclass
class ModelHub:
    "The repositories of a hub"

    address: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)  # repository -> files
    gated: set[str] = field(default_factory=set)  # repositories that need a token
    calls: list[str] = field(default_factory=list)  # method and path, in order

    def revision(self, repo: str) -> str:
        "The commit of a repository: a checksum of its files"
        names = sorted(self.files[repo].items())
        return hashlib.sha1(repr(names).encode()).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    "Answers one client"

    hub: ModelHub
    protocol_version = "HTTP/1.1"

    def answer(self, code: int, body: bytes = b"", headers: dict[str, str] | None = None):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_json(self, code: int, content: object, **headers: str) -> None:
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        kind = {"Content-Type": "application/json"}
        self.answer(code, json.dumps(content).encode(), kind | headers)

    def handle_call(self) -> None:
        path = urlsplit(self.path).path
        self.hub.calls.append(f"{self.command} {self.path}")
        parts = path.strip("/").split("/")
        if path == "/":
            self.answer(200)
        elif path.startswith("/api/v1/"):
            self.modelscope(parts[2:])
        elif parts[:2] == ["api", "models"]:
            self.describe("/".join(parts[2:4]), parts[4:])
        elif "resolve" in parts:
            self.send_file("/".join(parts[:2]), "/".join(parts[4:]))
        else:
            self.answer_json(404, {"error": "not found"})

    do_GET = do_HEAD = do_POST = handle_call

    def known(self, repo: str) -> bool:
        "Whether a repository may be read; answers otherwise as a hub does"
        if repo not in self.hub.files:
            code = "RepoNotFound"
            self.answer_json(404, {"error": "Repository not found"}, X_Error_Code=code)
        elif repo in self.hub.gated and not self.headers.get("Authorization"):
            told = f"Access to model {repo} is restricted."
            self.answer_json(401, {"error": told}, X_Error_Code="GatedRepo")
        else:
            return True
        return False

    def describe(self, repo: str, rest: list[str]) -> None:
        "GET /api/models/REPO/revision/main, /api/models/REPO/tree/COMMIT"
        if not self.known(repo):
            return
        sha = self.hub.revision(repo)
        files = self.hub.files[repo]
        if rest[:1] == ["tree"]:
            entries = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(content),
                    "oid": hashlib.sha1(content).hexdigest(),
                }
                for name, content in files.items()
            ]
            self.answer_json(200, entries)
            return
        names = [{"rfilename": name} for name in files]
        self.answer_json(200, {"id": repo, "sha": sha, "siblings": names, "tags": []})

    def send_file(self, repo: str, name: str) -> None:
        "HEAD and GET /REPO/resolve/COMMIT/NAME"
        if not self.known(repo):
            return
        content = self.hub.files[repo].get(name)
        if content is None:
            self.answer_json(404, {"error": "no entry"}, X_Error_Code="EntryNotFound")
            return
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": self.hub.revision(repo),
            "Content-Type": "application/octet-stream",
        }
        self.answer(200, content, headers)

    def modelscope(self, parts: list[str]) -> None:
        "GET /api/v1/models/REPO/..., as modelscope's client asks"
        repo = "/".join(parts[1:3])
        query = {k: v[0] for k, v in parse_qs(urlsplit(self.path).query).items()}
        files = self.hub.files.get(repo)
        if parts[0] != "models" or files is None:
            told = {"Code": 10010205001, "Message": "record not found", "Success": False}
            self.answer_json(404, told)
        elif parts[3:] == ["repo", "files"]:
            rows = [
                {
                    "Path": name,
                    "Name": name,
                    "Type": "blob",
                    "Size": len(content),
                    "Sha256": hashlib.sha256(content).hexdigest(),
                    "Revision": self.hub.revision(repo),
                }
                for name, content in files.items()
            ]
            self.answer_json(200, {"Code": 200, "Data": {"Files": rows}, "Success": True})
        elif parts[3:] == ["repo"]:
            self.answer(200, files[query["FilePath"]])
        elif parts[3:] == ["revisions"]:
            branch = {"Revision": "master", "CreatedAt": 0}
            data = {"RevisionMap": {"Branches": [branch], "Tags": []}}
            self.answer_json(200, {"Code": 200, "Data": data, "Success": True})
        else:
            self.answer_json(200, {"Code": 200, "Data": {"Name": repo}, "Success": True})


@contextmanager
def serve_models() -> Iterator[ModelHub]:
    "A hub that nobody else uses; it answers both clients"
    hub = ModelHub()
    with serve(Handler, hub=hub) as hub.address:
        yield hub
