"""`export RUN --push` with the real client of `huggingface_hub`, against a hub on loopback."""

import os
import subprocess
import sys

import pytest
from hub_server import TOKEN, serve_hub

from cookbook_npu.npu.device import free_port
from cookbook_npu.recipes import qwen3_4b_colocate
from cookbook_npu.runs.checkpoints import Checkpoints
from cookbook_npu.runs.folder import RunFolder

pytestmark = pytest.mark.lane("packages")

WEIGHTS = os.urandom(300_000)


@pytest.fixture
def run(tmp_path):
    "A run with a checkpoint whose policy is a Hugging Face folder"
    overrides = {"output.root": str(tmp_path / "runs"), "output.name": "A"}
    with RunFolder.create(qwen3_4b_colocate(overrides=overrides)) as folder:
        store = Checkpoints.of_run(folder)
        partial = store.partial(40)
        (partial / "hf").mkdir()
        (partial / "hf" / "config.json").write_text('{"model_type": "qwen3"}')
        (partial / "hf" / "tokenizer.json").write_text("{}")
        (partial / "hf" / "model.safetensors").write_bytes(WEIGHTS)
        store.commit(partial, 40, {})
    return folder.path


def push(run, address, *words, token=TOKEN, repo="me/my-model"):
    "The command in a process of its own: the client reads its settings when it is imported"
    env = os.environ | {
        "HF_ENDPOINT": address,
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(run.parent / "hf_home"),
    }
    command = [sys.executable, "-m", "cookbook_npu.cli", "export", str(run)]
    command += ["--push", repo, *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)


def test_a_policy_arrives(run):
    with serve_hub() as hub:
        done = push(run, hub.address)
        assert done.returncode == 0, done.stderr + str(hub.calls)
        assert f"pushed  {hub.address}/me/my-model/commit/" in done.stdout
        assert hub.private == {"me/my-model": True}
        names = {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
        assert set(hub.files) == {f"me/my-model/{name}" for name in names}
        assert hub.files["me/my-model/model.safetensors"] == WEIGHTS
        card = hub.files["me/my-model/README.md"].decode()
        assert "# A, step 40" in card and "made on simulated NPUs" in card
        assert hub.messages == ["Policy step_000040"]
        # once more, elsewhere: the repository exists, the large file is there already
        sent = [call for call in hub.calls if call.startswith("PUT")]
        again = push(run, hub.address, "--to", str(run.parent / "again"), "--public")
        assert again.returncode == 0, again.stderr
        assert [call for call in hub.calls if call.startswith("PUT")] == sent
        assert hub.private == {"me/my-model": True}, "an existing repository stays as it is"


def test_what_goes_wrong_says_what_is_left(run):
    with serve_hub() as hub:
        refused = push(run, hub.address, token="hf_of_somebody_else")
        assert refused.returncode == 2 and "refused" in refused.stderr
        assert "hf auth login" in refused.stderr
        assert not (run / "export").exists(), "asked before anything is written"
        hub.full = True
        full = push(run, hub.address)
        assert full.returncode == 2, full.stdout
        assert "was written, but not pushed to me/my-model" in full.stderr
        assert "storage limit reached" in full.stderr
        assert "hf upload me/my-model" in full.stderr and not hub.files
    assert (run / "export" / "step_000040" / "model.safetensors").is_file()


def test_no_hub_is_told_within_seconds_and_nothing_is_written(run):
    done = push(run, f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 2 and "cannot be reached" in done.stderr
    assert not (run / "export").exists()
