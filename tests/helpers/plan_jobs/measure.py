"""A real trainer on simulated NPUs: what it holds and what it needs at its peaks, bytes."""

import gc
import os
from dataclasses import replace

SHAPE = {
    "rollout.prompts_per_step": 16,
    "rollout.samples_per_prompt": 2,
    "sampling.max_response_tokens": 116,
    "data.max_prompt_tokens": 12,
}


def config_of(overrides, world):
    from cookbook_npu.recipes import qwen3_4b_colocate

    return qwen3_4b_colocate(overrides={"placement.devices": world} | SHAPE | overrides)


def sample(i, prompt=12, response=116):
    from text_samples import token_sample

    ids = [51 + i % 4] * response
    return token_sample(i, [50] * prompt, ids, -5.0, reward=float(i % 2))


def measure(rank, world_size, hf_path, overrides):
    "Held after a training step, and the peak of the next; as under Ray, a rank sees its own device only"
    os.environ |= {"ASCEND_RT_VISIBLE_DEVICES": str(rank), "LOCAL_RANK": "0"}
    from cookbook_npu.npu.shims.bootstrap import bootstrap

    bootstrap("trainer")
    import numpy as np

    from cookbook_npu.train.batch import make_batch
    from cookbook_npu.train.trainer import Trainer

    config = config_of(overrides, world_size)
    trainer = Trainer(rank, world_size, config, hf_path)
    n = config.rollout_batch
    batch = make_batch(
        [sample(i) for i in range(n)],
        2,
        config.algorithm,
        global_batch_size=n,
        max_tokens=116,
    )
    scores = [np.full(116, -5.0, dtype=np.float32)] * n
    batch = replace(batch, old_logprobs=scores, ref_logprobs=scores)
    trainer.acc.reset_peak(0)
    trainer.logprobs(batch)
    scoring = trainer.acc.max_memory_allocated(0)
    trainer.train(batch)
    held = trainer.acc.memory_allocated(0)
    trainer.acc.reset_peak(0)
    trainer.train(batch)
    peak = trainer.acc.max_memory_allocated(0)
    trainer.sleep()
    asleep = trainer.acc.memory_allocated(0)
    return dict(scoring=scoring, held=held, peak=peak, asleep=asleep)


def measure_each(rank, world_size, cases):
    "The same for each (hf_path, overrides), one after the other"
    from cookbook_npu.model.megatron import destroy_parallel

    found = []
    for hf_path, overrides in cases:
        found.append(measure(rank, world_size, hf_path, overrides))
        gc.collect()
        destroy_parallel()
    return found
