"""Released files of vLLM and vllm-ascend, read out of their wheels once, into the user's cache."""

import ast
import functools
from pathlib import Path

import package_index
import pytest

from cookbook_npu.rollout.vllm import missing_reason

pytestmark = [
    pytest.mark.lane("packages"),
    pytest.mark.skipif(missing_reason() is not None, reason=missing_reason() or ""),
]


@functools.cache
def offline() -> str | None:
    return package_index.offline_reason()


def unpacked(name: str, version: str, *paths: str) -> Path:
    "A folder with some files of a release, as in a checkout"
    wheel = package_index.wheels(name, version) or package_index.wheels(
        name, version, "x86_64"
    )
    root = package_index.folder() / wheel[-1]
    for path in paths:
        if not (root / path).is_file():
            if reason := offline():
                pytest.skip(reason)
            package_index.wheel_file(name, version, path)
    return root


def signatures(file: Path) -> dict[str, list[list[str]]]:
    "Parameters of each function of a source file by name, without self and cls"
    found: dict[str, list[list[str]]] = {}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef):
            own = [a.arg for a in node.args.args if a.arg not in ("self", "cls")]
            found.setdefault(node.name, []).append(own)
    return found


# the vLLM of each stack, and its vllm-ascend
@pytest.mark.parametrize(
    ("vllm", "ascend"),
    [("0.13.0", "0.13.0"), ("0.18.0", "0.18.0"), ("0.20.2", "0.20.2rc1"), ("0.23.0",) * 2],
)
def test_the_vllm_of_each_stack_takes_an_adapter_as_tensors(vllm, ascend):
    "What `rollout.vllm_lora` calls in vLLM's worker, and that vllm-ascend has LoRA layers and kernels"
    files = (
        "vllm/lora/lora_model.py",
        "vllm/lora/model_manager.py",
        "vllm/lora/peft_helper.py",
    )
    root = unpacked("vllm", vllm, *files)
    model, manager, helper = (signatures(root / file) for file in files)
    (load,) = model["from_lora_tensors"]
    wanted = {
        "lora_model_id",
        "tensors",
        "peft_helper",
        "device",
        "dtype",
        "weights_mapper",
    }
    assert wanted <= set(load)
    assert manager["remove_adapter"] == [["adapter_id"]]
    assert {len(own) for own in manager["add_adapter"]} == {1}
    assert {len(own) for own in manager["activate_adapter"]} == {1}
    assert "lora_index_to_id" in (root / files[1]).read_text()
    assert helper["from_dict"] == [["config_dict"]]
    files = ("vllm_ascend/lora/punica_npu.py", "vllm_ascend/lora/lora_ops.py")
    files += ("vllm_ascend/worker/model_runner_v1.py",)
    root = unpacked("vllm-ascend", ascend, *files)
    assert {"add_lora_linear"} <= signatures(root / files[0]).keys()
    assert {"sgmv_shrink", "sgmv_expand"} <= signatures(root / files[1]).keys()
    runner = (root / files[2]).read_text()
    assert "self.load_lora_model(" in runner and "self.set_active_loras(" in runner
