"""Sleep and wake of a trainer that holds a Qwen3 in bfloat16, beside plain copies of as many bytes.

Both in this run, in turns, on one thread of a simulated NPU, by processor time. Run by hand:

    python tests/benchmarks/sleep_wake.py [--model 0.6B] [--layers 28] [--rounds 5]
    python tests/benchmarks/sleep_wake.py --device cuda --model 4B --optimizer    # by the clock

`--layers 7` takes a quarter of the layers, for a machine with less than 6 GiB to spare. `--optimizer` adds
what an optimizer keeps of each weight: a master copy and two moments in float32. The plain copy
goes from one pinned block to another, both warm, there and back: that is what a sleep and a wake have to
move. The second plain copy comes back into fresh device memory and gives it up, as a wake and the next
sleep do: on a simulated NPU the host's kernel clears that memory, which a real device does not. Prints the
best of the rounds, and the medians of the ratios: each sleep and wake against the copies of its round.
"""

import statistics
from collections.abc import Callable

from options import option_parser
from qwen3_weights import add_device_options, choose_device, dimensions, shapes


def main() -> None:
    parser = option_parser(__doc__)
    add_device_options(parser)
    parser.add_argument("--optimizer", action="store_true", help="and its state")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    clock = choose_device(options)
    import torch

    from cookbook_npu.npu.device import accelerator
    from cookbook_npu.npu.shims.bootstrap import bootstrap
    from cookbook_npu.train.offload import PINNED_BLOCK_BYTES, HostOffloader

    def seconds(work: Callable[[], object]) -> float:
        "What it takes"
        began = clock()
        work()
        return clock() - began

    bootstrap("plain")
    torch.set_num_threads(1)
    device = accelerator().device(0)
    kinds = [torch.bfloat16, *[torch.float32] * (3 * options.optimizer)]
    weights = [
        torch.full(shape, 0.5, dtype=kind, device=device)
        for shape in shapes(dimensions(options)).values()
        for kind in kinds
    ]
    nbytes = sum(w.nbytes for w in weights)
    here, there = (torch.ones(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    offloaders = {
        f"blocks of {block >> 20} MiB": HostOffloader(
            accelerator(), lambda: weights, lambda: [], block
        )
        for block in (PINNED_BLOCK_BYTES, 16 << 20)
    }

    def plain() -> None:
        there.copy_(here)
        here.copy_(there)

    def fresh() -> None:
        there.copy_(here)
        torch.empty(nbytes, dtype=torch.uint8, device=device).copy_(there)
        accelerator().empty_cache()

    plains = {"plain": plain, "fresh": fresh}
    ratios = {(p, name): [] for p in plains for name in offloaders}
    best = {name: [float("inf")] * 2 for name in (*plains, *offloaders)}
    for offloader in offloaders.values():
        # the first sleep allocates the blocks
        offloader.sleep()
        offloader.wake()
    for _ in range(options.rounds):
        rows = {name: (seconds(copy), 0.0) for name, copy in plains.items()}
        for name, offloader in offloaders.items():
            rows[name] = (seconds(offloader.sleep), seconds(offloader.wake))
        for name, row in rows.items():
            best[name] = [min(old, new) for old, new in zip(best[name], row, strict=True)]
        for plain_copy, name in ratios:
            ratio = rows[plain_copy][0] / sum(rows[name])
            ratios[plain_copy, name].append(ratio)
    print(
        f"{len(weights)} tensors, {nbytes / 1e9:.2f} GB; best of {options.rounds}, on {accelerator().name}"
    )
    for name, what in (("plain", "there and back"), ("fresh", "into fresh memory")):
        whole = best[name][0]
        rate = 2 * nbytes / 1e9 / whole
        print(f"{'plain, ' + what:24} {whole:6.3f} s  {rate:5.2f} GB/s")
    for name in offloaders:
        away, back = best[name]
        rate = f"{2 * nbytes / 1e9 / (away + back):5.2f} GB/s"
        print(
            f"{name:24} {away + back:6.3f} s  {rate}  sleep {away:.3f} s, wake {back:.3f} s; "
            f"ratio {statistics.median(ratios['plain', name]):.2f}, "
            f"to fresh memory {statistics.median(ratios['fresh', name]):.2f}"
        )
    assert all(bool((w == 0.5).all()) for w in weights)


if __name__ == "__main__":
    main()
