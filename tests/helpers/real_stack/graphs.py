"""Captured graphs of a real engine: which memory they read, whose it is, and log-probs after everything that
updates weights or sleeps. Jobs for `Stack.job("graphs:NAME")`.
"""

import bisect
import gc
import importlib
import json
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from conformance import folder_weights, teacher_forced
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing import reductions

from cookbook_npu.npu.shims.vllm_weights import NATIVE_NAMES, start_arguments
from cookbook_npu.rollout import vllm_layers
from real_stack.jobs import ENGINE_ARGS, SIZES

METHODS = ("reload_weights", "update_weights", "load_weights")
PROMPTS = ["1+1=", "2*3=", "What is 12 plus 30?", "7-5=", "Say why 9 is odd:", "4*4="]
HIT, PAD, MISS = 1, 3, 6  # prompts of two samples each


def graphs() -> list[dict[str, Any]]:
    "Graphs that are alive: their launches, and how often they were replayed and updated"
    return [json.loads(text) for text in bridge().graphs()]


def replays() -> int:
    return sum(graph["replays"] for graph in graphs())


def bridge() -> Any:
    return importlib.import_module("npu_wheel_bridge")


# ---- whose memory


Span = tuple[int, int, str]  # start, end, name


def inside(spans: list[Span], at: int) -> str | None:
    "Name of the span that holds an address; spans are sorted and do not overlap"
    i = bisect.bisect_right(spans, (at, 1 << 62, "")) - 1
    return spans[i][2] if i >= 0 and spans[i][0] <= at < spans[i][1] else None


def living() -> list[Span]:
    "Storages of every tensor that Python can reach"
    gc.unfreeze()  # the engine froze what it had imported, tensors too
    found: dict[int, int] = {}
    for x in gc.get_objects():
        is_real = issubclass(type(x), torch.Tensor) and type(x) is not FakeTensor
        if is_real and x.device.type == "npu":
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


class Audit:
    "What the graphs read from outside of their pool, by owner, and whether it is still there"

    def __init__(self, worker: Any):
        from launches import touch

        self.worker = worker
        self.first = vllm_layers.worker_layouts(worker)
        tensors = vllm_layers.engine_tensors(worker).items()
        touches = ((name, *touch(x, False)) for name, x in tensors)
        spans = sorted((at, at + size, name) for name, at, size, *_ in touches if size)
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
        now, spans, found = vllm_layers.worker_layouts(self.worker), living(), []
        for name in sorted(self.names):
            if now.get(name) != self.first[name]:
                moved = name not in now or now[name][0] != self.first[name][0]
                found.append(f"{name}: {'moved' if moved else 'laid out anew'}")
        for at, (size, where, owner) in self.reads.items():
            if state := bridge().memory(at, size):
                found.append(f"{owner or hex(at)}: {state}: {where}")
            elif not owner and not inside(spans, at):
                found.append(f"{hex(at)}: belongs to no tensor any more: {where}")
        return found


# ---- an engine and what happens to it


def teacher_gap(path: Path, samples: list[Any]) -> float:
    gaps = [teacher_forced(path, s, 0.7) - torch.tensor(s.logprobs) for s in samples]
    return max(gap.abs().max().item() for gap in gaps)


def eager_gap(eager: list[Any], captured: list[Any]) -> float:
    "Largest difference of log-probs up to the first other token; 1 where a first token differs"
    gaps = []
    for a, b in zip(eager, captured, strict=True):
        same = [x == y for x, y in zip(a.response_ids, b.response_ids, strict=False)]
        n = (same + [False]).index(False)
        gaps += [abs(p - q) for p, q in zip(a.logprobs[:n], b.logprobs[:n], strict=True)]
        gaps += [] if n else [1.0]
    return max(gaps)


def opaque_norm() -> None:
    "Make the gated norm of hybrid models an operator: Dynamo cannot trace an interpreted kernel"
    from vllm_ascend.ops import layernorm

    original = layernorm.layer_norm_fwd_npu

    @torch.library.custom_op("lane::gated_norm", mutates_args=())
    def norm(
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        z: torch.Tensor,
        size: int,
        first: bool,
    ) -> torch.Tensor:
        options = dict(z=z, group_size=size, norm_before_gate=first, is_rms_norm=True)
        return original(x, weight, None, eps, **options)[0]

    norm.register_fake(lambda x, *rest: torch.empty_like(x))

    def traced(x: Any, weight: Any, bias: None, eps: float, z: Any, **options: Any) -> Any:
        size = options["group_size"] or x.shape[-1]
        return norm(x, weight, eps, z, size, options["norm_before_gate"]), None, None

    layernorm.layer_norm_fwd_npu = traced


