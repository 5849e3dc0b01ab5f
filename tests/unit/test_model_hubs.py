"""Models by the id of a hub: the real clients download from a hub on loopback, in processes of their own."""

import json
import os
import subprocess
import sys

import pytest
from model_hubs import serve_models
from page_blocks import steps, typed
from places import ROOT
from reader import Reader, make_environment

from cookbook_npu.config import TinyConfig
from cookbook_npu.data.tokenizer import build_tokenizer
from cookbook_npu.model.tiny import build_tiny

pytestmark = pytest.mark.lane("packages")

NAMES = {"hf": "hf://Qwen/Tiny", "modelscope": "modelscope://Qwen/Tiny"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    "A tiny model as the files of a repository"
    folder = tmp_path_factory.mktemp("models") / "tiny"
    shape = TinyConfig(hidden_size=48, num_layers=2, ffn_size=96)
    build_tiny(shape, build_tokenizer(), str(folder), seed=7)
    found = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    return found | {"README.md": b"# Tiny", "original.bin": b"not wanted"}


class Machine:
    "A machine with an empty cache"

    def __init__(self, hub, folder):
        self.folder = folder
        self.env = os.environ | {
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(folder / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "MODELSCOPE_ENDPOINT": hub.address,
            "MODELSCOPE_CACHE": str(folder / "ms"),
            "no_proxy": "127.0.0.1",
            "COLUMNS": "400",
        }
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "VLLM_USE_MODELSCOPE"):
            self.env.pop(name, None)

    def command(self, *words, **env):
        "`cookbook-npu` in a process of its own: clients read their settings when imported"
        line = [sys.executable, "-m", "cookbook_npu.cli", *words]
        return subprocess.run(
            line,
            env=self.env | env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=600,
        )

    def local(self, name, weights=True, **env):
        "What `local_model` returns, or its error as the last line of stderr"
        code = "from cookbook_npu.data.datasets import local_model as f\n"
        code += "import sys; print(f(*eval(sys.argv[1])))"
        line = [sys.executable, "-c", code, repr((name, weights))]
        done = subprocess.run(
            line, env=self.env | env, capture_output=True, text=True, timeout=300
        )
        lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
        return lines[-1]


@pytest.fixture
def hub(files):
    with serve_models() as found:
        found.files["Qwen/Tiny"] = files
        yield found


@pytest.mark.parametrize("kind", NAMES)
def test_a_model_is_downloaded_once(kind, hub, files, tmp_path):
    machine = Machine(hub, tmp_path)
    small = machine.local(NAMES[kind], weights=False)
    assert "model.safetensors" not in os.listdir(small)
    folder = machine.local(NAMES[kind])
    names = set(os.listdir(folder))
    assert {"config.json", "model.safetensors"} <= names
    assert not {"README.md", "original.bin"} & names
    with open(f"{folder}/model.safetensors", "rb") as file:
        assert file.read() == files["model.safetensors"]
    asked = len(hub.calls)
    assert machine.local(NAMES[kind]) == folder
    assert len(hub.calls) == asked, "the cache has it"


def test_a_plain_id_is_of_hugging_face_unless_vllm_uses_modelscope(hub, tmp_path):
    machine = Machine(hub, tmp_path)
    assert str(tmp_path / "hf") in machine.local("Qwen/Tiny")
    assert str(tmp_path / "ms") in machine.local("Qwen/Tiny", VLLM_USE_MODELSCOPE="True")


@pytest.mark.parametrize("kind", NAMES)
def test_a_model_that_the_hub_does_not_have(kind, hub, tmp_path):
    told = Machine(hub, tmp_path).local(f"{kind}://Qwen/Other")
    assert "does not give a model of this name (404)" in told and "Check the name" in told


def test_a_gated_model_names_the_token(hub, tmp_path):
    hub.gated.add("Qwen/Tiny")
    machine = Machine(hub, tmp_path)
    assert "needs HF_TOKEN" in machine.local("Qwen/Tiny")
    assert str(tmp_path) in machine.local("Qwen/Tiny", HF_TOKEN="hf_of_this_test")


def test_a_cache_without_the_model_and_without_network(hub, tmp_path):
    told = Machine(hub, tmp_path).local("Qwen/Tiny", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in told and not hub.calls


@pytest.mark.parametrize(
    "words", [["-p", "model", "Qwen/Tiny"], ["-p", "prompt_data", "hf://a/b"]]
)
def test_a_hub_that_is_not_there_is_one_sentence(words, hub, tmp_path):
    machine = Machine(hub, tmp_path)
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    done = machine.command("run", "qwen3_4b_colocate", *words, **nowhere)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line]
    assert (
        "is not reachable" in line and "Set HF_ENDPOINT" in line and "hf download" in line
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [typed("own_model")])
def test_the_page_of_models_as_typed(name, hub, files, tmp_path):
    """The runs train and record the id of the hub

    A tiny model stands for the one that the page names. It never answers correctly, so no run learns."""
    hub.files["Qwen/Qwen3-0.6B"] = files
    environment = make_environment(tmp_path / "env")
    (tmp_path / "folder").mkdir()
    reader = Reader(environment, tmp_path / "folder")
    reader.env |= {
        name: value
        for name, value in Machine(hub, tmp_path).env.items()
        if name.startswith(("HF_", "MODELSCOPE_", "no_proxy"))
    }
    page = ROOT / ".docs" / "pages" / "howto" / f"{name}.md"
    lines = [text for kind, text in steps(page) if kind == "command"]
    runs_of_page = [line for line in lines if " run " in line]
    assert len(runs_of_page) == 3
    shown = reader.follow(page, dict.fromkeys(runs_of_page, 1))
    runs = [run / "config.json" for run in (tmp_path / "folder" / "runs").iterdir()]
    models = {json.loads(file.read_text())["model"]["path"] for file in runs}
    assert {"Qwen/Qwen3-0.6B", "modelscope://Qwen/Qwen3-0.6B"} < models
    assert any("downloading Qwen/Qwen3-0.6B from" in text for text in shown)
