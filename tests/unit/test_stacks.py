"""Do all pins hold together? The stacks, this package's own requirements and the documented install lines
against the metadata of the released wheels (see helpers/package_index.py)."""

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import ascend_releases
import package_index
import pytest
import yaml
from package_index import metadata, requirements, wheels
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from reader import PROJECT, asked_packages

from cookbook_npu.npu.shims import vllm_ascend
from cookbook_npu.npu.stack.stacks import (
    ASCEND_INDEX,
    KNOWN_STACKS,
    PARTS,
    RECOMMENDED_STACK,
    REQUIRES,
    RUNNABLE_STACKS,
    SYSTEM_PACKAGES,
    TORCH_INDEX,
    admits,
    conflicts,
    constraints_file,
    install_lines,
)
from cookbook_npu.recipes import RECIPES

pytestmark = pytest.mark.lane("packages")

ROOT = Path(__file__).resolve().parents[2]
BEST = KNOWN_STACKS[RECOMMENDED_STACK]
ARCHITECTURES = ("aarch64", "x86_64")
# (package, version) -> where it comes from instead of the package index
SERVED_ELSEWHERE = {
    ("triton-ascend", "3.2.2"): ASCEND_INDEX,
    ("torch", "2.10.0+cpu"): TORCH_INDEX,
    ("torch", "2.9.0+cpu"): TORCH_INDEX,
    ("torch", "2.8.0+cpu"): TORCH_INDEX,
}
# vLLM's wheel is its CUDA build: what its build without a device does not ask for
CUDA_ONLY = re.compile(
    r"torch|torchaudio|torchvision|flashinfer-.*|nvidia-.*|quack-kernels|apache-tvm-ffi|"
    r"tilelang|tokenspeed-mla|humming-kernels|fastsafetensors"
)
# The image of 0.18.0 has the older one: vllm and vllm-ascend disagree, and pip only warns.
DISAGREE = {("vllm-ascend-0.18.0", "opencv-python-headless")}
# Speculative decoding, which nothing here uses; a source distribution that builds against torch 2.7.
LEFT_OUT = {"arctic-inference"}


@pytest.fixture(scope="module")
def index():
    "The package index, when it answers"
    reason = package_index.offline_reason()
    if reason:
        pytest.skip(reason)


needs_index = pytest.mark.usefixtures("index")


# (stack, Python): 3.12 is that of the published image of the recommended one
ON_PYTHON = [
    (name, python)
    for name in RUNNABLE_STACKS
    for python in KNOWN_STACKS[name].versions["python"].split("|")
]


def tag(python: str) -> str:
    "3.12 -> cp312"
    return f"cp{python.replace('.', '')}"


def wheel_requirements(
    part: str, release: str, arch: str, python: str = "3.11"
) -> list[Requirement]:
    "Of a wheel, as it is installed here"
    files = wheels(part, release, arch, tag(python)) or wheels(part, release, arch, "cp312")
    found = requirements(part, files[-1], arch, python)
    if part == "vllm":
        return [r for r in found if not CUDA_ONLY.fullmatch(canonicalize_name(r.name))]
    return found


def pins(stack, arch: str) -> dict[str, str]:
    "Package -> version: of the stack, and of its constraints file"
    found = {}
    for line in (ROOT / constraints_file(stack)).read_text().splitlines():
        requirement = Requirement(line) if line and line[0] != "#" else None
        if requirement and str(requirement.specifier).startswith("=="):
            found[canonicalize_name(requirement.name)] = str(requirement.specifier)[2:]
    for part, want in stack.versions.items():
        found[canonicalize_name(part)] = want.split("|")[-1]
    if arch == "x86_64":
        found["torch"] += "+cpu"  # what torch_npu asks for there
    return found


def all_requirements(stack, arch: str, python: str) -> list[tuple[str, Requirement]]:
    "(who asks, for what): of every wheel of a stack, and of this package"
    extra = "npu" if stack is BEST else "stack"
    asked = [(f"cookbook-npu[{extra}]", r) for r in asked_packages(extra)]
    for part, want in stack.versions.items():
        if part in ("cann", "python", "triton-ascend"):
            continue
        release = want.split("|")[-1]
        for requirement in wheel_requirements(part, release, arch, python):
            asked.append((f"{part} {release}", requirement))
    return asked


