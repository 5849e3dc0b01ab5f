"""The driver on a virtual clock: bounds, losses, slow engines and determinism hold for any lengths."""

from dataclasses import replace
from functools import partial

import pytest
from typer.testing import CliRunner

from cookbook_npu.cli import app
from cookbook_npu.errors import ConfigError
from cookbook_npu.plan.schedule import PhaseTimes, Workload, simulate_schedule
from cookbook_npu.recipes import qwen3_5_9b_async
from cookbook_npu.runs.folder import RunFolder
from cookbook_npu.train.async_sampling import AsyncSampler
from cookbook_npu.train.virtual_run import NONE, Disturbances, VirtualRun

TIMES = PhaseTimes(token=0.02, row=1e-4, train=25.0, update_weights=1.5, recompute=2e-5)


def work(sigma: float, **other) -> Workload:
    return Workload(6, 4, mean_response=1200, max_response=8192, sigma=sigma, **other)


def simulate(
    load, depth, staleness, hours, disturbances=NONE, seed=0, times=TIMES, **settings
):
    settings = {
        "rollout.prompts_per_step": load.prompts_per_step,
        "rollout.samples_per_prompt": load.samples_per_prompt,
        "train.global_batch_size": load.prompts_per_step * load.samples_per_prompt,
        "placement.devices": 2 + load.engines,
        "placement.trainer_devices": 2,
        "rollout.depth": depth,
        "rollout.max_staleness": staleness,
        "rollout.decode_steps": 16,
        "faults.max_restarts": 10_000,
        **settings,
    }
    config = qwen3_5_9b_async(overrides=settings)
    return VirtualRun(config, times, load, disturbances, seed).simulate(hours)


@pytest.mark.parametrize("setting", [(0, 0), (1, 1), (1, 2), (2, 4)])
def test_lost_engines_lose_no_response_and_keep_the_bound(setting):
    "Losses at random times: every step has its samples, none is older than S, and time is lost"
    depth, staleness = setting
    run = partial(simulate, work(0.7, engines=3), depth, staleness, 2.0)
    for seed, restart in ((0, 10.0), (1, 100.0)):
        lossy = Disturbances(hours_between_losses=0.3, restart_s=restart)
        r = run(lossy, seed)
        assert r.losses > 8 and r.resubmitted > 0 and not r.ended
        assert sum(r.ages.values()) == 24 * r.steps
        assert 0 <= min(r.ages) and max(r.ages) <= staleness
        assert r.seconds > run(seed=seed).seconds
        assert 0 <= r.trainer_idle <= 1 and 0 <= r.rollout_idle <= 1


@pytest.mark.parametrize("setting", [(0, 0), (1, 2), (2, 4)])
def test_the_model_of_the_schedule_is_near_the_driver(setting):
    load = work(0.7)
    driver = simulate(load, *setting, 1.5)
    model = simulate_schedule(TIMES, load, *setting, steps=driver.steps, skip=0)
    assert driver.seconds == pytest.approx(model.seconds, rel=0.06)


def test_a_lost_trainer_returns_to_its_checkpoint():
    "Collectives that never end: steps since the checkpoint are taken again, and no sample is too old"
    often = Disturbances(hours_between_timeouts=0.5)
    runs = {
        every: simulate(work(0.7), 1, 2, 6.0, often, **{"train.save_every": every})
        for every in (1, 20)
    }
    for r in runs.values():
        assert r.timeouts >= 5 and max(r.ages) <= 2 and not r.ended
        assert sum(r.ages.values()) == 24 * r.steps
    # a checkpoint of the step in which the trainer was lost does not exist yet
    assert runs[1].repeated <= runs[1].timeouts < runs[20].repeated


def test_saving_by_time_has_the_time_of_the_run():
    "`train.save_minutes` are minutes of the virtual clock"
    saved = {"train.save_every": 0, "train.save_minutes": 10.0}
    r = simulate(work(0.7), 1, 2, 4.0, Disturbances(hours_between_timeouts=1.0), **saved)
    assert r.timeouts and r.repeated * r.seconds <= r.timeouts * (600 + 2 * r.seconds)


def test_slow_engines_are_engines_with_longer_decode_steps():
    "All of them twice as slow: the times of a decode step twice as long; one: between both"
    load = work(0.7, engines=2)
    fast = replace(TIMES, recompute=0.0)
    slow = replace(fast, token=2 * fast.token, row=2 * fast.row)
    seconds = [
        simulate(load, 1, 2, 2.0, Disturbances(slow_engines=n), times=fast).seconds
        for n in (0, 1, 2)
    ]
    assert seconds[2] == pytest.approx(simulate(load, 1, 2, 2.0, times=slow).seconds)
    assert seconds[0] < seconds[1] < seconds[2]


def test_recorded_lengths_are_drawn_and_a_heavy_tail_is_longer():
    even, recorded = work(0.0), replace(work(2.0), recorded=(1200,))
    same = [simulate(load, 1, 2, 0.5).seconds for load in (even, recorded)]
    assert same[0] == pytest.approx(same[1])
    # of one mean, without a limit: the trainer of a synchronous run waits for the longest
    free = replace(work(0.7), max_response=10**9)
    waits = [
        simulate(load, 0, 0, 3.0).seconds for load in (free, replace(free, shape="pareto"))
    ]
    assert waits[1] > 1.5 * waits[0]


def test_the_driver_ends_a_run_that_loses_too_many_workers():
    lossy = Disturbances(hours_between_losses=0.2)
    r = simulate(work(0.7, engines=3), 1, 1, 12.0, lossy, **{"faults.max_restarts": 3})
    assert r.hours < 12 and r.losses >= 4 and "faults.max_restarts is 3" in r.ended


def test_an_engine_that_waits_under_the_lock_is_an_error(monkeypatch):
    "A defect of the driver: a thread that waits for a device while it holds the lock"

    def advance(self):
        with self.jobs.changed:
            self.state.tracker.spans.clock.__self__.sleep(1.0)
            self.gate.advance()

    monkeypatch.setattr(AsyncSampler, "advance", advance)
    with pytest.raises(RuntimeError, match="holds the lock of the others"):
        simulate(work(0.7), 1, 2, 0.5)


def test_a_driver_that_never_resumes_its_engines_is_an_error(monkeypatch):
    "A deadlock is seen at once: no thread can go on"
    monkeypatch.setattr(AsyncSampler, "resume", lambda self, loaded=(): None)
    monkeypatch.setattr(AsyncSampler, "_wait_until", wait_without_limit)
    with pytest.raises(RuntimeError, match="each thread waits for another one"):
        simulate(work(0.7), 1, 2, 0.5)


def wait_without_limit(self, done, resend):
    with self.jobs.changed:
        self.jobs.changed.wait_for(done)


def test_disturbances_without_virtual_hours_are_refused(tmp_path):
    config = qwen3_5_9b_async(overrides={"output.root": str(tmp_path)})
    with RunFolder.create(config) as run:
        for option in ("--slow-engines", "--loss-hours", "--timeout-hours"):
            out = CliRunner().invoke(app, ["schedule", str(run.path), option, "1"])
            assert isinstance(out.exception, ConfigError)
            assert "need --hours" in out.exception.what
