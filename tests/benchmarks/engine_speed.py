"""Tokens per second of the transformers engine against `generate` of transformers, same device and model.

    python tests/benchmarks/engine_speed.py [--response 5] [--prompts 16] [--samples 8] [--rounds 7]

Both sample the same number of tokens for the same prompts (no end token), in turns, so that a busy machine
slows both. `generate` gets what it needs and no more: left-padded prompts, one call, no scores; the engine
also delivers the log-probability of each token. Printed: ratios of the medians, by the clock and by
processor time (one thread; the figure to trust on the simulated NPU of a busy machine).
"""

import argparse
import os
import statistics
import tempfile
import time

os.environ.setdefault("COOKBOOK_NPU_SIMULATE", "1")


def timed(function) -> tuple[float, float]:
    """Seconds by the clock, seconds of processor time."""
    clock = time.perf_counter()
    processor = time.process_time()
    function()
    return time.perf_counter() - clock, time.process_time() - processor


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("response", 5), ("prompts", 16), ("samples", 8), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()

    from cookbook_npu.npu.shims.bootstrap import bootstrap

    bootstrap("rollout")
    import torch

    from cookbook_npu.config import TinyConfig
    from cookbook_npu.data.tasks import build_tokenizer
    from cookbook_npu.model.tiny import build_tiny
    from cookbook_npu.npu.device import accelerator
    from cookbook_npu.rollout.engine import Request, SamplingParams, derive_seed
    from cookbook_npu.rollout.transformers import TransformersEngine, pad_left

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as tmp:
        engine = TransformersEngine(
            build_tiny(TinyConfig(), build_tokenizer(), f"{tmp}/model", 0), dtype="float32"
        )
    engine.end_tokens = frozenset()
    prompts = [list(f"{7 * i % 90 + 5}*{i + 3}=".encode()) for i in range(args.prompts)]
    requests = [
        Request(group_id=str(p), index=i, prompt_ids=ids, seed=derive_seed(0, p, i))
        for p, ids in enumerate(prompts)
        for i in range(args.samples)
    ]
    ids, pads = pad_left(prompts)
    mask = (torch.arange(ids.shape[1]) >= pads[:, None]).long()
    inputs = {"input_ids": ids.to(engine.device), "attention_mask": mask.to(engine.device)}
    settings = {
        "do_sample": True,
        "top_k": 0,
        "num_return_sequences": args.samples,
        "max_new_tokens": args.response,
    }
    engine.net.generation_config.eos_token_id = None

    sampling = SamplingParams(max_response_tokens=args.response)

    def run_engine():
        return engine.generate(requests, sampling)

    def run_generate():
        return engine.net.generate(**inputs, **settings, pad_token_id=0)

    samples = run_engine()
    assert len(samples) == len(requests), "the engine lost requests"
    assert len(samples[0].response_ids) == args.response, "the engine stopped early"
    generated = run_generate()[:, ids.shape[1] :]
    assert generated.shape == (len(requests), args.response), "generate stopped early"
    times = [(timed(run_engine), timed(run_generate)) for _ in range(args.rounds)]
    tokens = len(requests) * args.response
    print(
        f"device: {accelerator().name}, one thread; "
        f"{len(requests)} sequences x {args.response} tokens"
    )
    for k, kind in enumerate(("clock", "processor time")):
        ours = statistics.median(engine_times[k] for engine_times, _ in times)
        theirs = statistics.median(generate_times[k] for _, generate_times in times)
        print(
            f"{kind}: engine {tokens / ours:,.0f} tokens/s, "
            f"generate {tokens / theirs:,.0f} tokens/s: {theirs / ours:.2f}x"
        )


if __name__ == "__main__":
    main()
