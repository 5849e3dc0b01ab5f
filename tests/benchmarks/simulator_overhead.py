"""What the simulated NPU costs over plain CPU PyTorch, both in this run, on one thread. Run by hand:

    python tests/benchmarks/simulator_overhead.py

Prints ratios (simulated NPU / CPU): for small operators, where the dispatcher takes all the time, and for a
training step of a Qwen3 with 15 million parameters, where the arithmetic does.
"""

import functools
import time
from collections.abc import Callable

import torch
from options import option_parser

from cookbook_npu.npu import simulator
from cookbook_npu.npu.shims.torchvision_ops import install_finder

OPERATORS = {
    "a + b": lambda a, b, i: a + b,
    "a.add_(b)": lambda a, b, i: a.add_(b),
    "a * 2.0": lambda a, b, i: a * 2.0,
    "a @ b": lambda a, b, i: a @ b,
    "a.view(-1)": lambda a, b, i: a.view(-1),
    "a[1:]": lambda a, b, i: a[1:],
    "a[i]": lambda a, b, i: a[i],
    "cat": lambda a, b, i: torch.cat([a, b]),
    "softmax": lambda a, b, i: a.softmax(-1),
    "sum().item()": lambda a, b, i: a.sum().item(),
    "empty_like": lambda a, b, i: torch.empty_like(a),
    "to(bfloat16)": lambda a, b, i: a.to(torch.bfloat16),
}


def fastest(work: Callable[[], object], calls: int, repeats: int) -> float:
    "Seconds per call, the best of several repeats: other work on the machine only ever adds"
    work()
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(calls):
            work()
        best = min(best, (time.perf_counter() - began) / calls)
    return best


def small_operators() -> None:
    tensors = {
        d: (
            torch.randn(4, 4, device=d),
            torch.randn(4, 4, device=d),
            torch.tensor([0, 1], device=d),
        )
        for d in ("cpu", "npu")
    }
    with torch.no_grad():
        for name, operator in OPERATORS.items():
            cpu = fastest(functools.partial(operator, *tensors["cpu"]), 300, 40) * 1e6
            npu = fastest(functools.partial(operator, *tensors["npu"]), 300, 40) * 1e6
            print(
                f"{name:14s} cpu {cpu:6.2f} us   simulated NPU {npu:6.2f} us   "
                f"ratio {npu / cpu:.2f}"
            )


def training_step(device: str) -> tuple[Callable[[], None], int]:
    install_finder()  # transformers imports torchvision
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 384,
        "num_hidden_layers": 8,
        "vocab_size": 8192,
        "intermediate_size": 1024,
    }
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}
    model = Qwen3ForCausalLM(
        Qwen3Config(**sizes, **heads, max_position_embeddings=512, tie_word_embeddings=True)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 8192, (2, 128)).to(device)

    def step() -> None:
        model(ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, sum(p.numel() for p in model.parameters())


def main() -> None:
    option_parser(__doc__).parse_args()
    began = time.perf_counter()
    simulator.install()
    print(
        f"installed in {time.perf_counter() - began:.1f} s "
        "(with the build, if the cache did not have it)"
    )
    torch.set_num_threads(1)
    small_operators()
    seconds = {}
    for device in ("cpu", "npu"):
        step, parameters = training_step(device)
        seconds[device] = fastest(step, 1, 8)
    cpu = seconds["cpu"] * 1e3
    npu = seconds["npu"] * 1e3
    print(f"training step, {parameters / 1e6:.1f}M parameters:")
    print(
        f"               cpu {cpu:6.0f} ms   simulated NPU {npu:6.0f} ms   "
        f"ratio {npu / cpu:.2f}"
    )


if __name__ == "__main__":
    main()
