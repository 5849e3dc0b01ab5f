"""Both engines pass one conformance suite, each in a process of its own, as in a run."""

import contextlib
import functools
import os
import tempfile
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest
from conformance import ENGINE_CHECKS, IMAGE_CHECKS
from ranks import run_ranks

from cookbook_npu.config import TinyConfig
from cookbook_npu.errors import RoleError
from cookbook_npu.rollout.vllm import missing_reason

TINY = TinyConfig(hidden_size=64, num_layers=2, ffn_size=128)
SEEING = ("qwen3_vl", "qwen3_5")


def build_engine(engine: str, folder: Path, dtype: str = "float32", **settings):
    if engine == "vllm":
        from cookbook_npu.rollout.vllm import VllmEngine

        return VllmEngine(
            folder, dtype=dtype, max_tokens=64, kv_cache_bytes=16 << 20, **settings
        )
    from cookbook_npu.rollout.transformers import TransformersEngine

    return TransformersEngine(folder, dtype=dtype, **settings)


def run_checks(
    rank: int, world_size: int, engine: str, family: str, own: bool
) -> dict[str, str | None]:
    """Every check of a suite on one engine: name -> what went wrong, or none. Runs in a worker process.

    `own`: the checks of vLLM alone, each of which starts engines, instead of those of every engine"""
    import torch

    torch.set_num_threads(1)
    from conformance import Case, sharpen_model

    from cookbook_npu.data.tokenizer import build_tokenizer
    from cookbook_npu.model.tiny import build_tiny

    pictured = family in SEEING
    # gated delta nets on vLLM's CPU build: bfloat16, which rounds a sharpened model by 0.2
    rounded = (engine, family) == ("vllm", "qwen3_5")
    dtype, factor = ("bfloat16", 1.0) if rounded else ("float32", 4.0)
    tiny = TINY.model_copy(update={"family": family})
    tokenizer = build_tokenizer(vision=pictured)
    results: dict[str, str | None] = {}
    before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as tmp:
        folder, other = (
            sharpen_model(build_tiny(tiny, tokenizer, f"{tmp}/{seed}", seed), factor, dtype)
            for seed in (0, 1)
        )
        case = Case(functools.partial(build_engine, engine, dtype=dtype), folder, other)
        checks = VLLM_CHECKS if own else ENGINE_CHECKS
        if pictured:
            checks = IMAGE_CHECKS + ([starts_without_weights] if engine == "vllm" else [])
            case.pictured = True
            case.tolerance = 0.03 if rounded else 1e-5
        for check in checks:
            try:
                check(case)
                results[check.__name__] = None
            except Exception as e:  # the report of a check, whatever it raised
                results[check.__name__] = f"{type(e).__name__}: {e}"
        case.close()
    left = sorted(n for n in set(os.listdir("/dev/shm")) - before if "vllm" in n)
    results["nothing_left_in_shared_memory"] = f"left behind: {left}" if left else None
    return results


def update_in_pieces(case) -> None:
    """Through start, update in pieces, finish, with the transfer engine that we register with vLLM"""
    from conformance import folder_weights, require, response_tokens

    from cookbook_npu.weights.manifest import checksum

    weights = case.engine.weights
    require(weights.method == "reload_weights", f"method: {weights.method}")
    require(weights.methods["update_weights"] == "", f"methods: {weights.methods}")
    new = folder_weights(case.other)
    old = response_tokens(case.ask())
    case.update_weights(case.other)
    want = response_tokens(case.ask())
    case.update_weights(case.folder)
    weights.method = "update_weights"
    case.engine.update_weights(
        case.engine.version + 1, new.items(), {n: checksum(t) for n, t in new.items()}
    )
    got = response_tokens(case.ask())
    require(got == want, "the responses are not those of the new weights")
    require(got != old, "the responses are still those of the old weights")


def plain_layers(worker) -> list[str]:
    """Names of the layers that could be packed and compute with their weight"""
    import torch

    named = worker.model_runner.model.named_modules()
    plain = torch.nn.functional.linear
    return [name for name, layer in named if getattr(layer, "cpu_linear", None) is plain]


def an_embedding_keeps_no_pack(case) -> None:
    """The embedding of a tied model, before and after an update; its head is packed"""
    from conformance import require

    for folder in (case.other, case.folder):
        (found,) = case.engine.llm.collective_rpc(plain_layers)
        require(found == ["model.embed_tokens"], f"not packed: {found}")
        case.update_weights(folder)


