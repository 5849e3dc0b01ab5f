"""What a newcomer types first, on a machine that has the whole stack: doctor, plan, rehearsal."""

import json

import pytest

# what a driver, CANN and a large machine have, and the lane has not
HARDWARE = {"npu-smi", "device-files", "host-memory", "disk", "cann-sourced", "open-files"}
# triton-ascend 3.2.2 is not on the package index
OLDER = {"stack", "versions"}


def test_doctor_recognises_the_stack(stack, tmp_path):
    "Every package is found at its version; only what the index lacks and the hardware fail"
    done = stack.run("cookbook-npu", "doctor", "--json", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert report["stack"]["name"] == "vllm-ascend-0.23.0"
    findings = {row["check"]: row for row in report["findings"]}
    failed = {name for name, row in findings.items() if row["state"] == "fail"}
    without = set() if stack.mindspeed else {"training-stack"}
    assert failed <= HARDWARE | OLDER | without | {"training-stack"}
    assert findings["sleep-allocator"]["state"] == "ok"
    assert findings["torch-npu"]["state"] == "ok"
    parts = {row["part"] for row in report["differs"]}
    assert parts == {"cann", "triton-ascend", "mindspeed"}


@pytest.mark.parametrize(
    "recipe, family, prompts",
    [
        ("qwen3_4b_colocate", "qwen3", "arithmetic"),
        ("qwen3_5_9b_async", "qwen3_5", "arithmetic"),
        ("qwen3_vl_8b_ppo", "qwen3_vl", "geometry"),
    ],
)
def test_rehearsal(stack, models, tmp_path, recipe, family, prompts):
    """The simulated NPU takes the place of the real torch_npu in the roles of a rehearsal, compiled for the
    stack's torch; here on two devices
    """
    values = {"model": f"{models}/{family}0", "prompt_data": prompts}
    split = recipe.endswith("async")
    overrides = {
        "parallel.tensor": 1 if split else 2,
        "placement.devices": 2,
        "rollout.devices_per_engine": 1,
        **({"placement.trainer_devices": 1} if split else {}),
        "output.root": str(tmp_path),
    }
    file = tmp_path / "run.json"
    file.write_text(json.dumps({**values, "overrides": overrides}))
    command = (
        "cookbook-npu",
        "launch",
        recipe,
        "--rehearse",
        "--scale",
        "910b",
        "-f",
        file,
    )
    done = stack.run(*command, "--runs", tmp_path / "runs", cwd=tmp_path)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
