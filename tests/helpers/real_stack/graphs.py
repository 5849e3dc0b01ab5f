"""Captured graphs of a real engine: which memory they read, whose it is, and log-probs after everything that
updates weights or sleeps. Jobs for `Stack.job("graphs:NAME")`.
"""

import bisect
import gc
import json
from pathlib import Path
from typing import Any

import torch
from conformance import folder_weights, teacher_forced
from torch._subclasses.fake_tensor import FakeTensor

from real_stack.jobs import ENGINE_ARGS

SIZES = [1, 2, 4, 8]
PROMPTS = ["1+1=", "2*3=", "What is 12 plus 30?", "7-5=", "Say why 9 is odd:", "4*4="]
HIT, PAD, MISS = 1, 3, 6  # prompts of two samples each


def graphs() -> list[dict[str, Any]]:
    "Graphs that are alive: their launches, and how often they were replayed and updated"
    import npu_wheel_bridge

    return [json.loads(text) for text in npu_wheel_bridge.graphs()]


def replays() -> int:
    return sum(graph["replays"] for graph in graphs())


def hazards() -> list[str]:
    "What the ledger of unfinished launches has reported"
    import npu_wheel_bridge

    return npu_wheel_bridge.reports()


# ---- whose memory


def owners(worker: Any) -> dict[str, torch.Tensor]:
    "Parameters, buffers, adapters and caches of an engine by name"
    from cookbook_npu.rollout.vllm_layers import engine_tensors

    return {k: t for k, t in engine_tensors(worker).items() if t.device.type == "npu"}


Span = tuple[int, int, str]  # start, end, name


def inside(spans: list[Span], at: int) -> str | None:
    "Name of the span that holds an address; spans are sorted and do not overlap"
    i = bisect.bisect_right(spans, (at, 1 << 62, "")) - 1
    return spans[i][2] if i >= 0 and spans[i][0] <= at < spans[i][1] else None


def extent(x: torch.Tensor) -> int:
    "Bytes between the first and the last element"
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size() if x.numel() else 0


def living() -> list[Span]:
    "Storages of every tensor that Python can reach"
    gc.unfreeze()  # the engine froze what it had imported, tensors too
    found: dict[int, int] = {}
    for x in gc.get_objects():
        kind = type(x)
        if (
            issubclass(kind, torch.Tensor)
            and kind is not FakeTensor
            and x.device.type == "npu"
        ):
            storage = x.untyped_storage()
            start = storage.data_ptr()
            found[start] = max(found.get(start, 0), storage.nbytes())
    return sorted((at, at + size, "a tensor") for at, size in found.items())


def pool() -> list[Span]:
    "Memory of the graphs' own pool"
    from vllm.platforms import current_platform

    own = tuple(current_platform.get_global_graph_pool())
    own = own[0] if isinstance(own[0], tuple) else own
    return sorted(
        (s["address"], s["address"] + s["total_size"], "the graphs' pool")
        for s in torch.npu.memory_snapshot()
        if tuple(s["segment_pool_id"]) == own
    )


def layout(x: torch.Tensor) -> tuple:
    return x.data_ptr(), tuple(x.shape), x.stride()


class Audit:
    "What the graphs read from outside of their pool, by owner, and whether it is still there"

    def __init__(self, worker: Any):
        self.worker = worker
        first = owners(worker)
        self.first = {name: layout(x) for name, x in first.items()}
        spans = sorted(
            (x.data_ptr(), x.data_ptr() + extent(x), n) for n, x in first.items()
        )
        own = pool()
        self.reads: dict[int, tuple[int, str, str | None]] = {}  # bytes, where, owner
        for graph in graphs():
            for i, (name, touches) in enumerate(graph["launches"]):
                where = f"graph {graph['id']}, launch {i} ({name})"
                for at, size, _, fresh in touches:
                    if size and not fresh and not inside(own, at):
                        self.reads.setdefault(at, (size, where, inside(spans, at)))
        self.names = {owner for *_, owner in self.reads.values() if owner}

    def problems(self) -> list[str]:
        "Tensors of which the graphs have another address, shape or stride; memory without an owner"
        import npu_wheel_bridge

        now, spans, found = owners(self.worker), living(), []
        for name in sorted(self.names):
            if name not in now:
                found.append(f"{name}: is gone")
            elif layout(now[name]) != self.first[name]:
                moved = now[name].data_ptr() != self.first[name][0]
                found.append(f"{name}: {'moved' if moved else 'laid out anew'}")
        for at, (size, where, owner) in self.reads.items():
            if state := npu_wheel_bridge.memory(at, size):
                found.append(f"{owner or hex(at)}: {state}: {where}")
            elif not owner and not inside(spans, at):
                found.append(f"{hex(at)}: belongs to no tensor any more: {where}")
        return found


