"""Tokens per second of the transformers engine against `generate` of transformers, same device and model.

    python tests/benchmarks/engine_speed.py [--response 5] [--prompts 16] [--samples 8] [--rounds 7]

Both sample the same number of tokens for the same prompts (no end token), in turns, so that a busy machine
slows both. `generate` gets what it needs and no more: left-padded prompts, one call, no scores; the engine
also delivers the log-probability of each token. Printed: ratios of the medians, by the clock and by
processor time (one thread; the figure to trust on the simulated NPU of a busy machine).
"""

import argparse
import gc
import os
import statistics
import tempfile
import time

from options import option_parser

os.environ.setdefault("COOKBOOK_NPU_SIMULATE", "1")


def timed(function) -> tuple[float, float]:
    """Seconds by the clock, seconds of processor time."""
    clock = time.perf_counter()
    processor = time.process_time()
    function()
    return time.perf_counter() - clock, time.process_time() - processor


def parse_arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    for name, default in (("response", 5), ("prompts", 16), ("samples", 8), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def tiny_engine():
    """An engine that never stops early."""
    from cookbook_npu.config import TinyConfig
    from cookbook_npu.data.tokenizer import build_tokenizer
    from cookbook_npu.model.tiny import build_tiny
    from cookbook_npu.rollout.transformers import TransformersEngine

    with tempfile.TemporaryDirectory() as tmp:
        folder = build_tiny(TinyConfig(), build_tokenizer(), f"{tmp}/model", 0)
        engine = TransformersEngine(folder, dtype="float32")
    engine.decoder.end_tokens = frozenset()
    engine.net.generation_config.eos_token_id = None
    return engine


def with_engine(engine, prompts: list[list[int]], args: argparse.Namespace):
    """Generation by the engine."""
    from cookbook_npu.rollout.engine import Request, SamplingParams, derive_seed

    requests = [
        Request(group_id=str(p), index=i, prompt_ids=ids, seed=derive_seed(0, p, i))
        for p, ids in enumerate(prompts)
        for i in range(args.samples)
    ]
    sampling = SamplingParams(max_response_tokens=args.response)
    return lambda: [s.response_ids for s in engine.generate(requests, sampling)]


def with_generate(engine, prompts: list[list[int]], args: argparse.Namespace):
    """Generation by transformers."""
    import torch

    from cookbook_npu.rollout.transformers import pad_left

    ids, pads = pad_left(prompts)
    mask = (torch.arange(ids.shape[1]) >= pads[:, None]).long()
    settings = {
        "input_ids": ids.to(engine.device),
        "attention_mask": mask.to(engine.device),
        "do_sample": True,
        "top_k": 0,
        "num_return_sequences": args.samples,
        "max_new_tokens": args.response,
        "pad_token_id": 0,
    }
    return lambda: engine.net.generate(**settings)[:, ids.shape[1] :]


def main() -> None:
    args = parse_arguments()

    from cookbook_npu.npu.shims.bootstrap import bootstrap

    bootstrap("rollout")
    import torch

    from cookbook_npu.npu.device import accelerator

    torch.set_num_threads(1)
    engine = tiny_engine()
    prompts = [list(f"{7 * i % 90 + 5}*{i + 3}=".encode()) for i in range(args.prompts)]
    run_engine = with_engine(engine, prompts, args)
    run_generate = with_generate(engine, prompts, args)
    sequences = args.prompts * args.samples
    assert [len(r) for r in run_engine()] == [args.response] * sequences, "stopped early"
    assert run_generate().shape == (sequences, args.response), "generate stopped early"
    # as in a worker of a run: what is imported is not searched for garbage
    gc.collect()
    gc.freeze()
    times = [(timed(run_engine), timed(run_generate)) for _ in range(args.rounds)]
    tokens = sequences * args.response
    print(
        f"device: {accelerator().name}, one thread; "
        f"{sequences} sequences x {args.response} tokens"
    )
    for k, kind in enumerate(("clock", "processor time")):
        ours = statistics.median(engine_times[k] for engine_times, _ in times)
        theirs = statistics.median(generate_times[k] for _, generate_times in times)
        print(
            f"{kind}: engine {tokens / ours:,.0f} tokens/s, "
            f"generate {tokens / theirs:,.0f} tokens/s: {theirs / ours:.2f}x"
        )
    gc.unfreeze()


if __name__ == "__main__":
    main()