class HostStorage:
    """What CUDA's driver does with a handle, on the host: it names shared memory, and opening maps it.

    Nothing above it is replaced: vLLM's engine and PyTorch's rebuild function are the real ones."""

    @staticmethod
    def _new_shared_cuda(device, handle, nbytes, offset, *counters):
        from cookbook_npu.weights.transport import MappedBuckets

        (memory,) = MappedBuckets().open([handle.decode()])
        assert offset == 0 and memory.nbytes >= nbytes
        return memory.untyped_storage()

    @staticmethod
    def _release_ipc_counter(*counter, device):
        "Nobody counts who has opened shared memory of the host"


def packed_handles(new: dict) -> tuple:
    """A block of shared memory with all tensors, and the arguments with which vLLM opens each of them"""
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    from cookbook_npu.weights.manifest import pack_bucket
    from cookbook_npu.weights.transport import SharedMemory, entry_handle

    sender = SharedMemory()
    size = sum(t.nbytes + 64 for t in new.values()) // 64 * 64
    block = sender.allocate(0, size)
    entries = pack_bucket(list(new.items()), 0, block, 1, 1, 0)
    (name,) = sender.share(0, 1).values()
    storage = (HostStorage, torch.uint8, 0, name.encode(), block.nbytes, 0)
    shared = (False, b"", 0, b"", False)
    bucket = (torch.Tensor, block.shape, (1,), 0, *storage, *shared)
    return sender, {e.name: entry_handle(rebuild_cuda_tensor, bucket, e) for e in entries}


@contextlib.contextmanager
def cuda_of_the_host():
    """vLLM's ipc engine on a CPU: a device with a name that needs no start"""
    from types import SimpleNamespace
    from unittest import mock

    import torch

    from cookbook_npu.npu.shims.vllm_weights import NATIVE_TRANSFER_ENGINES

    def properties(index):
        return SimpleNamespace(uuid="GPU-1")

    with (
        mock.patch.dict(NATIVE_TRANSFER_ENGINES, cpu=("ipc",)),
        mock.patch.object(torch.cuda, "get_device_properties", properties),
        mock.patch.object(torch.cuda, "_lazy_init"),
    ):
        yield


def update_by_handles(case) -> None:
    """Through vLLM's own engine for memory of the same device, which opens shared memory of the host here"""
    from conformance import folder_weights, require, response_tokens

    from cookbook_npu.errors import WeightUpdateError
    from cookbook_npu.weights.manifest import checksum

    case.close()
    new = folder_weights(case.other)
    sender, handles = packed_handles(new)
    with cuda_of_the_host():
        case.built = build_engine("vllm", case.folder, weight_update_method="native")
        weights = case.engine.weights
        require(weights.method == "ipc", f"method: {weights.method}")
        require(
            weights.methods["update_weights"] == "the worker was built with ipc",
            f"methods: {weights.methods}",
        )
        old = response_tokens(case.ask())
        sums = {n: checksum(t) for n, t in new.items()}
        case.engine.update_weights(1, new.items(), sums, handles)
        got = response_tokens(case.ask())
        with pytest.raises(WeightUpdateError, match="takes device handles"):
            case.engine.update_weights(2, new.items())
        require(
            case.engine.state == "awaiting weights",
            f"after an update without handles the engine is {case.engine.state}",
        )
        case.close()
    sender.release()
    case.update_weights(case.other)
    want = response_tokens(case.ask())
    require(got == want, "the responses are not those of the new weights")
    require(got != old, "the responses are still those of the old weights")


def one_seed_for_a_batch(case) -> None:
    """Without request seeds: the same batch gives the same responses, another seed others"""
    from dataclasses import replace

    from conformance import require, response_tokens

    def ask(change: int) -> list[list[int]]:
        requests = [replace(r, seed=r.seed ^ change) for r in case.requests]
        return response_tokens(
            case.engine.generate(requests, case.sampling(temperature=1.5))
        )

    seeded = ask(0)
    case.engine.decoder.request_seeds = False
    first, again, other = ask(0), ask(0), ask(1)
    case.engine.decoder.request_seeds = True
    require(first == again, "the same requests gave other responses")
    require(first not in (other, seeded), "the seeds make no difference")
    require(len(set(map(tuple, first[:3]))) == 3, f"three samples of a prompt: {first[:3]}")