@needs_index
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("name", "python"), ON_PYTHON)
def test_every_pin_lies_inside_every_other(name, python, arch):
    stack = KNOWN_STACKS[name]
    have = pins(stack, arch)
    wrong = []
    for who, requirement in all_requirements(stack, arch, python):
        package = canonicalize_name(requirement.name)
        if package not in have or (name, package) in DISAGREE:
            continue
        if not requirement.specifier.contains(have[package], prereleases=True):
            wrong.append(f"{who} asks for {requirement}, the stack has {have[package]}")
    assert not wrong


@needs_index
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("name", "python"), ON_PYTHON)
def test_every_part_has_a_wheel(name, python, arch):
    "On the index for this Python, or marked as served elsewhere"
    for part, want in KNOWN_STACKS[name].versions.items():
        release = want.split("|")[-1]
        if part in ("cann", "python") or (part, release) in SERVED_ELSEWHERE:
            continue
        files = wheels(part, release, arch, tag(python))
        assert files, f"{part} {release} for {arch}, Python {python}"
        asks = metadata(part, files[0])["Requires-Python"]
        assert f"{python}.9" in SpecifierSet(asks or "")


@needs_index
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("python", BEST.versions["python"].split("|"))
def test_every_pin_of_the_extra_has_a_wheel(python, arch):
    for requirement in asked_packages("npu"):
        pinned = str(requirement.specifier)
        if pinned.startswith("=="):
            assert wheels(requirement.name, pinned[2:], arch, tag(python)), requirement


def test_what_moves_is_pinned():
    "Packages that vllm-ascend asks for in any version, and MindSpeed, which has no releases"
    extra = {r.name: str(r.specifier) for r in asked_packages("npu")}
    assert {extra["memcache_hybrid"], extra["memfabric_hybrid"]} == {"==1.2.0"}
    for name in RUNNABLE_STACKS:
        commit = KNOWN_STACKS[name].commits["mindspeed"]
        assert re.fullmatch("[0-9a-f]{40}", commit)
        assert not conflicts({"megatron-core": "0.16.1"}, {"mindspeed": commit})
        assert conflicts({"megatron-core": "0.15.3"}, {"mindspeed": commit})
    text = (ROOT / ".devcontainer/910b/Dockerfile").read_text()
    assert f"ARG MINDSPEED={BEST.commits['mindspeed']}\n" in text
    assert "checkout --quiet --detach ${MINDSPEED}" in text


@needs_index
@pytest.mark.parametrize(("part", "release"), REQUIRES, ids="-".join)
def test_the_table_of_requirements_is_what_the_wheels_say(part, release):
    known = {canonicalize_name(name): name for name in PARTS}
    files = wheels(part, release) or wheels(part, release, python="cp312")
    said = {}
    for requirement in requirements(part, files[-1]):
        name = known.get(canonicalize_name(requirement.name))
        cuda = part == "vllm" and name == "torch"
        if name and not cuda and str(requirement.specifier):
            said[name] = requirement.specifier
    written = REQUIRES[part, release]
    if "python" in written:
        said["python"] = SpecifierSet(metadata(part, files[-1])["Requires-Python"])
    said.pop("ray", None)  # vLLM's executor for several machines, which is not used
    assert {name: SpecifierSet(text) for name, text in written.items()} == said


@needs_index
def test_the_extra_has_what_vllm_ascend_needs():
    "vllm-ascend is installed without its dependencies; the extra npu brings all but one"
    by_name = {canonicalize_name(r.name): r for r in asked_packages("npu")}
    own_line = {"triton-ascend"}  # installed last, from another index
    for wanted in wheel_requirements(
        "vllm-ascend", BEST.versions["vllm-ascend"], "aarch64"
    ):
        package = canonicalize_name(wanted.name)
        if package not in LEFT_OUT | own_line:
            assert set(wanted.specifier) <= set(by_name[package].specifier), wanted


def test_this_package_admits_every_stack_and_the_laptop():
    "One range of transformers and Ray serves the tests and both stacks"
    ours = {r.name: r.specifier for r in asked_packages("stack")}
    for stack in map(KNOWN_STACKS.get, RUNNABLE_STACKS):
        for version in stack.versions["transformers"].split("|"):
            assert version in ours["transformers"]
        python = SpecifierSet(PROJECT["requires-python"])
        assert all(f"{v}.5" in python for v in stack.versions["python"].split("|"))
    for text in (ROOT / ".constraints.txt").read_text().splitlines():
        requirement = Requirement(text) if text and text[0] != "#" else None
        if requirement and requirement.name in ours:
            assert admits(str(ours[requirement.name]), str(requirement.specifier)[2:])
    assert "2.55.1" in ours["ray"] and "2.54.0" not in ours["ray"]


