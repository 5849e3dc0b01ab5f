"""What long responses cost, sampled and trained on.

    python tests/benchmarks/long_responses.py [--tokens 256 1024] [--layers 8] [--hidden 384] [--rounds 2]

A Qwen3 of random weights (14 million by default), float32, one thread, on the simulated NPU; vLLM on
the CPU.

- Sampling: `--prompts` x `--samples` responses of exactly so many tokens, by the `transformers` engine, by
  `generate` of transformers with the same model, and by the `vllm` engine where vLLM is installed. Tokens
  for each second of processor time, which on one thread is tokens per second and core.
- Training: one optimizer step on as many responses of different lengths (log-normal, sigma 0.7, cut at the
  limit), packed (`thd`) and padded (`bshd`). Tokens are those of prompts and responses, padding not counted;
  packing efficiency is the share of the computed positions that are tokens; memory is the peak above what
  the trainer held before the step, for each token of the largest micro-batch.

Each measurement has a process of its own; those that are compared run in turns. The whole step against TRL
at these lengths: `grpo_step.py --sizes L256 L1024`. Sampling beside training: `async_speed.py --overrides`.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine_speed import timed, with_engine, with_generate
from grpo_step import build
from options import option_parser

SIGMA = 0.7  # of the logarithm of a response length
MICRO_BATCH_TOKENS = 8192
Task = dict[str, Any]


# ---- sampling


def prompts_of(task: Task) -> list[list[int]]:
    "Different prompts of similar lengths"
    return [list(f"{7 * i % 90 + 5}*{i + 3}=".encode()) for i in range(task["prompts"])]


def open_engine(task: Task) -> Any:
    "The engine, which never stops early"
    from cookbook_npu.npu.shims.bootstrap import bootstrap

    bootstrap("rollout")
    import torch

    torch.set_num_threads(1)
    if task["what"] == "vllm":
        from cookbook_npu.rollout.vllm import VllmEngine

        positions = task["tokens"] + 64
        return VllmEngine(
            task["folder"],
            dtype="float32",
            max_tokens=positions,
            kv_cache_bytes=2**30,
        )
    from cookbook_npu.rollout.transformers import TransformersEngine

    engine = TransformersEngine(task["folder"], dtype="float32")
    engine.net.generation_config.eos_token_id = None
    return engine


def sample(task: Task) -> dict[str, float]:
    "Tokens for each second of processor time"
    args = SimpleNamespace(samples=task["samples"], response=task["tokens"])
    make = with_generate if task["what"] == "generate" else with_engine
    with open_engine(task) as engine:
        # what the first tokens of a process cost is not counted
        make(engine, prompts_of(task), SimpleNamespace(samples=1, response=4))()
        responses = []
        run = make(engine, prompts_of(task), args)
        _, seconds = timed(lambda: responses.extend(run()))
    lengths = {len(response) for response in responses}
    if lengths != {task["tokens"]}:
        raise SystemExit(f"{task['what']}: responses of {sorted(lengths)} tokens")
    return {"speed": len(responses) * task["tokens"] / seconds}


def forget_end_token(folder: Path) -> None:
    "vLLM ends responses at the end token of the tokenizer, whatever the model says"
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = folder / name
        if file.exists():
            settings = json.loads(file.read_text())
            settings.pop("eos_token", None)
            file.write_text(json.dumps(settings))


# ---- training


def response_lengths(task: Task) -> list[int]:
    "The same lengths for all layouts"
    import numpy as np

    count = task["prompts"] * task["samples"]
    drawn = np.random.default_rng(0).lognormal(0.0, SIGMA, count)
    scale = task["tokens"] / 2
    return [int(n) for n in np.clip(scale * drawn, 1, task["tokens"])]


def samples_of(task: Task) -> list[Any]:
    "Responses with rewards that differ"
    import numpy as np

    from cookbook_npu.data.sample import Sample

    random = np.random.default_rng(1)
    found = []
    for number, length in enumerate(response_lengths(task)):
        group, index = divmod(number, task["samples"])
        found.append(
            Sample(
                group_id=str(group),
                index=index,
                prompt_ids=prompts_of(task)[group],
                response_ids=random.integers(10, 200, length).tolist(),
                logprobs=[-5.0] * length,
                loss_mask=[1] * length,
                versions=[0] * length,
                finish_reason="stop",
                reward=float(index % 2),
            )
        )
    return found


def open_trainer(task: Task) -> tuple[Any, Any]:
    "The configuration of a run, and its trainer in this process"
    from cookbook_npu.npu.shims.bootstrap import bootstrap

    bootstrap("trainer")
    import torch

    torch.set_num_threads(1)
    from cookbook_npu.cluster.worker_group import LocalWorkerGroup
    from cookbook_npu.recipes import qwen3_4b_colocate

    config = qwen3_4b_colocate(
        model=task["folder"],
        prompts_per_step=task["prompts"],
        samples_per_prompt=task["samples"],
        overrides={
            "parallel.tensor": 1,
            "placement.devices": 1,
            "sampling.max_response_tokens": task["tokens"],
            "algorithm.use_reference": False,
            "train.micro_batch_tokens": MICRO_BATCH_TOKENS,
            "train.layout": task["what"],
        },
    )
    kwargs = {"config": config, "hf_path": task["folder"]}
    role = "cookbook_npu.train.trainer:Trainer"
    return config, LocalWorkerGroup.create("trainer", role, kwargs=kwargs).workers[0]


def train(task: Task) -> dict[str, float]:
    "Trained tokens for each second of processor time, packing efficiency, memory"
    from cookbook_npu.npu.device import accelerator
    from cookbook_npu.train.batch import make_batch

    config, trainer = open_trainer(task)
    batch = make_batch(
        samples_of(task),
        task["samples"],
        config.algorithm,
        config.global_batch_size,
        task["tokens"],
    )
    trainer.train(batch)  # makes the optimizer's state
    device = accelerator()
    before = device.memory_allocated(0)
    device.reset_peak(0)
    start = time.process_time()
    trainer.train(batch)
    seconds = time.process_time() - start
    micro_batches = [
        [batch.lengths[i] for i in rows]
        for rows in trainer.micro_batches(batch, batch.optimizer_steps[0])
    ]
    padded = task["what"] == "bshd"
    computed = [len(m) * max(m) if padded else sum(m) for m in micro_batches]
    tokens = sum(map(sum, micro_batches))
    peak = device.max_memory_allocated(0) - before
    return {
        "speed": tokens / seconds,
        "efficiency": tokens / sum(computed),
        "bytes": peak / max(map(sum, micro_batches)),
    }


# ---- the comparison

WORK = {"sample": sample, "train": train}


def in_process(task: Task) -> dict[str, float]:
    "One measurement in a fresh process"
    simulated = {"COOKBOOK_NPU_SIMULATE": "1", "COOKBOOK_NPU_SIM_DEVICES": "1"}
    env = os.environ | simulated | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, __file__, "--work", json.dumps(task)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{task} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def in_turns(task: Task, sides: list[str], rounds: int) -> dict[str, dict[str, float]]:
    "The median of each figure of each side"
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side in sides:
            found[side].append(in_process(task | {"what": side}))
    return {
        side: {name: statistics.median(one[name] for one in runs) for name in runs[0]}
        for side, runs in found.items()
    }


def show_sampling(task: Task, rounds: int) -> None:
    "A line for each engine"
    sides = ["generate", "transformers"]
    if importlib.util.find_spec("vllm"):
        sides.append("vllm")
    else:
        print("vllm is not installed: its line is left out")
    found = in_turns(task | {"work": "sample"}, sides, rounds)
    for side, figures in found.items():
        ratio = figures["speed"] / found["generate"]["speed"]
        print(
            f"{task['tokens']:6} tokens  sampling  {side:13}"
            f"{figures['speed']:9.0f} tokens/s  {ratio:5.2f} of generate",
            flush=True,
        )


def show_training(task: Task, rounds: int) -> None:
    "A line for each layout"
    found = in_turns(task | {"work": "train"}, ["bshd", "thd"], rounds)
    for side, figures in found.items():
        ratio = figures["speed"] / found["bshd"]["speed"]
        print(
            f"{task['tokens']:6} tokens  training  {side:13}"
            f"{figures['speed']:9.0f} tokens/s  {ratio:5.2f} of bshd  "
            f"packing efficiency {figures['efficiency']:.2f}  "
            f"{figures['bytes'] / 1024:.0f} KiB a token",
            flush=True,
        )


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024])
    for name, default in (
        ("layers", 8),
        ("hidden", 384),
        ("prompts", 4),
        ("samples", 8),
        ("rounds", 2),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        task = json.loads(args.work)
        print("RESULT", json.dumps(WORK[task["work"]](task)))
        return
    with tempfile.TemporaryDirectory() as root:
        size = {"layers": args.layers, "hidden": args.hidden}
        folder = build(size, Path(root) / "model")
        forget_end_token(folder)
        millions = sum(f.stat().st_size for f in folder.glob("*.safetensors")) / 4e6
        print(
            f"{args.layers} layers x {args.hidden}, {millions:.1f} million weights, "
            f"{args.prompts} prompts x {args.samples} samples, simulated NPU, one thread"
        )
        for tokens in args.tokens:
            task = {
                "folder": str(folder),
                "tokens": tokens,
                "prompts": args.prompts,
                "samples": args.samples,
            }
            show_sampling(task, args.rounds)
            show_training(task, args.rounds)


if __name__ == "__main__":
    main()
