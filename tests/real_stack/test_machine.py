"""What a newcomer types first on a machine with the whole stack: the doctor, and what a rehearsal needs."""

import json

from real_stack import environment

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
    parts = {row["part"] for row in report["differs"]}
    assert parts == {"cann", "triton-ascend", "mindspeed"}


def test_simulated_npu_of_a_rehearsal(stack, tmp_path):
    "It takes the place of the real torch_npu, compiled for the stack's torch"
    source = (
        "from cookbook_npu.npu.simulator import install; install()\n"
        "import torch\n"
        "print(torch.__version__, torch.ones(3, device='npu').sum().item())\n"
    )
    python = environment.python(environment.DEFAULT)
    done = stack.run(python, "-c", source, cwd=tmp_path, COOKBOOK_NPU_SIMULATE="1")
    assert done.stdout.split()[-1] == "3.0", (done.stdout + done.stderr)[-4000:]
    assert done.stdout.startswith("2.10.0")
