"""The virtual schedule of a split run: what holds whatever the lengths, the gate and the engines are"""

import random

import pytest

from cookbook_npu.plan.schedule import PhaseTimes, Workload, simulate_schedule
from cookbook_npu.rl.staleness import StalenessGate

SETTINGS = [(0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (1, 4), (2, 4), (4, 4)]
TIMES = PhaseTimes(token=0.02, row=1e-4, train=25.0, update_weights=1.5, recompute=2e-5)


def work(sigma: float, **other: int) -> Workload:
    return Workload(6, 4, mean_response=1200, max_response=8192, sigma=sigma, **other)


@pytest.mark.parametrize("setting", SETTINGS)
def test_nothing_is_older_than_the_bound_and_every_step_comes(setting):
    "Random times, spreads, engines and rows: no sample older than S, none lost, the parts add up"
    depth, staleness = setting
    chance = random.Random(f"{setting}")
    for seed in range(8):
        times = PhaseTimes(
            token=10 ** chance.uniform(-3, -1),
            row=10 ** chance.uniform(-5, -3),
            train=10 ** chance.uniform(-1, 2.5),
            update_weights=chance.choice([0.0, 0.5, 5.0]),
            recompute=chance.choice([0.0, 1e-4]),
        )
        load = work(
            chance.choice([0.0, 0.3, 0.7, 1.0, 2.0]),
            engines=chance.choice([1, 2, 3]),
            rows=chance.choice([1, 5, 256]),
        )
        r = simulate_schedule(times, load, depth, staleness, steps=30, skip=5, seed=seed)
        assert 0 <= min(r.ages) <= r.age_mean <= r.age_max <= staleness
        assert sum(r.ages.values()) == 25 * 24
        assert (
            abs(r.wait + times.train + times.update_weights - r.seconds) < 1e-6 * r.seconds
        )
        for share in (r.trainer_idle, r.rollout_idle, r.paused):
            assert 0 <= share <= 1


@pytest.mark.parametrize("sigma", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("train", [5.0, 25.0, 60.0])
def test_running_further_ahead_is_not_slower(sigma, train):
    "At one bound S, a larger depth gives at least as many steps an hour, up to the noise of the lengths"
    times = PhaseTimes(token=0.02, row=1e-4, train=train, update_weights=1.5)
    seconds = []
    for depth in range(5):
        runs = [simulate_schedule(times, work(sigma), depth, 4, seed=s) for s in range(3)]
        seconds.append(sum(r.seconds for r in runs) / 3)
    for shallow, deep in zip(seconds, seconds[1:], strict=False):
        assert deep <= 1.05 * shallow, seconds
    assert seconds[1] < 0.97 * seconds[0]


@pytest.mark.parametrize("sigma", [0.3, 1.0])
def test_waiting_longer_for_stragglers_is_not_faster(sigma):
    "At one depth, a looser bound gives at least as many steps an hour"
    tight, loose = (simulate_schedule(TIMES, work(sigma), 2, s).seconds for s in (2, 4))
    assert loose <= 1.02 * tight


def test_the_same_seed_gives_the_same_schedule():
    first, again = (simulate_schedule(TIMES, work(0.7), seed=3) for _ in range(2))
    assert first == again
    assert first != simulate_schedule(TIMES, work(0.7), seed=4)


def test_it_is_the_gate_of_the_loop_that_keeps_samples_young(monkeypatch):
    "A gate that bounds only how far the engines run ahead lets samples grow old here, too"
    slow = work(2.0, engines=2)

    def enough(gate: StalenessGate) -> str | None:
        missing = gate.prompts_per_step - len(gate.finished)
        return f"{missing} more groups" if missing > 0 else None

    assert simulate_schedule(TIMES, slow, 2, 2).age_max == 2
    monkeypatch.setattr(StalenessGate, "waits_for", enough)
    assert simulate_schedule(TIMES, slow, 2, 2).age_max > 2


def test_a_gate_that_never_opens_is_told_and_not_waited_for(monkeypatch):
    monkeypatch.setattr(StalenessGate, "waits_for", lambda gate: "nothing")
    with pytest.raises(RuntimeError, match="step 0 waits for nothing: nothing runs"):
        simulate_schedule(TIMES, work(0.3))
