"""What tests run in the lane's environment. `python -m real_stack.jobs [MODULE:]NAME JSON` prints the result
as JSON; functions that take `rank` run in processes of their own.
"""

import faulthandler
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

# Triton's interpreter takes a minute to profile the 8,192 tokens that vLLM would batch
ENGINE_ARGS = {"max_num_batched_tokens": 256}
SIZES = {"cudagraph_capture_sizes": [1, 2, 4, 8]}


def ranks(
    target: str,
    count: int = 1,
    kwargs: dict[str, Any] | None = None,
    bootstrap: str = "trainer",
    env: dict[str, str] | None = None,
) -> list[Any]:
    "Results of processes of a job, in rank order"
    from ranks import run_ranks

    variables: dict[str, str | None] = {**os.environ, **(env or {})}
    variables["COOKBOOK_NPU_SIMULATE"] = None
    return run_ranks(target, count, kwargs, variables, timeout=400, bootstrap=bootstrap)


# ---- models


def tiny(folder: str, family: str = "qwen3", seeds: int = 2) -> list[str]:
    "Tiny models of a family; those in float32 with sharpened weights"
    from conformance import sharpen_model

    from cookbook_npu.config import TinyConfig
    from cookbook_npu.data.tokenizer import build_tokenizer
    from cookbook_npu.model.tiny import build_tiny

    sizes = dict(hidden_size=64, num_layers=2, ffn_size=128, num_kv_heads=2)
    config = TinyConfig(family=family, **sizes)
    tokenizer = build_tokenizer(vision=family in ("qwen3_5", "qwen3_vl"))
    made = []
    for seed in range(seeds):
        path = build_tiny(config, tokenizer, f"{folder}/{family}{seed}", seed)
        # bfloat16, all that vllm-ascend's delta rule knows, rounds a sharpened model by 0.2
        made.append(str(path if family == "qwen3_5" else sharpen_model(path)))
    return made


# ---- the engine


def conformance(
    folder: str,
    family: str,
    checks: list[str],
    dtype: str = "float32",
    graphs: str = "off",
) -> dict[str, str]:
    "Check of the suite -> '' where the engine passes, else what it did"
    from conformance import ENGINE_CHECKS, IMAGE_CHECKS, Case

    from cookbook_npu.rollout.vllm import VllmEngine

    def build(path: Any, **changes: Any) -> VllmEngine:
        settings: dict[str, Any] = {"dtype": dtype, "max_tokens": 64, "graphs": graphs}
        args = ENGINE_ARGS | ({"compilation_config": SIZES} if graphs != "off" else {})
        settings |= {"kv_cache_bytes": 8 << 20, "engine_args": args}
        return VllmEngine(path, **{**settings, **changes})

    paths = [Path(folder, f"{family}{seed}") for seed in (0, 1)]
    pictured = family == "qwen3_vl"
    tolerance = 1e-4 if dtype == "float32" else 0.03
    case = Case(build, *paths, tolerance=tolerance, pictured=pictured)
    found = {}
    for check in IMAGE_CHECKS if pictured else ENGINE_CHECKS:
        if check.__name__ not in checks:
            continue
        start = time.monotonic()
        try:
            check(case)
            found[check.__name__] = ""
        except Exception as error:  # the test reports every kind
            traceback.print_exc()
            found[check.__name__] = f"{type(error).__name__}: {error}"
        print(f"{check.__name__}: {time.monotonic() - start:.1f} s", file=sys.stderr)
    return found


def responses(
    path: str, update: str | None = None, stop_token_ids: tuple[int, ...] = ()
) -> list[Any]:
    "Tokens and log-probs of an engine, after a weight update where one is named"
    from conformance import folder_weights

    from cookbook_npu.config import SamplingConfig
    from cookbook_npu.rollout.engine import SamplingParams, text_requests
    from cookbook_npu.rollout.vllm import VllmEngine

    settings: dict[str, Any] = {"dtype": "float32", "max_tokens": 64}
    settings |= {"kv_cache_bytes": 8 << 20, "engine_args": ENGINE_ARGS}
    settings |= {"stop_token_ids": stop_token_ids}
    engine = VllmEngine(path, load_weights=update is None, **settings)
    if update:
        engine.update_weights(1, folder_weights(Path(update)).items())
    requests = text_requests(["1+1=", "2*3="], 2, 0, engine.tokenizer)
    sampling = SamplingParams.of(SamplingConfig(max_response_tokens=8, temperature=0.8))
    return [(s.response_ids, s.logprobs) for s in engine.generate(requests, sampling)]