def update_in_place(case) -> None:
    """Through the model's own load_weights, where no layer is packed, as on an NPU"""
    from unittest import mock

    from conformance import require, response_tokens
    from vllm import _custom_ops

    packed = case.engine.weights.methods["load_weights"]
    require("packed after it was loaded" in packed, f"of a packed model: {packed!r}")
    case.update_weights(case.folder)
    old = response_tokens(case.ask())
    case.update_weights(case.other)
    want = response_tokens(case.ask())
    case.close()
    with mock.patch.object(_custom_ops, "_supports_onednn", False):
        case.built = build_engine("vllm", case.folder, weight_update_method="load_weights")
    weights = case.engine.weights
    require(weights.method == "load_weights", f"method: {weights.method}")
    require(response_tokens(case.ask()) == old, "other responses before the update")
    require(want != old, "both models respond alike")
    case.update_weights(case.other)
    require(
        response_tokens(case.ask()) == want, "the new weights are not those of a reload"
    )
    case.close()


def starts_without_weights(case) -> None:
    """Built without reading weights, it serves nothing before an update, and then all that this brings"""
    from conformance import folder_weights, require, response_tokens

    from cookbook_npu.errors import EngineError

    case.update_weights(case.folder)
    want = response_tokens(case.ask())
    sums = case.engine.checksums()
    case.close()
    case.built = case.factory(case.folder, load_weights=False)
    require(case.engine.checksums() != sums, "the weights were read")
    for sleeps in (False, True):
        if sleeps:
            case.engine.sleep(2)
            case.engine.wake()
        with pytest.raises(EngineError, match="awaiting weights"):
            case.ask()
    case.engine.update_weights(1, folder_weights(case.folder).items())
    require(case.engine.checksums() == sums, "other weights after the update")
    require(response_tokens(case.ask()) == want, "other responses after the update")
    case.close()


VLLM_CHECKS = [
    an_embedding_keeps_no_pack,
    update_in_pieces,
    one_seed_for_a_batch,
    update_in_place,
    update_by_handles,
    starts_without_weights,
]


@functools.cache
def results_of(
    engine: str, family: str = "qwen3", own: bool = False
) -> dict[str, str | None]:
    options = {}
    # an engine of vLLM never shares its process with the simulated NPU
    if engine != "vllm":
        preload = ["transformers.models.auto", "transformers.models.qwen3.modeling_qwen3"]
        options = dict(bootstrap="rollout", preload=preload)
    arguments = {"engine": engine, "family": family, "own": own}
    try:
        return run_ranks(f"{__file__}:run_checks", 1, arguments, timeout=540, **options)[0]
    except RoleError as error:  # once, not again for each check
        text = str(error)
        return defaultdict(lambda: text)


NAMES = [c.__name__ for c in ENGINE_CHECKS] + ["nothing_left_in_shared_memory"]


@pytest.mark.parametrize("name", NAMES)
def test_transformers_engine(name):
    assert results_of("transformers")[name] is None


@pytest.mark.parametrize("family", SEEING)
@pytest.mark.parametrize("name", [c.__name__ for c in IMAGE_CHECKS])
def test_transformers_engine_with_images(name, family):
    assert results_of("transformers", family)[name] is None


@pytest.mark.skipif(missing_reason() is not None, reason=missing_reason() or "")
@pytest.mark.parametrize("name", NAMES)
def test_vllm_engine(name):
    assert results_of("vllm")[name] is None


@pytest.mark.lane("devices")
@pytest.mark.skipif(missing_reason() is not None, reason=missing_reason() or "")
@pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM needs it to see")
@pytest.mark.parametrize("family", SEEING)
@pytest.mark.parametrize(
    "name", [c.__name__ for c in IMAGE_CHECKS] + ["starts_without_weights"]
)
def test_vllm_engine_with_images(name, family):
    assert results_of("vllm", family)[name] is None


@pytest.mark.lane("devices")
@pytest.mark.skipif(missing_reason() is not None, reason=missing_reason() or "")
@pytest.mark.parametrize("name", [c.__name__ for c in VLLM_CHECKS] + NAMES[-1:])
def test_vllm_by_every_method_of_weights_and_seeds(name):
    assert results_of("vllm", own=True)[name] is None
