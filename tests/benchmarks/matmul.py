"""Matrix products of the simulated NPU against those of plain CPU PyTorch:
`python tests/benchmarks/matmul.py [--rows 4256 32] [--seconds 1]`

A linear layer of 256 features and its gate of 2 x 768, forwards and both products of its backward pass, in
float32 on one thread, in turns, by processor time. `--rows` are the tokens: those of a training step, and
the sequences that a decode step runs. The ratio is above 1 where the simulated NPU is faster; what it is
depends on the processor, since PyTorch's products come from MKL and the simulated NPU's from oneDNN.
"""

import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from options import option_parser

from cookbook_npu.npu import simulator

FEATURES = ((256, 512), (256, 1536), (768, 256))
ROUNDS = 5


def products(x_TI: torch.Tensor, weight_OI: torch.Tensor, grad_TO: torch.Tensor) -> dict:
    "The three products of a linear layer"
    return {
        "forward": lambda: x_TI @ weight_OI.t(),
        "input gradient": lambda: grad_TO @ weight_OI,
        "weight gradient": lambda: grad_TO.t() @ x_TI,
    }


def seconds_of(call: Callable[[], object], seconds: float) -> float:
    "Processor time of one call, over calls that take so long together"
    calls = 0
    began = time.process_time()
    while time.process_time() - began < seconds:
        call()
        calls += 1
    return (time.process_time() - began) / calls


def measure(rows: int, seconds: float) -> list[float]:
    "Print a table for so many rows; the ratios"
    ratios = []
    for inputs, outputs in FEATURES:
        tensors = (
            torch.randn(rows, inputs),
            torch.randn(outputs, inputs),
            torch.randn(rows, outputs),
        )
        host = products(*tensors)
        device = products(*(t.to("npu") for t in tensors))
        operations = 2e-9 * rows * inputs * outputs
        for name in host:
            pairs = [
                (seconds_of(host[name], seconds), seconds_of(device[name], seconds))
                for _ in range(ROUNDS)
            ]
            cpu, npu = (median(column) for column in zip(*pairs, strict=True))
            ratios.append(cpu / npu)
            print(
                f"  {rows:5} x {inputs:3} x {outputs:4} {name:16} CPU {operations / cpu:6.0f} "
                f"GFLOP/s, simulated NPU {operations / npu:6.0f}, ratio {cpu / npu:.2f}"
            )
    return ratios


def main() -> int:
    "Measure and print"
    parser = option_parser(__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=[4256, 32])
    parser.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        help="of each product, for both sides together",
    )
    args = parser.parse_args()
    simulator.install()
    torch.set_num_threads(1)
    print(
        f"float32, one thread, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    )
    for rows in args.rows:
        ratios = measure(rows, args.seconds / (2 * ROUNDS))
        print(f"{rows} rows: median ratio {median(ratios):.2f} (simulated NPU)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
