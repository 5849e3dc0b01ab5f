"""Weight updates over device handles: real ranks, real exports, and memory that is short."""

import os

import pytest
from ranks import run_ranks
from whole_runs import Driver, configure, events, learned

from cookbook_npu.data.tokenizer import build_tokenizer
from cookbook_npu.model.tiny import build_tiny
from cookbook_npu.recipes import qwen3_4b_colocate

pytestmark = pytest.mark.lane("devices")

BUCKET = 2**14
GIB = 2**30


def build_trainer(rank, world_size, hf_path):
    "A trainer rank of two, as under Ray: it sees its own device"
    os.environ |= {"ASCEND_RT_VISIBLE_DEVICES": str(rank), "LOCAL_RANK": "0"}
    from cookbook_npu.npu.shims.bootstrap import bootstrap

    bootstrap("trainer")
    from plan_jobs.measure import config_of

    from cookbook_npu.train.trainer import Trainer

    settings = {"parallel.tensor": 2, "placement.bucket_bytes": BUCKET}
    trainer = Trainer(rank, world_size, config_of(settings, world_size), hf_path)
    trainer.weights.use_backend("ipc")
    return trainer


def held_values(manifest):
    "Sum of each tensor that was written"
    from cookbook_npu.npu.device import accelerator
    from cookbook_npu.weights.transport import read_buckets

    tensors = read_buckets(manifest, accelerator())
    return {name: float(t.double().cpu().sum()) for name, t in tensors}


def travels(rank, world_size, hf_path):
    "A copy on each device; the plan's needs and those of the real model"
    trainer = build_trainer(rank, world_size, hf_path)
    from dataclasses import asdict

    from cookbook_npu.plan import memory

    config = trainer.weights.config
    planned = memory._handle_needs(memory.model_of(config), config)
    manifest = trainer.weights.write(1)
    values = held_values(manifest)
    copy = trainer.weights.copy_bytes
    # an engine whose cache fits when the copy is released, and one whose cache never fits
    engine = trainer.memory
    engine.engine_needs = (0, 0)
    free = int(trainer.sleep()["memory/free_after_sleep"])
    trainer.wake()
    engine.engine_needs = (2**20, free + copy // 2)
    trainer.sleep()
    trainer.wake()
    engine.engine_needs = (2**20, free + 2 * copy)
    try:
        trainer.sleep()
        refused = ""
    except Exception as error:
        refused = str(error)
    trainer.weights.release()
    return (
        manifest.backend,
        list(manifest.buckets[0]),
        values,
        (asdict(planned), asdict(trainer.weights.handle_needs())),
        (copy, trainer.model.weight_bytes, trainer.weights.copy_bytes),
        refused,
    )


def runs_out(rank, world_size, hf_path):
    "Rank 1 fails to allocate its second bucket"
    trainer = build_trainer(rank, world_size, hf_path)
    from cookbook_npu.npu.simulator import faults

    handles = trainer.weights.transport
    allocate = type(handles).allocate

    def allocate_then_fail(index, nbytes):
        if index == 1 and rank == 1:
            faults.out_of_memory()
        return allocate(handles, index, nbytes)

    handles.allocate = allocate_then_fail
    manifest = trainer.weights.write(1)
    left = len(handles.blocks)
    again = trainer.weights.write(2)
    found = [(m.backend, m.note, held_values(m)) if m else None for m in (manifest, again)]
    trainer.weights.release()
    return left, trainer.weights.backend, found


def has_no_room(rank, world_size, hf_path):
    "The device of rank 1 has too little free memory"
    trainer = build_trainer(rank, world_size, hf_path)
    from cookbook_npu.npu.simulator.runtime import set_capacity

    if rank == 1:
        set_capacity(GIB, 0)
    manifest = trainer.weights.write(1)
    trainer.weights.release()
    return trainer.weights.backend, manifest and manifest.note


def stays(rank, world_size, hf_path):
    "With transfer_backend ipc nothing else is used"
    trainer = build_trainer(rank, world_size, hf_path)
    from cookbook_npu.config import override
    from cookbook_npu.npu.simulator.runtime import set_capacity

    writer = trainer.weights
    writer.config = override(writer.config, {"placement.transfer_backend": "ipc"})
    if rank == 1:
        set_capacity(trainer.acc.memory_allocated(0) + 2**15, 0)
    try:
        trainer.weights.write(1)
    except Exception as error:
        return type(error).__name__, writer.backend
    return "no error", writer.backend


@pytest.fixture(scope="module")
def hf_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny = qwen3_4b_colocate().model.tiny
    return str(build_tiny(tiny, build_tokenizer(), folder, seed=0))


def two_ranks(function, hf_path):
    env = {"COOKBOOK_NPU_SIM_MEMORY": str(8 * GIB)}
    target = f"{__file__}:{function.__name__}"
    return run_ranks(target, 2, kwargs={"hf_path": hf_path}, env=env, timeout=300)


def test_each_rank_holds_a_copy_and_an_engine_fits_beside_it(hf_path):
    one, two = two_ranks(travels, hf_path)
    assert one[0] == two[0] == "ipc"
    assert set(one[1]).isdisjoint(two[1]) and one[2] == two[2]
    for _, _, _, (planned, needs), (copy, weights, released), refused in (one, two):
        # the real one counts replicated norms for each rank; a tiny model gathers a fused matrix
        for part, nbytes in planned.items():
            assert nbytes <= needs[part] < 1.5 * nbytes, (planned, needs)
        assert copy == planned["copy"] <= weights and released == 0
        assert "waking the engine needs" in refused and "transfer_backend to shm" in refused


def test_all_ranks_go_through_host_memory_when_one_runs_out(hf_path):
    one, two = two_ranks(runs_out, hf_path)
    assert [left for left, _, _ in (one, two)] == [0, 0]
    assert one[1] == two[1] == "shm" and two[2] == [None, None]
    (backend, note, values), (after, quiet, same) = one[2]
    assert (backend, after, quiet) == ("shm", "shm", "") and values == same
    assert "1 other ranks have no device memory" in note


def test_all_ranks_go_through_host_memory_when_one_has_no_room(hf_path):
    one, two = two_ranks(has_no_room, hf_path)
    assert one[0] == two[0] == "shm" and two[1] is None
    assert "1 other ranks have no device memory" in one[1]


def test_a_run_that_asks_for_handles_gets_an_error_on_all_ranks(hf_path):
    assert two_ranks(stays, hf_path) == [("NoDeviceRoom", "ipc")] * 2


def run_with(root, name, faults="", **more):
    "A short run: what it learned, how weights travelled, its notes"
    driver = Driver(configure(root, name, steps=2, **more), faults)
    assert driver.end() == 0, driver.text()
    folder = root / name
    return learned(folder), events(folder, "weight_transfer"), events(folder, "note")


def test_a_run_over_handles_and_with_wrong_products_learns_the_same(tmp_path):
    plain, travelled, notes = run_with(tmp_path, "plain")
    # two steps, and an evaluation before them
    assert (len(plain), travelled, notes) == (3, [], [])
    # the checksums of wrong products would differ: they are computed on the host
    found, travelled, (note,) = run_with(
        tmp_path, "handles", "products", **{"placement.transfer_backend": "ipc"}
    )
    assert found == plain
    assert [(e["backend"], e["why"]) for e in travelled] == [("ipc", "")]
    assert "checksums of weights are computed on the host" in note["text"]
