"""What the ranks of test_process_groups.py run."""

import gc
import os
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from cookbook_npu.errors import DeviceError
from cookbook_npu.npu.shims.torch import distributed as process_groups


class Poor:
    "An offloader's host without pinned memory"

    block_bytes = 1 << 20

    def reserve(self, pieces):
        raise DeviceError("no memory could be pinned", "Give the host more.")


def fails(call, text):
    try:
        call()
    except DeviceError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"{text} was not raised")


def disturb(trainer):
    "Everything that can go wrong between two steps, and what is left of it: nothing"
    from cookbook_npu.npu.simulator import faults

    host = trainer.memory.offloader.host
    rank = trainer.rank
    trainer.memory.offloader.host = Poor() if rank == 0 else host
    fails(trainer.sleep, "pinned" if rank == 0 else "1 other ranks could not")
    assert not trainer.memory.offloader.asleep
    assert process_groups.total_communicator_bytes() > 0
    trainer.memory.offloader.host = host
    process_groups.destroy_process_groups()  # a save may have done that already
    trainer.sleep()
    if rank == 1:
        faults.out_of_memory()
    fails(trainer.wake, "half-way" if rank == 1 else "1 other ranks could not")
    assert trainer.memory.offloader.asleep
    assert process_groups.destroy_process_groups() == []
    reload = process_groups.reload_process_groups
    process_groups.reload_process_groups = partial(reload, attempts=1)
    faults.fail_collective("all_reduce")
    fails(trainer.wake, "could not be reloaded in 1 attempts")
    assert not trainer.memory.offloader.asleep
    assert process_groups.total_communicator_bytes() == 0
    faults.clear_faults()
    process_groups.reload_process_groups = reload
    trainer.wake()


def train_steps(rank, world_size, config, hf_path, between=None, folder=None):
    "Metrics and log-probs of a trainer that sleeps after each step; memory of its last sleep and its groups"
    from plan_jobs.measure import sample

    from cookbook_npu.model.megatron import destroy_parallel
    from cookbook_npu.train.batch import make_batch
    from cookbook_npu.train.trainer import Trainer

    trainer = Trainer(rank, world_size, config, hf_path)
    n = config.rollout_batch
    batch = make_batch(
        [sample(i) for i in range(n)],
        2,
        config.algorithm,
        global_batch_size=n,
        max_tokens=116,
    )
    rows = []
    for step in range(3):
        everywhere = [None] * world_size
        dist.all_gather_object(everywhere, trainer.logprobs(batch))
        by_row = {i: values for part in everywhere for i, values in part.items()}
        scores = [by_row[i] for i in range(n)]
        metrics = trainer.train(replace(batch, old_logprobs=scores, ref_logprobs=scores))
        rows.append((metrics, [s.tolist() for s in scores]))
        if step == 1 and between:
            between(trainer)
        if step == 2 and between:
            trainer.save_state(folder)
        memory = trainer.sleep()
        fails(trainer.sleep, "asleep already")
        # the last checkpoint of a run is finished when the trainer sleeps already
        if between and step == 2:
            trainer.finish_state()
            assert trainer.memory.groups_destroyed
            assert not trainer.health()["saving"]
        process_groups.destroy_process_groups()
        kept = trainer.acc.mem_get_info(0)[0] - memory["memory/free_after_sleep"]
        trainer.wake()
    destroy_parallel()
    del trainer
    gc.collect()  # its methods hold it in circles, and it holds the device's memory
    return rows, memory, kept


def sleep_between_steps(rank, world_size, hf_path, state, ways):
    "The same trainer with several ways to sleep"
    os.environ |= {"ASCEND_RT_VISIBLE_DEVICES": str(rank), "LOCAL_RANK": "0"}
    from cookbook_npu.npu.shims.bootstrap import bootstrap

    bootstrap("trainer")
    from plan_jobs.measure import config_of

    found = {}
    for name, settings in ways.items():
        config = config_of(
            {f"placement.{k}": v for k, v in settings.items()} | {"parallel.tensor": 1},
            world_size,
        )
        found[name] = train_steps(
            rank,
            world_size,
            config,
            hf_path,
            *((disturb, state) if name == "destroy" else ()),
        )
    return found