# ---------------------------------------------------------------- the documented lines


def documented() -> list[tuple[str, str]]:
    "(file, command): every pip install that a page, a Dockerfile or a remedy of the doctor names"
    files = [ROOT / "README.md", ROOT / ".devcontainer/910b/Dockerfile"]
    files += ROOT.glob("nbs/tutorials/*.ipynb")
    found = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".ipynb":
            text = text.replace('\\n",', "").replace('\\"', '"')
        for line in text.splitlines():
            for command in re.findall(
                r"(?:\w+=\S+ )*(?:python3 -m )?pip install [^`&|#]+", line
            ):
                found.append((str(file.relative_to(ROOT)), command.strip(' "\\')))
    return found


def test_documented_lines_are_known():
    "A line that nobody resolves cannot be written: each is of the recommended stack, or listed here"
    known = {
        "pip install jupyterlab",
        "pip install .",
        "pip install huaweicloudsdkmodelarts",
        "pip install 'cookbook-npu[wandb]'",
        "python3 -m pip install --no-cache-dir --no-deps -e /opt/MindSpeed",
        "python3 -m pip install --no-cache-dir"
        " -c .devcontainer/910b/vllm-ascend-${VLLM_ASCEND}.txt -e '.[stack]'",
    }
    lines = set(install_lines())
    strays = [(file, line) for file, line in documented() if line not in known | lines]
    assert not strays
    others = {SYSTEM_PACKAGES, "pip uninstall -y triton triton-ascend"}
    assert lines - {line for _, line in documented()} == others
    page = (ROOT / "nbs/tutorials/on_910b.ipynb").read_text()
    assert all(f"{line}\\n" in page for line in others)


def test_the_container_is_of_the_recommended_stack():
    text = (ROOT / ".devcontainer/910b/Dockerfile").read_text()
    assert f"ARG VLLM_ASCEND={BEST.versions['vllm-ascend']}\n" in text
    for name in RUNNABLE_STACKS:
        assert (ROOT / constraints_file(KNOWN_STACKS[name])).is_file()


def stub(folder: Path, name: str, version: str, asks: list[str]) -> None:
    "A wheel that is nothing but its metadata"
    written = name.replace("-", "_")
    info = f"{written}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {text}" for text in asks]
    tag = f"{written}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(folder / tag, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def stubs(tmp_path_factory) -> Path:
    "What the index does not serve, and what is built or installed without its dependencies"
    folder = tmp_path_factory.mktemp("stubs")
    for (name, version), _ in SERVED_ELSEWHERE.items():
        asks = []
        if name == "torch":
            files = wheels("torch", version.removesuffix("+cpu"))
            asks = [str(r) for r in requirements("torch", files[-1])]
        stub(folder, name, version, asks)
    release = BEST.versions["vllm"]
    asked = [str(r) for r in wheel_requirements("vllm", release, "aarch64")]
    stub(folder, "vllm", f"{release}+empty", asked)
    return folder