class Lane:
    "An engine, its two sets of weights, and what each cell of the matrix found"

    def __init__(
        self,
        folder: str,
        family: str = "qwen3",
        mode: str = "FULL_DECODE_ONLY",
        **settings: Any,
    ):
        from cookbook_npu.rollout import vllm

        if family == "qwen3_5":
            imports = vllm.import_vllm
            vllm.import_vllm = lambda build: (imports(build), opaque_norm())[0]
        self.paths = [Path(folder, f"{family}{seed}") for seed in (0, 1)]
        args = {**ENGINE_ARGS, "compilation_config": SIZES}
        common = {"dtype": "float32", "max_tokens": 64, "max_sequences": 16}
        common |= {"kv_cache_bytes": 8 << 20}
        self.engine = vllm.VllmEngine(
            self.paths[0], graphs=mode, engine_args=args, **(common | settings)
        )
        self.engine.llm.collective_rpc(self._hold)
        self.audit = Audit(self.worker)
        self.cells: dict[str, dict[str, Any]] = {}

    def _hold(self, worker: Any) -> None:
        self.worker = worker

    def update(self, which: int) -> None:
        weights, handles = folder_weights(self.paths[which]), {}
        if self.engine.weights.method in NATIVE_NAMES:
            self.shared = {name: t.to("npu") for name, t in weights.items()}
            handles = {
                name: reductions.reduce_tensor(t)[1] for name, t in self.shared.items()
            }
        version = self.engine.version + 1
        self.engine.update_weights(version, weights.items(), handles=handles)

    def question(self, count: int = PAD) -> tuple[list[Any], Any]:
        from cookbook_npu.config import SamplingConfig
        from cookbook_npu.rollout.engine import SamplingParams, text_requests

        sampling = SamplingParams.of(SamplingConfig(max_response_tokens=6, temperature=0.7))
        return text_requests(PROMPTS[:count], 2, 0, self.engine.tokenizer), sampling

    def gap(self, path: Path, count: int = PAD) -> float:
        "Largest difference to a teacher-forced pass at temperature 0.7"
        return teacher_gap(path, self.engine.generate(*self.question(count)))

    def cell(self, name: str, which: int, count: int = PAD) -> None:
        before = replays()
        samples = self.engine.generate(*self.question(count))
        self.cells[name] = {
            "gap": teacher_gap(self.paths[which], samples),
            "replays": replays() - before,
            "problems": self.audit.problems(),
        }
        if self.engine.dtype == torch.bfloat16 and self.engine.graphs:
            # rounding may choose other experts than float32 does: the same engine without graphs
            self.engine.llm.collective_rpc(vllm_layers.replay_graphs, args=(False,))
            eager = self.engine.generate(*self.question(count))
            self.engine.llm.collective_rpc(vllm_layers.replay_graphs, args=(True,))
            self.cells[name] |= {"teacher": self.cells[name]["gap"]}
            self.cells[name] |= {"gap": eager_gap(eager, samples)}

    def result(self) -> dict[str, Any]:
        return {
            "cells": self.cells,
            "graphs": [len(g["launches"]) for g in graphs()],
            "updates": sum(g["updates"] for g in graphs()),
            "names": sorted(self.audit.names),
            "hazards": bridge().reports(),
        }


def matrix(
    folder: str, methods: list[str] | None = None, faults: bool = False, **settings: Any
) -> dict[str, Any]:
    "Log-probs, replays and addresses after each way to update weights, awake and asleep"
    lane = Lane(folder, **settings)
    result = matrix_of(lane, methods or METHODS)
    return result | {"faults": engine_faults(lane)} if faults else result


def matrix_of(lane: Lane, methods: Iterable[str]) -> dict[str, Any]:
    engine = lane.engine
    lane.cell("start, sizes that hit", 0, HIT)
    lane.cell("start, sizes that pad", 0, PAD)
    lane.cell("start, sizes that miss", 0, MISS)
    for method in methods:
        if engine.weights.methods[method]:
            continue
        engine.weights.method = method
        for turn in (1, 2) if method == next(iter(methods)) else (1,):
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


