"""The weights of Qwen3 by name and shape, and a clock, for benchmarks that move them on a device."""

import argparse
import os
import sys
import time
from collections.abc import Callable

DIMENSIONS = {
    "0.6B": {
        "vocab": 151936,
        "hidden": 1024,
        "ffn": 3072,
        "heads": 16,
        "kv_heads": 8,
        "head": 128,
        "layers": 28,
    },
    "4B": {
        "vocab": 151936,
        "hidden": 2560,
        "ffn": 9728,
        "heads": 32,
        "kv_heads": 8,
        "head": 128,
        "layers": 36,
    },
}


def shapes(q: dict[str, int]) -> dict[str, tuple[int, ...]]:
    "Hugging Face names and shapes; the head is tied"
    names = {
        "model.embed_tokens.weight": (q["vocab"], q["hidden"]),
        "model.norm.weight": (q["hidden"],),
    }
    per_layer = {
        "input_layernorm": (q["hidden"],),
        "post_attention_layernorm": (q["hidden"],),
        "self_attn.q_proj": (q["heads"] * q["head"], q["hidden"]),
        "self_attn.k_proj": (q["kv_heads"] * q["head"], q["hidden"]),
        "self_attn.v_proj": (q["kv_heads"] * q["head"], q["hidden"]),
        "self_attn.o_proj": (q["hidden"], q["heads"] * q["head"]),
        "self_attn.q_norm": (q["head"],),
        "self_attn.k_norm": (q["head"],),
        "mlp.gate_proj": (q["ffn"], q["hidden"]),
        "mlp.up_proj": (q["ffn"], q["hidden"]),
        "mlp.down_proj": (q["hidden"], q["ffn"]),
    }
    for i in range(q["layers"]):
        names |= {f"model.layers.{i}.{n}.weight": s for n, s in per_layer.items()}
    return names


def add_device_options(parser: argparse.ArgumentParser) -> None:
    "Which device, which model, how much of it"
    parser.add_argument(
        "--device",
        choices=("npu", "cuda"),
        default="npu",
        help="npu: simulated, by processor time; cuda: a GPU, by the clock",
    )
    parser.add_argument("--model", choices=tuple(DIMENSIONS), default="0.6B")
    parser.add_argument("--layers", type=int, help="fewer than the model has")


def dimensions(args: argparse.Namespace) -> dict[str, int]:
    "Of the model that was asked for"
    found = DIMENSIONS[args.model]
    return found if args.layers is None else found | {"layers": args.layers}


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
