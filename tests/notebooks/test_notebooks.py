"""Every notebook as a test, each in a process of its own: `pytest tests/notebooks -k 'train and offload'`

Notebooks load a device and patch torch, which is once per process. The process is a fork of a server that has
imported what the notebook would import first; which server it is makes a difference to the time only.
"""

import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
from places import HELPERS, ROOT
from ranks import MEGATRON_IMPORTS

from cookbook_npu.npu.simulator.fork_server import fork_process

FOUND = sorted(p.relative_to(ROOT / "nbs") for p in (ROOT / "nbs").rglob("*.ipynb"))
SKIPPED = {".ipynb_checkpoints", "contrib"}  # tests/contrib runs its own
NOTEBOOKS = [str(p) for p in FOUND if p.parent.name not in SKIPPED]

LIGHT = ["nbdev.test", "execnb.shell", "fastcore.test", "pydantic", "notebook_jobs"]
TORCH = ["torch", "numpy", *MEGATRON_IMPORTS, *LIGHT]
QWEN = ["cookbook_npu.npu.shims.torchvision_ops:install_finder"]
QWEN += ["transformers.models.auto", "transformers.generation.utils"]
QWEN += [
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen2.tokenization_qwen2",
]
TRANSFORMERS = [*TORCH, *QWEN]
DEVICE = [*TORCH, "cookbook_npu.npu.simulator:install", *QWEN]
TRAINER = [
    "cookbook_npu.npu.shims.bootstrap:bootstrap:trainer",
    *TORCH,
    *QWEN,
    "mcore_bridge",
]
WARM_UPS = {
    "data/tasks": TRANSFORMERS,
    "model/tiny": TRANSFORMERS,
    "model/delta_net": TRAINER,
    "model/megatron": TRAINER,
    "model/logprobs": TRAINER,
    "model/packing": TRAINER,
    "model/vision": TRANSFORMERS,
    "rollout/transformers": DEVICE,
    "train/critic": TRAINER,
    "train/run_trainer": TRAINER,
    "policy/evaluate": DEVICE,
    "policy/export": TRANSFORMERS,
    "train/rollout_worker": DEVICE,
}


def plain(notebook: str) -> str:
    "Its name without number and ending: train/trainer"
    return re.sub(r"(^|/)\d+_|\.ipynb$", r"\1", notebook)


def warm_up_of(notebook: str) -> list[str]:
    "What the server of a notebook has imported; without torch where the notebook asserts its absence"
    text = (ROOT / "nbs" / notebook).read_text()
    light = re.search(r"torch.{1,40}sys\.modules", text)
    return WARM_UPS.get(plain(notebook), LIGHT if light else TORCH)


# those that start devices, Ray or engines: more than three processor seconds each
IN_LANE = set(
    """
npu/device npu/shims/bootstrap npu/shims/fla npu/shims/mcore_bridge npu/shims/ray
npu/shims/vllm_weights npu/shims/torchvision_ops
cluster/ray_cluster cluster/worker_group cluster/launch
data/images data/prompts data/grading_process data/rewards data/messages data/environments
data/tokenizer data/conversations
model/checkpoint model/lora model/routing_replay weights/transport
rollout/transformers rollout/vllm plan/plan runs/kernel policy/evaluate
train/offload train/trainer train/driver train/session train/rehearsal train/critic
train/tenants train/run_trainer
tutorials/own_data tutorials/own_game tutorials/own_loss tutorials/own_reward
""".split()
)

# those of a server one after another: it ends when nobody has used it for some minutes
IN_ORDER = sorted(NOTEBOOKS, key=lambda notebook: (warm_up_of(notebook), notebook))
CASES = [
    pytest.param(name, marks=pytest.mark.lane("notebooks"))
    if plain(name) in IN_LANE
    else name
    for name in IN_ORDER
]


def environment(warm_up: list[str]) -> dict[str, str]:
    "Variables of this process without those that Ray's import set, with a path to package and helpers"
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    path = [str(ROOT), str(HELPERS), *env.get("PYTHONPATH", "").split(os.pathsep)]
    path = os.pathsep.join(dict.fromkeys(filter(None, path)))
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    if warm_up in (DEVICE, TRAINER):
        env["COOKBOOK_NPU_SIMULATE"] = "1"
    return env


def test_the_table_names_notebooks():
    assert set(WARM_UPS) | IN_LANE <= set(map(plain, NOTEBOOKS))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("notebook", CASES)
def test_notebook(notebook):
    warm_up = warm_up_of(notebook)
    job = {"notebook": str(ROOT / "nbs" / notebook)}
    with tempfile.TemporaryFile() as log:
        process = fork_process(
            "notebook_jobs:execute",
            job,
            warm_up,
            environment(warm_up),
            log.fileno(),
            cwd=str(ROOT),
        )
        assert process is not None, "no server: " + server_logs()
        try:
            code = process.wait(850)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            raise
        log.seek(0)
        output = log.read().decode(errors="replace")
    assert code == 0, output[-6000:]


def server_logs() -> str:
    "What the servers of this session had to say"
    folder = Path(os.environ["COOKBOOK_NPU_FORK_SERVERS"])
    return "\n".join(p.read_text()[-3000:] for p in folder.glob("*.log"))