def adapters(folder: str, slots: int = 1) -> dict[str, Any]:
    "The same of adapters in turn, each against its merged weights; `slots` above 1: tenants in one batch"
    from cookbook_npu.config import LoraConfig
    from cookbook_npu.rollout.engine import SharedDecoder, generate_together
    from cookbook_npu.rollout.vllm import VllmAdapterEngine
    from cookbook_npu.rollout.vllm_layers import adapter_shapes

    lora = LoraConfig(rank=8, alpha=16, slots=slots)
    lane = Lane(folder, lora=lora)
    together = SharedDecoder(lane.engine.decoder)
    engines = [lane.engine]
    if slots > 1:
        engines = [VllmAdapterEngine(lane.engine, n, together) for n in range(slots)]
    base = folder_weights(lane.paths[0])
    shapes = adapter_shapes({name: t.shape for name, t in base.items()}, lora)
    for turn in (1, 2):
        for slot, engine in enumerate(engines):
            random = torch.Generator().manual_seed(10 * turn + slot)
            adapter = {
                n: 0.1 * torch.randn(*s, generator=random) for n, s in shapes.items()
            }
            which = len(lane.paths) - 1
            lane.paths.append(merged(lane.paths[0], base, adapter, lora, which))
            engine.update_weights(turn, adapter.items())
        for state in ("awake", "sleep 1"):
            if state == "sleep 1":
                _nap(lane.engine)
            before, question = replays(), lane.question(PAD // slots)
            asked = {n: (e, *question) for n, e in enumerate(engines)}
            found = generate_together(asked)
            pairs = list(zip(lane.paths[-slots:], map(found.get, asked), strict=True))
            lane.cells[f"adapter, {state}, {turn}"] = {
                "gap": max(teacher_gap(path, samples) for path, samples in pairs),
                "replays": replays() - before,
                "problems": lane.audit.problems(),
            }
    earlier = lane.paths[-2]
    lane.cells["against another adapter"] = {"gap": teacher_gap(earlier, pairs[-1][1])}
    stack = next(n for n in lane.audit.first if "lora_a_stacked" in n)
    return lane.result() | {"stack": stack}


def packed(folder: str) -> dict[str, Any]:
    "vllm-ascend's npu_ipc engine: handles of single weights, as the product sends them, and packed ones"
    from vllm_ascend.distributed.weight_transfer.npu_ipc_engine import npu_generate_uuid
    from vllm_ascend.distributed.weight_transfer.packed_tensor import (
        packed_npu_ipc_producer,
    )

    lane = Lane(folder, weight_update_method="native")
    result = matrix_of(lane, ["npu_ipc"])
    weights = folder_weights(lane.paths[0]).items()
    device = {name: tensor.to("npu") for name, tensor in weights}
    lane.worker.start_weight_update(**start_arguments(lane.worker))
    names = ("names", "dtype_names", "shapes", "tensor_sizes")
    for chunk in packed_npu_ipc_producer(
        iterator=iter(device.items()),
        npu_uuid=npu_generate_uuid(),
        post_iter_func=lambda item: item[1],
        buffer_size_bytes=1 << 17,
    ):
        info = {name: chunk[name] for name in names}
        lane.worker.update_weights(
            info | {"ipc_handles": chunk["ipc_handle"], "packed": True}
        )
    lane.worker.finish_weight_update()
    lane.cell("packed", 0)
    return result | lane.result()


def merged(path: Path, base: Any, adapter: Any, lora: Any, turn: int) -> Path:
    "A folder with the adapter added to the weights"
    from safetensors.torch import save_file

    target = path.with_name(f"{path.name} merged {turn}")
    shutil.copytree(path, target, dirs_exist_ok=True)
    weights = dict(base)
    for name in base:
        layer = "base_model.model." + name.removesuffix(".weight")
        if f"{layer}.lora_A.weight" in adapter:
            low, high = (adapter[f"{layer}.lora_{half}.weight"] for half in "AB")
            weights[name] = base[name] + lora.alpha / lora.rank * high @ low
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


# ---- seeded faults: each returns what named it


def _error(call: Any) -> str:
    try:
        call()
    except Exception as error:  # the test compares the text of every kind
        return f"{type(error).__name__}: {error}"
    return "nothing was noticed"


def _nap(engine: Any) -> None:
    engine.sleep(1)
    try:
        engine.wake()
    finally:  # vLLM is awake even if a check of the addresses fails
        engine._resident = {"weights", "kv_cache"}


def _moved(owner: Any, name: str, value: Any, notice: Any) -> str:
    "What notices that an attribute has another value; it has its old one afterwards"
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        return _error(notice)
    finally:
        setattr(owner, name, kept)


def engine_faults(lane: Lane) -> dict[str, str]:
    from types import SimpleNamespace
    from unittest import mock

    from vllm_ascend.compilation.acl_graph import _acl_graph_wrappers

    from cookbook_npu.npu.shims import vllm_ascend

    engine, runner = lane.engine, lane.worker.model_runner
    layer = runner.get_model().model.layers[1]
    weight, rotary = layer.mlp.down_proj.weight, layer.self_attn.rotary_emb
    caches, found = runner.kv_caches, {}

    nap = partial(_nap, engine)
    moved = weight.data.clone()
    found["parameter moved"] = _moved(weight, "data", moved, lambda: lane.update(1))
    kept, weight.data = weight.data, moved
    found["audit"] = "; ".join(lane.audit.problems())
    weight.data = kept
    lane.update(0)
    found["parameter laid out anew"] = _moved(weight, "data", weight.data.T, nap)
    table = rotary.cos_sin_cache.clone()
    found["buffer moved"] = _moved(rotary, "cos_sin_cache", table, nap)
    other = [(caches[0][0].clone(), caches[0][1]), *caches[1:]]
    found["cache moved"] = _moved(runner, "kv_caches", other, nap)
    never = SimpleNamespace(synchronize=lambda: None)
    with mock.patch.object(vllm_ascend, "accelerator", lambda: never):
        lane.update(1)
        nap()
    found["unmapped under a running copy"] = " ".join(bridge().reports())
    entries = [
        entry.aclgraph
        for wrapper in list(_acl_graph_wrappers)
        for entry in wrapper.concrete_aclgraph_entries.values()
    ]
    engine.sleep(2)
    found["replayed while asleep"] = _error(lambda: entries[0].replay())
    engine.wake()
    lane.update(0)
    engine._tried = False
    found["graphs that are right"] = engine.check_graphs()
    runner.input_ids.gpu = runner.input_ids.gpu.clone()  # the graphs read the old ids
    engine._tried = False
    found["input moved"] = engine.check_graphs()
    lane.cell("eager after the fault", 0)
    return found


def runtime_faults() -> dict[str, str]:
    "The same of NPUGraph itself"
    import torch_npu  # noqa: F401

    torch.npu.set_device(0)
    torch.set_grad_enabled(False)
    side = torch.npu.Stream()
    y = torch.zeros(2, device="npu")
    inputs, handles, found = [torch.ones(1 << 20, device="npu")], [], {}

    def captured(work: Any) -> Any:
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            work()
        return graph

    graph = captured(lambda: y.copy_(inputs[0][:2] + 1))
    graph.replay()
    assert y.tolist() == [2, 2]
    inputs.clear()
    torch.npu.synchronize()
    torch.npu.empty_cache()
    found["freed"] = _error(graph.replay)

    def waiting() -> None:
        stream, event = torch.npu.current_stream(), torch.npu.ExternalEvent()
        event.wait(stream)
        event.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        torch.add(y, 1, out=y)
        handles.append((torch.npu.graph_task_group_end(stream), event))

    graph = captured(waiting)
    handle, event = handles[0]
    y.fill_(1)
    graph.replay()
    found["waits for nobody"] = _error(lambda: y.tolist())

    def update(call: Any) -> None:
        with torch.npu.stream(side):
            torch.npu.graph_task_update_begin(side, handle)
            call()
            torch.npu.graph_task_update_end(side)

    found["updated by another operator"] = _error(
        lambda: update(lambda: torch.mul(y, 2, out=y))
    )
    update(lambda: torch.add(y, 10, out=y))
    event.record(side)
    assert y.tolist() == [11, 11]
    found["read by the host within a capture"] = _error(
        lambda: captured(lambda: y.sum().item())
    )
    return found


def races() -> list[str]:
    "Two streams without an event between them, and with one"
    import torch_npu  # noqa: F401

    torch.npu.set_device(0)
    side, y = torch.npu.Stream(), torch.zeros(2, device="npu")
    torch.npu.synchronize()
    y.add_(1)
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        y.add_(1)
    assert not bridge().reports()
    y.add_(1)
    return bridge().reports()


def without_values(folder: str) -> dict[str, Any]:
    "An engine on a CANN without `aclrtValueWait`"
    lane = Lane(folder)
    lane.update(1)
    wrong = lane.gap(lane.paths[1])
    fault = lane.engine.check_graphs()
    after = lane.gap(lane.paths[1])
    return {"wrong": wrong, "fault": fault, "graphs": lane.engine.graphs, "after": after}


def ranked(rank: int, world_size: int, **settings: Any) -> dict[str, Any]:
    "The matrix on one of several ranks of an engine"
    return matrix(tensor_parallel=world_size, **settings)
