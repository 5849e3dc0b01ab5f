"""The real `torch_npu` wheel and what it needs to run without an NPU: fetched, unpacked and compiled
once, into the cache.

    python tests/helpers/npu_wheel/build.py     # says what it has, or why it cannot have it

Nothing is installed. The wheel lies unpacked in ~/.cache/cookbook_npu/npu_wheel, next to a CANN of host
memory (csrc/fake_cann.cpp, and a stub that refuses for every other symbol the wheel is linked against)
and the bridge that puts CPU kernels under torch_npu (csrc/bridge.cpp). `environment()` is what a fresh
process needs to use them.
"""

import hashlib
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from cookbook_npu.errors import BuildError
from cookbook_npu.npu.simulator import toolchain

VERSION = "2.13.0"
# of the wheel for CPython 3.11 on x86_64 Linux
SHA256 = "0deb809cf447d3fce636ccfdc9c9f874950f1fe76f18f4aaab31e2d345f7dac0"
HERE = Path(__file__).resolve().parent / "csrc"
BRIDGE = "npu_wheel_bridge"
# Names of the libraries that the wheel is linked against, or opens to look for functions; here they are
# one file.
CANN_LIBRARIES = "ascendcl hccl acl_op_compiler ge_runner graph acl_tdt_channel".split()


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
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary=:all:",
                "-d",
                scratch,
            ]
            done = subprocess.run(
                [*command, f"torch_npu=={VERSION}"], capture_output=True, text=True
            )
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
    return site() if have() else cached(site().name, zipfile.ZipFile(fetch()).extractall)


# ---- the stubs


def libraries() -> list[Path]:
    "Libraries of the wheel that `import torch_npu` loads"
    root = site() / "torch_npu"
    return [
        *root.glob("_C.*.so"),
        *(
            root / "lib" / f"lib{name}.so"
            for name in ("torch_npu", "npu_profiler", "tensorpipe")
        ),
    ]


def symbols(kind: str, *options: str, files: list[Path]) -> set[str]:
    "Names of one kind (U: undefined, T: a function) that `nm` lists"
    out = subprocess.run(
        ["nm", *options, *map(str, files)], capture_output=True, text=True, check=True
    ).stdout
    return {line.split()[-1] for line in out.splitlines() if f" {kind} " in line}


def undefined() -> set[str]:
    "Functions of CANN that the wheel is linked against"
    names = symbols("U", "-D", files=libraries())
    return {name for name in names if re.match(r"(acl|Hccl|rt[A-Z]|Msprof)", name)}


def refusing() -> set[str]:
    "Functions of the fake CANN that were generated"
    return symbols("T", files=[build()[0] / "stubs.o"])


def returning_pointers() -> set[str]:
    """Functions that answer with a pointer, read from the headers that the wheel ships; all others
    answer with an error code
    """
    headers = [
        path.read_text(errors="replace")
        for path in (site() / "torch_npu" / "include" / "acl").rglob("*.h")
    ]
    return {
        name
        for text in headers
        for name in re.findall(
            r"^(?:ACL_FUNC_VISIBILITY\s+)?\w[\w ]*\*\s*(\w+)\s*\(", text, re.M
        )
    }


def stubs(names: set[str]) -> str:
    "C++ source: one function that refuses for each name"
    pointers = returning_pointers()
    bodies = {
        True: 'void* {0}() {{ refuse("{0}"); return nullptr; }}',
        False: 'int {0}() {{ return refuse("{0}"); }}',
    }
    lines = [bodies[name in pointers].format(name) for name in sorted(names)]
    return '#include "refuse.h"\nextern "C" {\n' + "\n".join(lines) + "\n}\n"


# ---- compiling


def run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(
            f"{what} failed\n{' '.join(command)}\n{done.stderr[:6000]}",
            "The text above is the compiler's.",
        )


def compile_unit(compiler: str, source: Path, target: Path, *options: str) -> Path:
    run(
        [
            compiler,
            "-O1",
            *toolchain.COMPILER_FLAGS,
            *options,
            "-c",
            str(source),
            "-o",
            str(target),
        ],
        f"compiling {source.name}",
    )
    return target


