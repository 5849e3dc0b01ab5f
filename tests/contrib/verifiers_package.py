"""The package `verifiers` in an environment of its own, made once, in the user's cache."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from package_index import INDEX, offline_reason

from cookbook_npu.npu.simulator.toolchain import cache_root

ENVIRONMENTS = Path(__file__).parent / "verifiers_environments"


class Unavailable(Exception):
    "Why it cannot be had here"


def interpreter(version: str) -> str:
    "A Python that has this version of verifiers"
    place = cache_root() / f"verifiers-{version}"
    if not place.is_dir():
        _install(version, place)
    return str(place / "bin" / "python")


def _install(version: str, place: Path) -> None:
    "Make the environment aside: one that is there is whole"
    uv = shutil.which("uv", path=_path())
    reason = offline_reason() if uv else "uv is not installed"
    if reason:
        raise Unavailable(reason)
    assert uv is not None
    place.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f"{place.name}.", dir=place.parent))
    python = str(aside / "bin" / "python")
    make = [uv, "venv", "-q", "--allow-existing", "--python", sys.executable, str(aside)]
    add = [uv, "pip", "install", "-q", "--python", python, "--index-url", INDEX]
    try:
        subprocess.run(make, check=True, capture_output=True, text=True, timeout=120)
        command = [*add, f"verifiers=={version}"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=500)
    except subprocess.CalledProcessError as e:
        shutil.rmtree(aside)
        raise Unavailable(
            f"verifiers {version} cannot be installed: {e.stderr[-300:]}"
        ) from e
    try:
        aside.rename(place)
    except OSError:  # another process was first
        shutil.rmtree(aside)


def _path() -> str:
    "Where programs are, those beside this Python first"
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def variables() -> dict[str, str]:
    "Of a process that plays the environments of the tests"
    return {"PYTHONPATH": str(ENVIRONMENTS), "PATH": _path()}