# ---- an engine and what happens to it


class Lane:
    "An engine, its two sets of weights, and what each cell of the matrix found"

    def __init__(
        self,
        folder: str,
        family: str = "qwen3",
        mode: str = "FULL_DECODE_ONLY",
        **settings: Any,
    ):
        from cookbook_npu.rollout.vllm import VllmEngine

        self.paths = [Path(folder, f"{family}{seed}") for seed in (0, 1)]
        args = ENGINE_ARGS | settings.pop("engine_args", {})
        args |= {
            "compilation_config": {"cudagraph_mode": mode, "cudagraph_capture_sizes": SIZES}
        }
        common = {"dtype": "float32", "max_tokens": 64, "kv_cache_bytes": 8 << 20}
        self.engine = VllmEngine(
            self.paths[0], graphs=mode, engine_args=args, **(common | settings)
        )
        self.engine.llm.collective_rpc(self._hold)
        self.audit = Audit(self.worker)
        self.cells: dict[str, dict[str, Any]] = {}

    def _hold(self, worker: Any) -> None:
        self.worker = worker

    def update(self, which: int) -> None:
        weights = folder_weights(self.paths[which])
        self.engine.update_weights(self.engine.version + 1, weights.items())

    def gap(self, path: Path, *counts: int) -> float:
        "Largest difference to a teacher-forced pass at temperature 0.7"
        from cookbook_npu.config import SamplingConfig
        from cookbook_npu.rollout.engine import SamplingParams, text_requests

        sampling = SamplingParams.of(SamplingConfig(max_response_tokens=6, temperature=0.7))
        worst = 0.0
        for count in counts:
            requests = text_requests(PROMPTS[:count], 2, 0, self.engine.tokenizer)
            for s in self.engine.generate(requests, sampling):
                gap = teacher_forced(path, s, 0.7) - torch.tensor(s.logprobs)
                worst = max(worst, gap.abs().max().item())
        return worst

    def cell(self, name: str, which: int, *counts: int) -> None:
        before = replays()
        self.cells[name] = {
            "gap": self.gap(self.paths[which], *(counts or (PAD,))),
            "replays": replays() - before,
            "problems": self.audit.problems(),
        }

    def result(self) -> dict[str, Any]:
        return {
            "cells": self.cells,
            "graphs": [len(g["launches"]) for g in graphs()],
            "updates": sum(g["updates"] for g in graphs()),
            "names": sorted(self.audit.names),
            "hazards": hazards(),
        }


def matrix(
    folder: str, methods: list[str] | None = None, **settings: Any
) -> dict[str, Any]:
    "Log-probs, replays and addresses after each way to update weights, awake and asleep, twice each"
    lane = Lane(folder, **settings)
    engine = lane.engine
    lane.cell("start, sizes that hit", 0, HIT)
    lane.cell("start, sizes that pad", 0, PAD)
    lane.cell("start, sizes that miss", 0, MISS)
    for method, refused in engine.weights.methods.items():
        if refused or method not in (methods or engine.weights.methods):
            continue
        engine.weights.method = method
        for turn in (1, 2):
            lane.update(1)
            lane.cell(f"{method}, awake, {turn}", 1)
            engine.sleep(2)
            engine.wake(["weights"])
            lane.update(0)
            engine.wake(["kv_cache"])
            lane.cell(f"{method}, sleep 2, {turn}", 0)
            lane.update(1)
            engine.sleep(1)
            engine.wake()
            lane.cell(f"{method}, sleep 1, {turn}", 1)
    return lane.result()
