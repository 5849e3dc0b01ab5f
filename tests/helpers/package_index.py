"""What the package index says of a wheel, without downloading the wheel.

METADATA comes from the file beside the wheel where the index has one (PEP 658), else from the end of the
wheel itself, read in ranges. Read once, into the user's cache.
"""

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
import urllib.request
import zipfile
from email.message import Message
from email.parser import HeaderParser
from html.parser import HTMLParser
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urldefrag, urljoin

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from cookbook_npu.npu.simulator.toolchain import cache_root

INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")


def folder() -> Path:
    return cache_root() / "wheel_metadata"


def offline_reason() -> str | None:  # none: the index answers, or is not needed
    "Why the index cannot be asked"
    try:
        urllib.request.urlopen(f"{INDEX}/packaging/", timeout=10).close()
    except (URLError, TimeoutError) as e:
        return f"the package index {INDEX} does not answer: {e}"
    return None


class _Links(HTMLParser):
    "File name -> address, of a page of the index"

    def __init__(self, page: str):
        super().__init__()
        self.page = page
        self.found: dict[str, str] = {}
        self.address = ""

    def handle_starttag(self, tag, attrs):
        if tag == "a":
            self.address = urldefrag(urljoin(self.page, dict(attrs)["href"])).url

    def handle_data(self, data):
        if self.address and data.strip():
            self.found[data.strip()] = self.address
            self.address = ""


def wheel_links(name: str) -> dict[str, str]:
    "Wheel -> address, of every release of a package"
    return {f: link for f, link in release_files(name).items() if f.endswith(".whl")}


def release_files(name: str) -> dict[str, str]:
    "Wheel or source distribution -> address, of every release of a package; kept in the cache"
    kept = folder() / f"{canonicalize_name(name)}.files.json"
    if kept.is_file():
        return json.loads(kept.read_text())
    page = f"{INDEX}/{canonicalize_name(name)}/"
    links = _Links(page)
    try:
        links.feed(urllib.request.urlopen(page, timeout=60).read().decode())
    except HTTPError as e:
        if e.code != 404:
            raise
    _keep(kept, json.dumps(links.found))
    return links.found


def wheels(
    name: str, version: str, arch: str = "aarch64", python: str = "cp311"
) -> list[str]:
    "Wheels of a release for an architecture and a Python"
    fitting = []
    for file in wheel_links(name):
        _, found, _, tags = parse_wheel_filename(file)
        for tag in tags:
            here = tag.platform == "any" or (
                "linux" in tag.platform and tag.platform.endswith(arch)
            )
            runs = tag.abi in ("none", "abi3", python)
            if found == Version(version) and here and runs:
                if tag.interpreter in (python, "py3") or tag.abi == "abi3":
                    fitting.append(file)
    return sorted(set(fitting))


class _Remote(io.RawIOBase):
    "A file on a server that is read in ranges"

    def __init__(self, address: str):
        self.address = address
        ask = urllib.request.Request(address, method="HEAD")
        with urllib.request.urlopen(ask, timeout=60) as answer:
            self.size = int(answer.headers["Content-Length"])
        self.position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.position = offset + (0, self.position, self.size)[whence]
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer) -> int:
        end = min(self.position + len(buffer), self.size)
        if end <= self.position:
            return 0
        wanted = {"Range": f"bytes={self.position}-{end - 1}"}
        ask = urllib.request.Request(self.address, headers=wanted)
        with urllib.request.urlopen(ask, timeout=60) as answer:
            assert answer.status == 206, f"{self.address}: the index serves no ranges"
            text = answer.read()
        buffer[: len(text)] = text
        self.position += len(text)
        return len(text)


def _keep(file: Path, text: str) -> None:
    "Write a file of the cache whole"
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_suffix(f".{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(file)


def _read_metadata(address: str) -> str:
    try:
        with urllib.request.urlopen(f"{address}.metadata", timeout=60) as answer:
            return answer.read().decode()
    except HTTPError as e:
        if e.code != 404:
            raise
    with zipfile.ZipFile(io.BufferedReader(_Remote(address), 2**16)) as wheel:
        name = next(n for n in wheel.namelist() if re.fullmatch(r"[^/]+/METADATA", n))
        return wheel.read(name).decode()


def metadata(name: str, file: str) -> Message:
    "METADATA of a wheel"
    kept = folder() / f"{file}.metadata"
    if not kept.is_file():
        _keep(kept, _read_metadata(wheel_links(name)[file]))
    return HeaderParser().parsestr(kept.read_text(encoding="utf-8"))


def sources(name: str, version: str, suffix: str = "", sha256: str = "") -> Path:
    "A folder with the files of a wheel, or of its source, whose names end so; downloaded once"
    source = f"{name.replace('-', '_')}-{version}.tar.gz"
    file = [source, *wheels(name, version, "x86_64"), *wheels(name, version)][-1]
    place = folder() / f"{file}.unpacked{suffix}"
    if not place.is_dir():
        aside = Path(tempfile.mkdtemp(prefix=file, dir=folder()))
        with urllib.request.urlopen(release_files(name)[file], timeout=300) as answer:
            content = io.BytesIO(answer.read())
        found = hashlib.sha256(content.getvalue()).hexdigest()
        assert sha256 in ("", found), f"{file} has SHA-256 {found}, expected {sha256}"
        if file == source:
            with tarfile.open(fileobj=content) as archive:
                wanted = [m for m in archive.getmembers() if m.name.endswith(suffix)]
                archive.extractall(aside, wanted, filter="data")
        else:
            archive = zipfile.ZipFile(content)
            wanted = [name for name in archive.namelist() if name.endswith(suffix)]
            archive.extractall(aside, wanted)
        try:
            aside.rename(place)
        except OSError:  # another process was first
            shutil.rmtree(aside)
    return place


def requirements(
    name: str, file: str, arch: str = "aarch64", python: str = "3.11"
) -> list[Requirement]:
    "What a wheel asks for on a machine, extras left out"
    here = {"platform_machine": arch, "python_version": python, "extra": ""}
    here |= {"platform_system": "Linux", "sys_platform": "linux"}
    found = []
    for text in metadata(name, file).get_all("Requires-Dist", []):
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(here):
            found.append(requirement)
    return found
