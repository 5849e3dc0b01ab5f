"""A CANN of host memory under a real torch_npu, and the bridge that puts CPU kernels under its operators.

`csrc/fake_cann.cpp` implements what the wheels need to come up, to hand out memory and to keep streams. Every
other symbol of CANN that they are linked against becomes a stub that refuses.
"""

import hashlib
import os
import re
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cookbook_npu.errors import BuildError
from cookbook_npu.npu.simulator import toolchain

HERE = Path(__file__).resolve().parent / "csrc"
BRIDGE = "npu_wheel_bridge"
# Names of the libraries that torch_npu is linked against, or opens to look for functions; here they are
# one file.
TORCH_NPU_LIBRARIES = (
    "ascendcl hccl acl_op_compiler ge_runner graph acl_tdt_channel".split()
)
# functions of CANN, by their first letters
TORCH_NPU_NAMES = r"acl|Hccl|rt[A-Z]|Msprof"


def torch_npu_files(site: Path) -> list[Path]:
    "Libraries of the wheel that `import torch_npu` loads"
    root = site / "torch_npu"
    names = ("torch_npu", "npu_profiler", "tensorpipe")
    return [*root.glob("_C.*.so"), *(root / "lib" / f"lib{name}.so" for name in names)]


def symbols(kind: str, *options: str, files: list[Path]) -> set[str]:
    "Names of one kind (U: undefined, T: a function) that `nm` lists"
    out = subprocess.run(
        ["nm", *options, *map(str, files)], capture_output=True, text=True, check=True
    ).stdout
    return {line.split()[-1] for line in out.splitlines() if f" {kind} " in line}


def undefined(files: list[Path], names: str = TORCH_NPU_NAMES) -> set[str]:
    "Functions of CANN that these libraries are linked against"
    return {name for name in symbols("U", "-D", files=files) if re.match(names, name)}


def header_folders(site: Path) -> list[Path]:
    "Where a wheel of torch_npu keeps CANN's headers: 2.10 in third_party, 2.13 beside its own"
    include = site / "torch_npu" / "include"
    return [include / "third_party" / "acl" / "inc", include]


def returning_pointers(site: Path) -> set[str]:
    """Functions that answer with a pointer, read from the headers that the wheel ships; all others
    answer with an error code
    """
    texts = [
        path.read_text(errors="replace")
        for folder in header_folders(site)
        for path in (folder / "acl").rglob("*.h")
    ]
    return {
        name
        for text in texts
        for name in re.findall(
            r"^(?:ACL_FUNC_VISIBILITY\s+)?\w[\w ]*\*\s*(\w+)\s*\(", text, re.M
        )
    }


def stubs(names: set[str], pointers: set[str]) -> str:
    "C++ source: one function that refuses for each name"
    bodies = {
        True: 'void* {0}() {{ refuse("{0}"); return nullptr; }}',
        False: 'int {0}() {{ return refuse("{0}"); }}',
    }
    lines = [bodies[name in pointers].format(name) for name in sorted(names)]
    return '#include "refuse.h"\nextern "C" {\n' + "\n".join(lines) + "\n}\n"


def run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(
            f"{what} failed\n{' '.join(command)}\n{done.stderr[:6000]}",
            "The text above is the compiler's.",
        )


def compile_unit(compiler: str, source: Path, target: Path, *options: str) -> Path:
    flags = ["-O1", *toolchain.COMPILER_FLAGS, *options]
    run(
        [compiler, *flags, "-c", str(source), "-o", str(target)],
        f"compiling {source.name}",
    )
    return target