def sleeping(folder: str) -> dict[str, Any]:
    "Free memory and log-probs of an engine over sleep, wake and each supported method of updating weights"
    import torch
    from conformance import folder_weights, teacher_forced

    from cookbook_npu.config import SamplingConfig
    from cookbook_npu.npu.shims.registry import registry
    from cookbook_npu.rollout.engine import SamplingParams, text_requests
    from cookbook_npu.rollout.vllm import VllmEngine

    first, second = Path(folder, "qwen30"), Path(folder, "qwen31")
    memory = {"kv_cache_bytes": 8 << 20, "engine_args": ENGINE_ARGS}
    engine = VllmEngine(first, dtype="float32", max_tokens=64, **memory)
    prompts = ["1+1=", "2*3=", "What is 12 plus 30?"]
    requests = text_requests(prompts, 2, 0, engine.tokenizer)
    sampling = SamplingParams.of(SamplingConfig(max_response_tokens=8, temperature=0.7))

    def gap(path: Path) -> float:
        samples = engine.generate(requests, sampling)
        return max(
            (teacher_forced(path, s, 0.7) - torch.tensor(s.logprobs)).abs().max().item()
            for s in samples
        )

    def free() -> int:
        return torch.npu.mem_get_info()[0]

    result: dict[str, Any] = {
        "platform": engine.platform,
        "mode": engine.llm.collective_rpc(_sampler_mode)[0],
        "start": (free(), gap(first)),
        "methods": engine.weights.methods,
        "shims": {row["name"]: row["state"] for row in registry.report()},
    }
    for method in ("reload_weights", "update_weights", "load_weights"):
        if engine.weights.methods[method]:
            continue
        engine.weights.method = method
        awake = free()
        engine.sleep(2)
        asleep = free()
        engine.wake(["weights"])
        half = free()
        engine.update_weights(engine.version + 1, folder_weights(second).items())
        engine.wake(["kv_cache"])
        result[method] = (awake, asleep, half, free(), gap(second))
        engine.update_weights(engine.version + 1, folder_weights(first).items())
        result[f"{method} awake"] = gap(first)
    engine.sleep(1)
    asleep = free()
    engine.wake()
    result["level 1"] = (asleep, free(), gap(first))
    engine.close()
    try:
        VllmEngine(first, dtype="float32", max_tokens=64)
    except Exception as error:
        result["second"] = f"{type(error).__name__}: {error}"
    return result


def _sampler_mode(worker: Any) -> str:
    sampler = worker.model_runner.sampler
    modes = {sampler.logprobs_mode, sampler.topk_topp_sampler.logprobs_mode}
    return " and ".join(sorted(modes))


def imported(order: str) -> dict[str, str]:
    """Where every function, class and method of vLLM and vllm-ascend comes from once an engine is built, in
    vLLM's own order of imports or in the product's"""
    import types

    from cookbook_npu.npu.device import ROLE_VARIABLES

    os.environ.update(ROLE_VARIABLES["rollout"])
    if order == "product":
        from cookbook_npu.npu.shims.vllm_ascend import enter_engine, enter_rollout

        enter_rollout()
        import vllm

        enter_engine()
    import vllm  # noqa: F811, F401
    from vllm import LLM

    folder = tempfile.mkdtemp()
    LLM(
        model=tiny(folder, seeds=1)[0],
        dtype="float32",
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        enforce_eager=True,
        enable_sleep_mode=True,
        distributed_executor_backend="uni",
        kv_cache_memory_bytes=8 << 20,
        async_scheduling=False,
    )

    def place(value: Any) -> str | None:
        while hasattr(value, "__wrapped__"):
            value = value.__wrapped__
        code = getattr(value, "__code__", None)
        if code is None:
            return None
        file = code.co_filename.rpartition("site-packages/")[2]
        return f"{file}:{code.co_firstlineno}"

    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("vllm", "vllm_ascend"):
            continue
        if not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType):
                found[f"{name}.{key}"] = str(place(value))
            elif isinstance(value, type):
                found[f"{name}.{key}"] = f"{value.__module__}.{value.__qualname__}"
                if value.__module__ != name:
                    continue
                for method, function in list(vars(value).items()):
                    function = getattr(function, "__func__", function)
                    if isinstance(function, types.FunctionType):
                        found[f"{name}.{key}.{method}"] = str(place(function))
    return found


# ---- the trainer


def train(
    rank: int,
    world_size: int,
    hf_path: str,
    dtype: str = "float32",
    tensor: int = 1,
    expert: int = 1,
    steps: int = 3,
    load: str | None = None,
    save: str | None = None,
    offload: bool = False,
) -> dict[str, Any]:
    "Losses and gradient norms of some steps of the product's model and optimizer"
    import torch

    from cookbook_npu.config import ModelConfig, OptimConfig, ParallelConfig
    from cookbook_npu.model.checkpoint import BackgroundSaver, load_state
    from cookbook_npu.model.megatron import build_optimizer, init_parallel, load_model
    from cookbook_npu.npu.shims.mindspeed.adaptor import current
    from cookbook_npu.npu.shims.registry import registry

    parallel = ParallelConfig(tensor=tensor, expert=expert)
    init_parallel(parallel, rank)
    options = ModelConfig(dtype=dtype, recompute="full", fused_kernels=True)
    model = load_model(hf_path, options, parallel)
    optim = OptimConfig(learning_rate=1e-3, cpu_offload=offload)
    optimizer = build_optimizer(model, optim, 10)
    if load:
        load_state(optimizer, load)
    device = model.layout.device
    history = []
    done = optimizer.steps
    for step in range(done, done + steps):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 200, (1, 32), generator=generator).to(device)
        optimizer.zero_grad()
        logits_TV = model.logits(ids)[0]
        loss = torch.nn.functional.cross_entropy(logits_TV[:-1], ids[0, 1:])
        loss.backward()
        history.append((loss.item(), optimizer.step()[1]))
    if save:
        Path(save).mkdir(parents=True, exist_ok=True)
        saver = BackgroundSaver(optimizer)
        saver.start(save)
        saver.finish()
    return {
        "adaptor": current().name,
        "history": history,
        "types": sorted({str(p.dtype) for p in model.module.parameters()}),
        "shims": {row["name"]: row["state"] for row in registry.report()},
    }


def main() -> None:
    faulthandler.enable()
    module, _, name = sys.argv[1].rpartition(":")
    functions = (
        vars(importlib.import_module(f"real_stack.{module}")) if module else globals()
    )
    result = functions[name](**json.loads(sys.argv[2]))
    bridge = sys.modules.get("npu_wheel_bridge")
    if module != "graphs" and bridge and bridge.reports():  # graphs' own jobs return them
        sys.exit("\n".join(bridge.reports()))
    print("\nRESULT " + json.dumps(result, default=str))


if __name__ == "__main__":
    main()
