"""Libraries with the names of CUDA's, so that the CUDA wheel of PyTorch loads on a machine without CUDA.

PyPI has no CPU wheel of torch 2.10 for x86_64. The loader asks for the names of CUDA's libraries, their
symbol versions and functions. Every function here returns an error; only those that register kernels while
PyTorch is loaded succeed.
"""

import re
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

CUDA_LIBRARY = re.compile(r"lib(cu|nv|nccl)")
# functions of libraries without symbol versions; any of the stubs may hold them
UNVERSIONED = re.compile(
    r"(nccl[A-Z]|pnccl|curand|cuFile|cusparseLt|cu[A-Z][a-z]\w+$|nvml)"
)
REGISTRATION = """
static void* handle[4];
void** __cudaRegisterFatBinary(void* b) { (void)b; return handle; }
void __cudaRegisterFatBinaryEnd(void** h) { (void)h; }
void __cudaUnregisterFatBinary(void** h) { (void)h; }
void __cudaRegisterFunction() {}
void __cudaRegisterVar() {}
char __cudaInitModule(void** h) { (void)h; return 1; }
int cudaGetDeviceCount(int* n) { *n = 0; return 100; }  /* cudaErrorNoDevice */
int cudaGetLastError() { return 0; }
int cudaPeekAtLastError() { return 0; }
const char* cudaGetErrorString(int e) { (void)e; return "no CUDA on this machine"; }
const char* cudaGetErrorName(int e) { (void)e; return "cudaErrorNoDevice"; }
int cudaDriverGetVersion(int* v) { *v = 0; return 0; }
int cudaRuntimeGetVersion(int* v) { *v = 12080; return 0; }
"""
ERROR = 999  # cudaErrorUnknown

Wanted = dict[str, dict[str, set[str]]]  # library -> symbol version, or "" -> functions


def _readelf(option: str, file: Path) -> str:
    command = ["readelf", "-W", option, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _version_owners(file: Path) -> dict[str, str]:
    "Symbol version -> the CUDA library that defines it"
    owners, library = {}, ""
    for line in _readelf("-V", file).splitlines():
        if found := re.search(r"File: (\S+)", line):
            library = found[1]
        elif (found := re.search(r"Name: (\S+)", line)) and CUDA_LIBRARY.match(library):
            owners[found[1]] = library
    return owners


def wanted(files: list[Path]) -> Wanted:
    "What PyTorch's libraries are linked against"
    result: Wanted = defaultdict(lambda: defaultdict(set))
    for file in files:
        for name in re.findall(r"NEEDED.*\[(.*)\]", _readelf("-d", file)):
            if CUDA_LIBRARY.match(name):
                result[name]  # noqa: B018
        owners = _version_owners(file)
        for version, library in owners.items():
            result[library][version]  # noqa: B018
        for name, version in re.findall(
            r"UND (\w+)(?:@(\S+))?", _readelf("--dyn-syms", file)
        ):
            if version in owners:
                result[owners[version]][version].add(name)
            elif not version and UNVERSIONED.match(name):
                result["libnccl.so.2"][""].add(name)
    return result


def _compile(library: str, versions: dict[str, set[str]], target: Path) -> None:
    body = REGISTRATION if library.startswith("libcudart") else ""
    names = sorted(set().union(*versions.values()))
    body += "".join(
        f"int {name}() {{ return {ERROR}; }}\n" for name in names if f" {name}(" not in body
    )
    script = "".join(
        f"{version} {{ global: {' '.join(f'{name};' for name in sorted(group))} }};\n"
        for version, group in versions.items()
        if version and group
    )
    with tempfile.TemporaryDirectory() as scratch:
        source, versions_file = Path(scratch, "stub.c"), Path(scratch, "stub.map")
        source.write_text(body)
        versions_file.write_text(script)
        options = [f"-Wl,--version-script={versions_file}"] if script else []
        command = ["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{library}", *options]
        subprocess.run(
            [*command, "-o", str(target / library), str(source)], check=True, text=True
        )


def build(site: Path) -> None:
    "Put the stubs beside PyTorch's own libraries, where the loader looks for them"
    target = site / "torch" / "lib"
    for library, versions in wanted(
        [*target.glob("*.so*"), *site.glob("torch/_C*.so")]
    ).items():
        _compile(library, versions, target)
