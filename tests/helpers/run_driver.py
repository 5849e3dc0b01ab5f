"""A run in a process of its own, for whole_runs.py: `drive(CONFIG.json[, STRIKE.json])` prints its processes,
then its steps. With STRIKE.json it kills some of them, see `Strike`. `engines`: how many after which step.
"""

import gc
import json
import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import psutil

# phase -> what the driver measures, and the call that is under way
CALLS = {
    "rollout": ("rollout", "generate"),
    "logprobs": ("logprobs", "logprobs"),
    "train": ("actor_train", "train"),
    "save": ("save", "save_state"),
    "update_weights": ("update_weights", "update_weights"),
    "eval": ("eval", "generate"),
    "way_back": ("update_weights", "update_weights"),
}
OUTSIDE_OF_STEPS = ("eval", "way_back")


def spread(answer, label, metadata):
    "A reward that every answer of a group earns differently, so that every step moves the weights"
    return (sum(map(ord, answer)) % 97) / 97


def own_clip(logp_T, old_logp_T, adv_T, seqs, config):
    "The loss ppo, as a user would write it"
    low, high = 1 - config.clip_ratio_low, 1 + config.clip_ratio_high
    ratio_T = (logp_T - old_logp_T).exp()
    return (-ratio_T * adv_T).maximum(-ratio_T.clamp(low, high) * adv_T)


def breaks(answer, label, metadata):
    "A scorer that raises from its 71st answer on; the file counts"
    count = Path(os.environ["COOKBOOK_NPU_TEST_COUNT"])
    done = int(count.read_text()) if count.exists() else 0
    count.write_text(str(done + 1))
    if done >= 70:
        raise ValueError("the scorer broke")
    return spread(answer, label, metadata)


def judges(answer, label, metadata):
    "A slow judge of tenant b: waits until the step of tenant a, the next one, has ended"
    run = Path(os.environ["COOKBOOK_NPU_TEST_COUNT"]).with_name("b_a_broken")

    def rows(name):
        file = run / "tenants" / name / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    while rows("a") <= rows("b"):
        time.sleep(0.01)
    return spread(answer, label, metadata)


def hangs(answer, label, metadata):
    "A scorer with which no label can be compared"
    while True:
        time.sleep(1)


def raylets():
    "Process ids of the raylet below this process"
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.name() == "raylet":
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def processes(run):
    "Process ids of the run by role, in rank order"
    engines = run.state.engines.groups  # none: supervised fine-tuning
    return {
        "driver": [os.getpid()],
        "raylet": raylets(),
        "trainer": run.state.trainer.pids,
        "engine": engines[0].pids if engines else [],
    }


class Strike:
    "Kills processes of a run, each while one call of one phase is under way, and writes down what it met"

    def __init__(self, run, plan):
        self.run = run
        self.blows = plan["blows"]  # [role, rank, phase, steps logged before], in order
        self.record = Path(plan["record"])
        self.below = [p.pid for p in psutil.Process().children(recursive=True)]
        self.raylet = raylets()
        self.met = []  # what was written down
        self.spans = []  # what the driver is measuring, outermost first

    def arm(self):
        "Watch what the driver measures and waits for"
        from cookbook_npu.cluster.worker_group import RayFuture

        tracker = self.run.state.tracker
        span = tracker.span
        result = RayFuture.result

        @contextmanager
        def noted(name):
            self.spans.append(name)
            try:
                with span(name):
                    yield
            finally:
                self.spans.pop()

        def watched(future, timeout=None):
            if self.is_met(future):
                time.sleep(0.001)  # the workers begin
                self.hit(future)
            return result(future, timeout)

        tracker.span = noted
        RayFuture.result = watched

    def is_met(self, future):
        "Is this the call of the next blow?"
        if not self.blows:
            return False
        _, _, phase, logged = self.blows[0]
        span, method = CALLS.get(phase, (None, None))
        in_phase = span in self.spans and future.method == method
        if ("step" in self.spans) == (phase in OUTSIDE_OF_STEPS):
            return False
        return in_phase and self.run.state.tracker.last == logged

    def hit(self, future=None):
        "Kill, and write down where the run stood; not the other way round, because a call may be short"
        role, rank, phase, _ = self.blows.pop(0)
        met = {
            "role": role,
            "rank": rank,
            "phase": phase,
            "logged": self.run.state.tracker.last,
            "spans": list(self.spans),
            "call": future.method if future else None,
            "below": self.below,
        }
        if role == "driver":
            # it cannot go on before it has taken what the call returns
            self.write_down(met, True)
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(self.pid(role, rank), signal.SIGKILL)
        self.write_down(met, future is None or not future.done())

    def pid(self, role, rank):
        "The process that is to fall, as the run has it now"
        if role == "raylet":
            return self.raylet[rank]
        state = self.run.state
        group = state.trainer if role == "trainer" else state.engines.groups[0]
        return group.pids[rank]

    def write_down(self, met, under_way):
        "What was met, and what the run folder holds"
        folder = self.run.state.folder
        metrics = folder.metrics_file
        met["under_way"] = under_way
        met["metrics"] = metrics.read_text() if metrics.exists() else ""
        met["samples"] = {f.name: f.read_text() for f in folder.samples.glob("step_*")}
        self.met.append(met)
        self.record.write_text(json.dumps(self.met))


def scale(run, engines):
    "A person who changes the number of engines, and waits for them"
    if not run.set_num_engines(engines):
        return
    pool = run.driver.placement.sampler.engines
    deadline = time.monotonic() + 400
    while len(pool.loadable) < engines and time.monotonic() < deadline:
        time.sleep(0.05)


def drive(config, plan=None, engines=None, lasting=False):
    "In a process of its own; `lasting`: workers that are started again have the same faults"
    from cookbook_npu.config import load_config
    from cookbook_npu.train import workers
    from cookbook_npu.train.session import session

    if lasting:
        workers.RESTART_ENV.clear()
    with session(load_config(config)) as run:
        assert gc.get_freeze_count(), "a step would wait for a search through all imports"
        told = processes(run) | {"status": run.status()}
        print(json.dumps(told), flush=True)
        if plan is not None:
            strike = Strike(run, json.loads(Path(plan).read_text()))
            strike.arm()
            if strike.blows[0][2] == "start":
                strike.hit()
        for row in run.steps():
            print(json.dumps(row), flush=True)
            if engines and str(row["step"]) in engines:
                scale(run, engines[str(row["step"])])
    assert not gc.get_freeze_count(), "what was garbage before the run stays for ever"
