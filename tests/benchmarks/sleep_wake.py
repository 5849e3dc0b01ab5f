"""Sleep and wake of a trainer that holds Qwen3-0.6B in bfloat16, beside plain copies of as many bytes.

Both in this run, in turns, on one thread of a simulated NPU, by processor time. Run by hand:

    python tests/benchmarks/sleep_wake.py [--share 1.0] [--rounds 5]

`--share 0.25` takes a quarter of the layers, for a machine with less than 6 GiB to spare. The plain copy
goes from one pinned block to another, both warm, there and back: that is what a sleep and a wake have to
move. The second plain copy comes back into fresh device memory and gives it up, as a wake and the next
sleep do: on a simulated NPU the host's kernel clears that memory, which a real device does not. Prints the
best of the rounds, and the medians of the ratios: each sleep and wake against the copies of its round.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator

os.environ |= {"COOKBOOK_NPU_SIMULATE": "1", "COOKBOOK_NPU_SIM_MEMORY": str(8 << 30)}

import torch

from cookbook_npu.npu.device import accelerator
from cookbook_npu.npu.shims.bootstrap import bootstrap
from cookbook_npu.train.offload import PINNED_BLOCK_BYTES, HostOffloader

HIDDEN, FFN, QUERY, KEY, HEAD, VOCAB, LAYERS = 1024, 3072, 2048, 1024, 128, 151936, 28


def shapes(share: float) -> Iterator[tuple[int, ...]]:
    "Every weight of Qwen3-0.6B (tied head); a part of the layers"
    yield VOCAB, HIDDEN
    for _ in range(round(LAYERS * share)):
        yield from (
            (QUERY, HIDDEN),
            (KEY, HIDDEN),
            (KEY, HIDDEN),
            (HIDDEN, QUERY),
            (HEAD,),
            (HEAD,),
        )
        yield from ((FFN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN), (HIDDEN,), (HIDDEN,))
    yield (HIDDEN,)


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    bootstrap("plain")
    torch.set_num_threads(1)
    weights = [
        torch.full(shape, 0.5, dtype=torch.bfloat16, device="npu")
        for shape in shapes(options.share)
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
        torch.empty(nbytes, dtype=torch.uint8, device="npu").copy_(there)
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
        f"{len(weights)} tensors, {nbytes / 1e9:.2f} GB; best of {options.rounds}, on a simulated NPU"
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