def fake_cann(
    compiler: str,
    made: Path,
    site: Path,
    files: list[Path],
    libraries: Iterable[str] = TORCH_NPU_LIBRARIES,
    names: str = TORCH_NPU_NAMES,
) -> None:
    "One library under all the names, in `made`/lib, and the folders of a CANN"
    visible = [
        "-fvisibility=default",
        f"-I{HERE}",
        *(f"-isystem{folder}" for folder in header_folders(site)),
    ]
    objects = [
        compile_unit(compiler, HERE / f"{unit}.cpp", made / f"{unit}.o", *visible)
        for unit in ("fake_cann", "graphs", "refuse", "streams")
    ]
    missing = undefined(files, names) - symbols("T", files=objects)
    generated = made / "stubs.cpp"
    generated.write_text(stubs(missing, returning_pointers(site)))
    objects.append(compile_unit(compiler, generated, made / "stubs.o", *visible))
    (made / "lib").mkdir()
    library = made / "lib" / "libfake_cann.so"
    run(
        [compiler, "-shared", *map(str, objects), "-o", str(library)],
        "linking the fake CANN",
    )
    for name in libraries:
        (made / "lib" / f"lib{name}.so").symlink_to(library.name)
    for part in ("runtime", "compiler", "opp"):  # torch_npu looks whether they exist
        (made / part).mkdir()


def bridge(compiler: str, made: Path) -> None:
    "The simulator's fallback and collectives, compiled for torch_npu's tensors"
    headers = toolchain.torch_folder() / "include"
    include = [
        headers,
        headers / "torch" / "csrc" / "api" / "include",
        sysconfig.get_paths()["include"],
    ]
    shared = toolchain.source_folder()
    options = [
        *(f"-isystem{path}" for path in include),
        f"-I{shared}",
        f"-DTORCH_EXTENSION_NAME={BRIDGE}",
    ]
    names = ("hccl", "fallback", "compute", "faults", "rows")
    own = [HERE / f"{name}.cpp" for name in ("bridge", "launches")]
    units = [*own, *(shared / f"{name}.cpp" for name in names)]
    flags = {"rows": toolchain.ROW_LOOPS}

    def compiled(unit: Path) -> Path:
        target = made / f"{unit.stem}.o"
        return compile_unit(compiler, unit, target, *options, *flags.get(unit.stem, ()))

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(compiled, units))
    libraries = toolchain.torch_folder() / "lib"
    target = made / f"{BRIDGE}{sysconfig.get_config_var('EXT_SUFFIX')}"
    search = [f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    run(
        [
            *(compiler, "-shared", *map(str, objects), "-o", str(target)),
            *search,
            *toolchain.LIBRARIES,
        ],
        "linking the bridge",
    )


# ---- the cache


def key(compiler: str, *parts: bytes) -> str:
    "Name of what these parts, this PyTorch and this compiler give"
    digest = hashlib.sha256(toolchain.build_key(compiler).encode())
    for part in (*parts, Path(__file__).read_bytes()):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:16]


def cached(root: Path, name: str, make: Callable[[Path], None]) -> Path:
    "The folder `name` of the cache, made once; safe when several processes ask at once"
    target = root / name
    with toolchain.file_lock(root / f"{name}.lock"):
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=root, prefix="making-") as scratch:
                made = Path(scratch) / "made"
                made.mkdir()
                make(made)
                made.rename(target)
    return target


def build(
    root: Path,  # of the cache
    site: Path,  # where torch_npu lies
    files: list[Path],  # libraries that are linked against CANN
    identity: str,  # of the wheels
    libraries: Iterable[str] = TORCH_NPU_LIBRARIES,
    names: str = TORCH_NPU_NAMES,
) -> tuple[Path, Path]:
    "The folders of the fake CANN and of the bridge, compiled unless the cache has them"
    compiler = toolchain.find_compiler()
    sources = [path.read_bytes() for path in sorted(HERE.iterdir())]
    name = key(compiler, identity.encode(), repr(sorted(libraries)).encode(), *sources)

    def make_cann(made: Path) -> None:
        fake_cann(compiler, made, site, files, libraries, names)

    fake = cached(root, f"cann-{name}", make_cann)
    return fake, cached(root, f"bridge-{name}", lambda made: bridge(compiler, made))
