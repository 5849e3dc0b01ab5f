"""What this package copies from a folder of transformers 5 is read by 4.57, too; both are installed."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from places import ROOT
from stack_packages import folder as stack_folder

from cookbook_npu.config import TinyConfig
from cookbook_npu.data.images import image_settings
from cookbook_npu.data.tokenizer import build_tokenizer
from cookbook_npu.model.folder import copy_model_files
from cookbook_npu.model.tiny import build_tiny

pytestmark = pytest.mark.lane("packages")

READ = """
import json, sys
from cookbook_npu.npu.shims.torchvision_ops import install_finder
install_finder()
import torch, transformers
from cookbook_npu.errors import ConfigError
from cookbook_npu.model.folder import check_readable, make_portable
folder, new, sees = *sys.argv[1:3], json.loads(sys.argv[3])
try:
    check_readable(new)
    refused = ""
except ConfigError as error:
    refused = str(error)
make_portable(new)
check_readable(new)
check_readable(folder)
auto = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
model = auto.from_pretrained(folder, dtype=torch.float32)
ids = transformers.AutoTokenizer.from_pretrained(folder)("12+3=")["input_ids"]
if sees:
    transformers.AutoImageProcessor.from_pretrained(folder, use_fast=False)
logits = model(input_ids=torch.tensor([ids])).logits[0, -1, :8]
print(json.dumps([transformers.__version__, refused, ids, logits.tolist()]))
"""


def read(folder, new, sees: bool, path: str) -> list:
    "What a process with this PYTHONPATH reads"
    words = [sys.executable, "-W", "ignore", "-c", READ, str(folder), str(new)]
    env = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        [*words, json.dumps(sees)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen3_vl"])
def test_both_versions_read_what_is_exported(tmp_path, family):
    sees = family == "qwen3_vl"
    shape = TinyConfig(family=family, hidden_size=64, num_layers=2, ffn_size=128)
    new = build_tiny(shape, build_tokenizer(vision=sees), tmp_path / "new", seed=1)
    assert int(transformers.__version__[0]) >= 5
    if sees:  # as its processors are saved by transformers 5
        nested = {"image_processor": image_settings(new)}
        (new / "processor_config.json").write_text(json.dumps(nested))
        (new / "preprocessor_config.json").unlink()
    folder = tmp_path / "exported"
    folder.mkdir()
    copy_model_files(new, folder)
    shutil.copy(new / "model.safetensors", folder)
    again = shutil.copytree(new, tmp_path / "again")
    now = read(folder, new, sees, str(ROOT))
    old = stack_folder("vllm-ascend-0.18.0")
    then = read(folder, again, sees, f"{old}{os.pathsep}{ROOT}")
    assert (now[0][0], now[1]) == ("5", "")
    assert then[0] == "4.57.6" and "make_portable" in then[1]
    assert now[2] == then[2]
    torch.testing.assert_close(torch.tensor(now[3]), torch.tensor(then[3]))