def fake_cann(compiler: str, scratch: Path) -> None:
    "One library under all the names"
    visible = (
        "-fvisibility=default",
        f"-isystem{site() / 'torch_npu' / 'include'}",
        f"-I{HERE}",
    )
    objects = [
        compile_unit(compiler, HERE / f"{unit}.cpp", scratch / f"{unit}.o", *visible)
        for unit in ("fake_cann", "refuse")
    ]
    generated = scratch / "stubs.cpp"
    generated.write_text(stubs(undefined() - symbols("T", files=objects)))
    objects.append(compile_unit(compiler, generated, scratch / "stubs.o", *visible))
    (scratch / "lib").mkdir()
    library = scratch / "lib" / "libfake_cann.so"
    run(
        [compiler, "-shared", *map(str, objects), "-o", str(library)],
        "linking the fake CANN",
    )
    for name in CANN_LIBRARIES:
        (scratch / "lib" / f"lib{name}.so").symlink_to(library.name)
    for part in (
        "runtime",
        "compiler",
        "opp",
    ):  # torch_npu looks whether these folders of a CANN exist
        (scratch / part).mkdir()


def bridge(compiler: str, scratch: Path) -> None:
    "The simulator's fallback and collectives, compiled for torch_npu's tensors"
    headers = toolchain.torch_folder() / "include"
    include = [
        headers,
        headers / "torch" / "csrc" / "api" / "include",
        sysconfig.get_paths()["include"],
    ]
    options = [
        *(f"-isystem{path}" for path in include),
        f"-I{toolchain.source_folder()}",
        f"-DTORCH_EXTENSION_NAME={BRIDGE}",
    ]
    shared = toolchain.source_folder()
    units = [
        HERE / "bridge.cpp",
        shared / "hccl.cpp",
        shared / "fallback.cpp",
        shared / "compute.cpp",
        shared / "faults.cpp",
        shared / "rows.cpp",
    ]
    flags = {"rows": toolchain.ROW_LOOPS}
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(
            pool.map(
                lambda unit: compile_unit(
                    compiler,
                    unit,
                    scratch / f"{unit.stem}.o",
                    *options,
                    *flags.get(unit.stem, ()),
                ),
                units,
            )
        )
    libraries = toolchain.torch_folder() / "lib"
    target = scratch / f"{BRIDGE}{sysconfig.get_config_var('EXT_SUFFIX')}"
    search = [f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    run(
        [
            compiler,
            "-shared",
            *map(str, objects),
            "-o",
            str(target),
            *search,
            *toolchain.LIBRARIES,
        ],
        "linking the bridge",
    )


def key(compiler: str, *sources: Path) -> str:
    "Name of what these sources, this wheel, this PyTorch and this compiler give"
    digest = hashlib.sha256(
        SHA256.encode()
        + toolchain.build_key(compiler).encode()
        + Path(__file__).read_bytes()
    )
    for source in sources:
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def cached(name: str, make: Callable[[Path], None]) -> Path:
    "The folder `name` of the cache, made once; safe when several processes ask at once"
    target = folder() / name
    with toolchain.file_lock(folder() / f"{name}.lock"):
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=folder(), prefix="making-") as scratch:
                made = Path(scratch) / "made"
                made.mkdir()
                make(made)
                made.rename(target)
    return target


def build() -> tuple[Path, Path]:
    "The folders of the fake CANN and of the bridge"
    unpack()
    compiler = toolchain.find_compiler()
    cann_key = key(compiler, *sorted(HERE.glob("*cann*")), *sorted(HERE.glob("refuse*")))
    cann = cached(f"cann-{cann_key}", lambda made: fake_cann(compiler, made))
    return cann, cached(
        f"bridge-{key(compiler, HERE / 'bridge.cpp')}", lambda made: bridge(compiler, made)
    )


def environment() -> dict[str, str | None]:
    "Variables with which a fresh process finds the wheel, the fake CANN and the bridge"
    cann, bridge = build()
    helpers = Path(__file__).resolve().parents[1]
    root = helpers.parents[1]
    return {
        "PYTHONPATH": os.pathsep.join(map(str, (root, helpers, bridge, site()))),
        "LD_LIBRARY_PATH": str(cann / "lib"),
        "ASCEND_HOME_PATH": str(cann),
        "ASCEND_OPP_PATH": str(cann / "opp"),
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
