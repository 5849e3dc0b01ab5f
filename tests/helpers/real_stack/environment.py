"""The stack of a 910B from the package index, compiled over a CANN of host memory, once, into the cache.

    PYTHONPATH=tests/helpers python -m real_stack.environment [STACK ...]

Two to five minutes and 5 GB. Prints what it has, or in one sentence why it cannot have it.
"""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from npu_wheel import cann

from cookbook_npu.npu.simulator import toolchain
from real_stack import cuda_stubs

HERE = Path(__file__).resolve().parent
HELPERS = HERE.parent
ROOT = HELPERS.parents[1]
DEFAULT = "vllm-ascend-0.23.0"
# Libraries of CANN that vllm_ascend_C, its kernels and torch_npu's ATB plugin are linked against, or open
LIBRARIES = (
    *cann.TORCH_NPU_LIBRARIES,
    *("register", "platform", "ascendalog", "opapi", "runtime", "error_manager", "profapi"),
    *("ge_common_base", "unified_dlog", "mmpa", "ascend_dump", "c_sec", "atb"),
)
NAMES = (
    cann.TORCH_NPU_NAMES
    + "|_ZNK?2fe|_ZNK?3atb|mm[A-Z]|Dlog|CheckLog|strcpy_s|memcpy_s|memset_s"
)


class InstallError(Exception):
    "The stack cannot be installed; the message has the last lines of the tool"


def misfit() -> str:
    "Why the stack's wheels cannot run on this machine, or an empty string"
    here = (platform.system(), platform.machine(), sys.version_info[:2])
    if here == ("Linux", "x86_64", (3, 11)):
        return ""
    found = f"Python {here[2][0]}.{here[2][1]} on {here[1]} {here[0]}"
    return f"the wheels of the lane are for Python 3.11 on x86_64 Linux, this is {found}"


def root() -> Path:
    return toolchain.cache_root() / "real_stack"


def lock_file(stack: str) -> Path:
    return HERE / f"{stack}.lock"


def pins(stack: str) -> dict[str, str]:
    "Distribution -> version"
    return dict(re.findall(r"^([\w.-]+)==(\S+) --hash", lock_file(stack).read_text(), re.M))


def venv(stack: str) -> Path:
    "Where the stack is installed, whether or not it is there"
    sources = (lock_file(stack), HERE / "cuda_stubs.py")
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
    return root() / f"{stack}-{digest.hexdigest()[:12]}"


def python(stack: str) -> Path:
    return venv(stack) / "bin" / "python"


def site(stack: str) -> Path:
    return venv(stack) / "lib" / "python3.11" / "site-packages"


def have(stack: str = DEFAULT) -> bool:
    return (venv(stack) / "complete").exists()


# ---- installing


def _run(command: Sequence[str | Path], what: str, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    if done.returncode:
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise InstallError(f"{what} failed with exit code {done.returncode}:\n{last}")
    return done.stdout


def _split_lock(stack: str, folder: Path) -> tuple[Path, Path]:
    "The lines of the lock that are wheels, and vLLM's, which is built here"
    lines = lock_file(stack).read_text().splitlines(keepends=True)
    own = [line for line in lines if line.startswith("vllm==")]
    wheels, sdist = folder / "wheels.txt", folder / "vllm.txt"
    wheels.write_text("".join(line for line in lines if line not in own))
    sdist.write_text("".join(own))
    return wheels, sdist


def install(stack: str) -> None:
    """Install the lock; every file is verified by its hash. Nothing is resolved, so PyTorch's CUDA wheel
    comes without CUDA, and torch_npu's metadata may ask for torch's +cpu build."""
    target = venv(stack)
    root().mkdir(parents=True, exist_ok=True)
    with toolchain.file_lock(root() / f"{target.name}.lock"):
        if have(stack):
            return
        # a venv cannot be moved: it is made under its own name, and marked when it is complete
        _run([sys.executable, "-m", "venv", "--clear", target], "making the environment")
        pip = [python(stack), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        quiet = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        with tempfile.TemporaryDirectory(dir=root()) as scratch:
            wheels, sdist = _split_lock(stack, Path(scratch))
            checked = ["--no-deps", "--require-hashes", "-r"]
            _run([*pip, "install", "--only-binary=:all:", *checked, wheels], "installing")
            cuda_stubs.build(site(stack))
            build = {"VLLM_TARGET_DEVICE": "empty", **quiet}
            build["VLLM_VERSION_OVERRIDE"] = pins(stack)["vllm"]
            options = ["--no-build-isolation", "--no-binary=vllm", "-w", scratch]
            _run([*pip, "wheel", *options, *checked, sdist], "building vLLM", **build)
            (wheel,) = Path(scratch).glob("vllm-*.whl")
            _run([*pip, "install", "--no-deps", wheel], "installing vLLM")
        (target / "complete").touch()


# ---- compiling


def cann_files(stack: str) -> list[Path]:
    "Libraries of the stack that are linked against CANN"
    ascend = site(stack) / "vllm_ascend"
    plugin = site(stack) / "torch_npu" / "lib" / "libop_plugin_atb.so"
    return [*cann.torch_npu_files(site(stack)), plugin, *ascend.glob("*.so")]


def compiled(stack: str) -> tuple[Path, Path]:
    "The folders of the fake CANN and of the bridge; run by the stack's own Python"
    files = [path for path in cann_files(stack) if path.exists()]
    return cann.build(root(), site(stack), files, venv(stack).name, LIBRARIES, NAMES)


def environment(
    stack: str = DEFAULT,
    mindspeed: Path | None = None,  # a checkout
) -> dict[str, str]:
    "Variables of a process of the lane, beside the caller's own"
    source = "import json; from real_stack import environment as e; "
    source += f"print(json.dumps(list(map(str, e.compiled({stack!r})))))"
    here = os.pathsep.join(map(str, (ROOT, HELPERS)))
    quiet = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    out = _run([python(stack), "-c", source], "compiling", PYTHONPATH=here, **quiet)
    fake, bridge = json.loads(out.splitlines()[-1])
    paths = [HERE / "host", ROOT, HELPERS, bridge, *filter(None, [mindspeed])]
    return {
        **quiet,
        "PATH": os.pathsep.join(
            (str(venv(stack) / "bin"), str(HERE / "host" / "bin"), os.environ["PATH"])
        ),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "LD_LIBRARY_PATH": f"{fake}/lib",
        "ASCEND_HOME_PATH": fake,
        "ASCEND_OPP_PATH": f"{fake}/opp",
        "COOKBOOK_REAL_STACK": fake,  # host/sitecustomize.py acts where it is set
        "TASK_QUEUE_ENABLE": "0",  # kernels run in the calling thread
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "JUPYTER_PREFER_ENV_PATH": "1",
    }


def main(*stacks: str) -> None:
    "Install and compile the stacks (none named: the default one), or say why this machine does not fit"
    known = sorted(path.stem for path in HERE.glob("*.lock"))
    for stack in stacks or (DEFAULT,):
        if stack not in known:
            sys.exit(f"there is no stack {stack!r}; name one of {', '.join(known)}")
        if reason := misfit():
            print(f"the lane on the real stack {stack} does not run: {reason}")
            continue
        try:
            install(stack)
            environment(stack)
        except InstallError as error:
            sys.exit(f"the lane on the real stack {stack} cannot be set up: {error}")
        print(f"the real stack {stack} is ready: {venv(stack)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
