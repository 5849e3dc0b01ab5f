"""What a weight update of a Qwen3 costs, against a plain copy of the same bytes in the same run.

    python tests/benchmarks/weight_update_speed.py [--engine vllm] [--layers 28] [--every 8] [--rounds 5]
    python tests/benchmarks/weight_update_speed.py --device cuda --model 4B --engine vllm    # by the clock

The tensors are those of the model in bfloat16, head tied (0.6B: 1.19 GB with its 28 layers). Every round
copies them once into a buffer that is used again (`memcpy`) and updates the engine once. The update is
`write_buckets` (the trainer's side, on the device), `read_buckets` and the comparison of checksums, as a
run does them, and loading into the engine's own weights. Processor time of one thread, on a GPU by the
clock; best of the rounds; the first update, which also makes the shared memory, is printed too. The
ratios are medians over the rounds, each update against the copy before it: without and with the engine's
load. For vLLM on a CPU the time of packing the weights once is printed, too: vLLM computes with packed
weights there, so no load is faster.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from options import option_parser

MODELS = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32},
}
LAYERS = {"0.6B": 28, "4B": 36}


def model_config(args: argparse.Namespace):
    "Of the model that was asked for"
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=151936,
        num_hidden_layers=args.layers or LAYERS[args.model],
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        **MODELS[args.model],
    )


def shapes(config) -> dict[str, tuple[int, ...]]:
    "Names and shapes of the weights; the head is tied"
    import torch
    from transformers import Qwen3ForCausalLM

    with torch.device("meta"):
        return {n: p.shape for n, p in Qwen3ForCausalLM(config).named_parameters()}


def add_device_options(parser: argparse.ArgumentParser) -> None:
    "Which device, which model, how much of it"
    parser.add_argument(
        "--device",
        choices=("npu", "cuda"),
        default="npu",
        help="npu: simulated, by processor time; cuda: a GPU, by the clock",
    )
    parser.add_argument("--model", choices=tuple(MODELS), default="0.6B")
    parser.add_argument("--layers", type=int, help="fewer than the model has")


def choose_device(args: argparse.Namespace) -> Callable[[], float]:
    "Before anything asks for a device: choose it; seconds so far, of work that is done"
    os.environ["COOKBOOK_NPU_SIMULATE"] = str(int(args.device == "npu"))
    if args.device == "npu":
        os.environ.setdefault("COOKBOOK_NPU_SIM_MEMORY", str(8 << 30))
        return time.process_time
    import torch

    if not torch.cuda.is_available():
        sys.exit("--device cuda, and this machine has no GPU that torch can use")

    def clock() -> float:
        "The GPU works while its program goes on"
        torch.cuda.synchronize()
        return time.perf_counter()

    return clock


def folder_of(where: str, tensors: dict, config) -> Path:
    """A Hugging Face folder that an engine can be built from."""
    from safetensors.torch import save_file

    from cookbook_npu.data.tokenizer import build_tokenizer

    folder = Path(where, "model")
    build_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(
        json.dumps(
            config.to_dict() | {"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16"}
        )
    )
    save_file(
        {n: t.cpu() for n, t in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def build(engine: str, folder: Path):
    if engine == "vllm":
        from cookbook_npu.rollout.vllm import VllmEngine

        return VllmEngine(folder, dtype="bfloat16", max_tokens=64, kv_cache_bytes=64 << 20)
    from cookbook_npu.rollout.transformers import TransformersEngine

    return TransformersEngine(folder, dtype="bfloat16")


def time_hooks(engine, seconds: dict[str, float], clock: Callable[[], float]) -> None:
    """Time the two parts of an engine's weight update: loading, and the checksums of what it holds."""
    load = engine.weights.load
    sums = engine.weights.checksums

    def timed(name, work):
        def call(*args):
            start = clock()
            try:
                return work(*args)
            finally:
                seconds[name] = seconds.get(name, 0.0) + clock() - start

        return call

    engine.weights.load = timed("load", load)
    engine.weights.checksums = timed("engine checksums", sums)


def pack_seconds(tensors: dict, clock: Callable[[], float]) -> float:
    """What vLLM's own packing of every matrix takes, once: the head, and no norm."""
    from vllm import _custom_ops

    start = clock()
    for tensor in tensors.values():
        if tensor.dim() == 2:
            _custom_ops.create_onednn_mm(tensor.t(), 32)
    return clock() - start


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument(
        "--engine", choices=("transformers", "vllm"), default="transformers"
    )
    add_device_options(parser)
    for name, default in (("every", 8), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    clock = choose_device(args)

    from cookbook_npu.npu.shims.bootstrap import bootstrap

    bootstrap("rollout")
    import torch

    from cookbook_npu.npu.device import accelerator
    from cookbook_npu.weights.transport import (
        MappedBuckets,
        SharedMemory,
        read_buckets,
        write_buckets,
    )

    torch.set_num_threads(1)
    device = accelerator().device(0)
    if args.engine == "vllm" and args.device == "npu":
        device = torch.device("cpu")
    config = model_config(args)
    tensors = {
        n: torch.randn(s, dtype=torch.bfloat16, device=device)
        for n, s in shapes(config).items()
    }
    total = sum(t.nbytes for t in tensors.values())
    source = torch.zeros(total, dtype=torch.uint8).fill_(1)
    target = torch.zeros(total, dtype=torch.uint8).fill_(2)
    with tempfile.TemporaryDirectory() as tmp:
        engine = build(args.engine, folder_of(tmp, tensors, config))
    seconds: dict[str, float] = {}
    time_hooks(engine, seconds, clock)
    memory = SharedMemory()
    mapped = MappedBuckets()
    rounds = []
    for version in range(args.rounds + 1):
        seconds.clear()
        start = clock()
        target.copy_(source)
        copied = clock()
        manifest = write_buckets(version, tensors.items(), 512 << 20, memory, args.every)
        written = clock()
        named = read_buckets(manifest, mapped=mapped)
        engine.update_weights(version, named, manifest.expected)
        done = clock()
        memory.release()
        read_compare = done - written - seconds["load"]
        rounds.append(
            {
                "memcpy": copied - start,
                "write": written - copied,
                "read, compare": read_compare,
                **seconds,
            }
        )
    first = rounds[0]
    steady = {name: min(r[name] for r in rounds[1:]) for name in first}
    print(
        f"{total / 1e9:.2f} GB in {len(tensors)} tensors, {len(manifest.buckets)} buckets; "
        f"{args.engine} on {device}"
    )
    print(f"{len(manifest.expected)} tensors compared in the last round")
    for name, value in steady.items():
        print(
            f"{name:>17}: {value:6.3f} s, {total / value / 1e9:6.2f} GB/s; "
            f"first time {first[name]:6.3f} s"
        )
    if device.type == "cpu":
        packing = pack_seconds(tensors, clock)
        print(f"{'packing alone':>17}: {packing:6.3f} s, {total / packing / 1e9:6.2f} GB/s")
    for what, parts in (
        ("write + read + compare", ("write", "read, compare")),
        ("write + read + load + compare", ("write", "read, compare", "load")),
    ):
        ratios = [r["memcpy"] / sum(r[part] for part in parts) for r in rounds[1:]]
        print(f"memcpy / ({what}) = {statistics.median(ratios):.2f}")
    engine.close()


if __name__ == "__main__":
    main()