def resolve(stubs: Path, arch: str, python: str, *words: str) -> str:
    "Resolve for another machine. pip itself evaluates markers of the machine it runs on; uv does not"
    import uv

    command = [uv.find_uv_bin(), "pip", "install", "--dry-run", "--no-build"]
    command += ["--python-platform", f"{arch}-manylinux_2_34", "--python-version", python]
    command += ["--target", str(stubs / "nowhere"), "--find-links", str(stubs)]
    command += ["--default-index", package_index.INDEX]
    command += [
        *"--index-strategy unsafe-best-match --no-config --no-progress".split(),
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stderr


def resolver_words(line: str, arch: str) -> list[str] | None:
    "A documented line in the resolver's words; none: nothing of it comes from an index"
    words = [word for word in shlex.split(line) if not re.match(r"[A-Z_]+=", word)]
    if words[:2] != ["pip", "install"] or "git+" in line:
        return None
    rest = iter(words[2:])
    found = []
    for word in rest:
        if word in ("--extra-index-url", "--no-binary"):
            next(
                rest
            )  # what another index serves is a stub here, and so is vllm, which is built
        elif word == "-e":
            extra = re.fullmatch(r"\.\[(\w+)\]", next(rest))
            found += ["-r", "pyproject.toml", "--extra", extra[1]]
        elif word == "--no-build-isolation":
            pass
        elif arch == "x86_64" and word.startswith("torch=="):
            found.append(f"{word}+cpu")
        else:
            found.append(word)
    return found


@needs_index
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("python", BEST.versions["python"].split("|"))
def test_each_documented_line_resolves(stubs, python, arch):
    "From wheels alone"
    for line in install_lines():
        words = resolver_words(line, arch)
        if words is not None:
            resolve(stubs, arch, python, *words)


@needs_index
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("python", BEST.versions["python"].split("|"))
def test_the_lines_together_have_one_solution(stubs, python, arch):
    "The environment that the last line leaves: nothing in it contradicts anything else in it"
    words = ["-r", "pyproject.toml", "--extra", "npu", "-c", constraints_file(BEST)]
    words += [f"vllm=={BEST.versions['vllm']}", "triton-ascend==3.2.2"]
    solution = resolve(stubs, arch, python, *words)
    for package in ("torch-npu==2.10.0.post4", "transformers==5.5.4", "vllm==0.23.0+empty"):
        assert f" + {package}\n" in solution


@needs_index
@pytest.mark.parametrize(
    ("name", "python"),
    [(BEST.name, "3.12"), *((name, "3.11") for name in RUNNABLE_STACKS[1:])],
)
def test_this_package_fits_into_the_published_images(stubs, name, python):
    "pip install -c FILE -e .[stack] in the container changes none of the stack's parts"
    stack = KNOWN_STACKS[name]
    for arch in ARCHITECTURES:
        words = ["-r", "pyproject.toml", "--extra", "stack", "-c", constraints_file(stack)]
        solution = resolve(stubs, arch, python, *words)
        for part in ("torch", "transformers", "megatron-core", "mcore-bridge"):
            want = stack.versions[part].split("|")[-1]
            assert f" + {part}=={want}" in solution


# ---------------------------------------------------------------- Python 3.12

TORCH_FREE = """
import sys
from cookbook_npu.cluster.environment import worker_env
from cookbook_npu.config import build_config, override
from cookbook_npu.npu.stack.doctor import examine
from cookbook_npu.npu.stack.machine import read_machine
from cookbook_npu.plan.plan import make_plan, model_name
from cookbook_npu.plan.roles import role_environment
from cookbook_npu.recipes import RECIPES

assert sys.version_info[:2] == (3, 12)
for name, build in RECIPES.items():
    for scale in ("laptop", "910b"):
        given = {} if scale == "laptop" else {"model": model_name(name), "prompt_data": "d"}
        config = build(scale, **given)
        assert build_config(type(config), config.model_dump()) == config
        assert override(config, {"seed": 7}).seed == 7
        plan = make_plan(config)
        assert plan.as_text() and plan.as_json()["phases"]
        for role in ("trainer", "rollout"):
            worker_env(role_environment(config, role), kind=role)
assert examine(read_machine()).as_text()
assert "torch" not in sys.modules
print(len(RECIPES), "recipes")
"""


@pytest.fixture(scope="module")
def python_312() -> str:
    "A Python 3.12, where the machine has one that runs: on PATH, or of pyenv"
    managed = Path.home().glob(".pyenv/versions/3.12*/bin/python3.12")
    for found in filter(None, [shutil.which("python3.12"), *map(str, managed)]):
        if not subprocess.run([found, "--version"], capture_output=True).returncode:
            return found
    pytest.skip("no python3.12 that runs is on PATH or of pyenv")


@needs_index
def test_the_part_without_torch_runs_on_python_312(python_312, tmp_path):
    "Configuration, recipes, plan and doctor, with the few packages that they import"
    import uv

    command = [uv.find_uv_bin(), "pip", "install", "--quiet", "--python", python_312]
    command += ["--target", str(tmp_path), "--no-config", "--default-index"]
    command += [package_index.INDEX, "--constraint", str(ROOT / ".constraints.txt")]
    heavy = ("torch", "transformers", "datasets", "math-verify")
    command += [d for d in PROJECT["dependencies"] if Requirement(d).name not in heavy]
    subprocess.run(command, check=True, timeout=300)
    done = subprocess.run(
        [python_312, "-c", TORCH_FREE],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == f"{len(RECIPES)} recipes\n"


# ---------------------------------------------------------------- conda


def test_the_conda_environment_is_what_make_run_installs():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, lines = environment["dependencies"]
    assert SpecifierSet(PROJECT["requires-python"]).contains(python.partition("=")[2])
    assert pip == "pip"
    constraint, package = lines["pip"]
    file = constraint.removeprefix("--constraint ")
    extra = package.removeprefix("--editable .")
    makefile = (ROOT / "Makefile").read_text()
    assert f"-c {file}" in makefile and (ROOT / file).is_file()
    assert f"-e '.{extra}'" in makefile
    assert extra.strip("[]") in PROJECT["optional-dependencies"]


# ---------------------------------------------------------------- releases of vllm-ascend


@needs_index
def test_the_table_of_releases_is_what_their_files_say():
    assert ascend_releases.TABLE.read_text(encoding="utf-8") == ascend_releases.table()


@needs_index
def test_a_comparison_names_what_changed(tmp_path):
    "Between two releases, and after a change that is put into a copy of one"
    old, new = map(ascend_releases.Release, ("0.23.0", "0.30.0rc2"))
    found = ascend_releases.compare(old, new)
    assert "device_allocator/camem.py: changed CaMemAllocator.sleep\n" in found
    areas = [line[3:] for line in found.splitlines() if line[:2] == "##"]
    assert areas == [*ascend_releases.AREAS]
    assert ascend_releases.compare(old, old).count("\n") == 1
    shutil.copytree(old.root, tmp_path / "a")
    changed = ascend_releases.Release("0.23.0")
    changed.root = tmp_path / "a"
    sampler = changed.root / "sample/sampler.py"
    sampler.write_text(sampler.read_text().replace("def greedy_sample(", "def greedy("))
    line = "sampler.py: added AscendSampler.greedy; removed AscendSampler.greedy_sample"
    assert line in ascend_releases.compare(old, changed)


@needs_index
@pytest.mark.parametrize("given", [{}, {"rl_config": {"enable_batch_invariant": True}}])
def test_rl_settings_are_those_that_the_release_has(given, monkeypatch):
    "RlConfig of the released sources, its neighbours left out"
    source = ascend_releases.Release("0.30.0rc2").source("ascend_config.py", "RlConfig")
    module = types.ModuleType("ascend_config")
    scope = {"config": dataclasses.dataclass, "AscendConfig": object}
    exec(source, scope)
    module.RlConfig = scope["RlConfig"]
    monkeypatch.setattr(vllm_ascend, "has_package", lambda name: True)
    monkeypatch.setattr(vllm_ascend.importlib, "import_module", lambda name: module)
    settings = vllm_ascend.rl_settings(given)["rl_config"]
    assert settings == {**vllm_ascend.RL_CONFIG, **given.get("rl_config", {})}
    scope["RlConfig"](**settings)
    del module.RlConfig
    assert vllm_ascend.rl_settings({"a": 1}) == {"weight_nz_mode": 0, "a": 1}


# ---------------------------------------------------------------- nbdev 3


@needs_index
def test_nbdev_3_exports_the_same(tmp_path):
    "From [tool.nbdev], in a copy of this repository"
    import uv

    tools, copy = tmp_path / "tools", tmp_path / "copy"
    command = [uv.find_uv_bin(), *"pip install --quiet --no-config --target".split(), tools]
    command += ["--python", sys.executable, "--default-index", package_index.INDEX]
    subprocess.run([*command, "nbdev==3.3.26"], check=True, timeout=300)
    listing = ["git", "ls-files", "-z"]
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True)
    names = done.stdout.rstrip("\0").split("\0")
    for name in names:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    for module in (copy / "cookbook_npu/rl").glob("[a-z]*.py"):
        module.unlink()
    env = {**os.environ, "PYTHONPATH": str(tools)}
    for program in ([tools / "bin/nbdev-export"], ["tests/drift.py", "--write"]):
        done = subprocess.run(
            [sys.executable, *program], cwd=copy, env=env, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
    package = [name for name in names if name.startswith("cookbook_npu/")]
    assert len(package) > 150
    assert not [n for n in package if (copy / n).read_bytes() != (ROOT / n).read_bytes()]
