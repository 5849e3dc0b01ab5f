"""Asynchronous sampling under every order of up to four events: no hang, no lost or repeated draw.

The engines take one call at a time, decode slowly and load slowly; the sampler, the engine threads and the
weight update are those of a run."""

import itertools
import random
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from cookbook_npu.cluster.worker_group import LocalWorkerGroup
from cookbook_npu.config import override
from cookbook_npu.data.prompts import EpochOrder, PromptDataset
from cookbook_npu.data.rewards import Grade
from cookbook_npu.data.sample import Prompt, Sample, continued_turns
from cookbook_npu.errors import RoleError
from cookbook_npu.recipes import qwen3_4b_colocate
from cookbook_npu.rl.filters import sample_age
from cookbook_npu.runs.metrics import Tracker
from cookbook_npu.train.async_sampling import AsyncSampler, PoolStatus
from cookbook_npu.train.async_weight_update import AsyncWeightUpdate
from cookbook_npu.train.rollout_worker import Engines
from cookbook_npu.train.sampling import Grading
from cookbook_npu.weights.manifest import Manifest

EVENTS = ("halt", "drop", "add", "remove", "update", "loss")
DECODE_S, LOAD_S = 0.0005, 0.003
NUM_ENGINES, STEPS, PROMPTS = 2, 12, 2


class Engine:
    "One call at a time; answers after one or two of them"

    def __init__(self, rank, world_size):
        self.engine = self
        self.running = []
        self.version = -1
        self.dies = False
        self.busy = threading.Lock()

    def _call(self, seconds=0.0):
        assert self.busy.acquire(blocking=False), "two calls at a time"
        try:
            time.sleep(seconds)
            if self.dies:
                raise RoleError("the process died", "Restart it.")
        finally:
            self.busy.release()

    def wake(self, tags):
        self._call(LOAD_S / 3)

    def update_weights(self, manifest):
        self._call(LOAD_S)
        assert not self.running or self.version >= 0
        self.version = manifest.version

    def submit(self, requests, sampling):
        self._call()
        assert self.version >= 0, "no weights"
        self.running += [[request, request.index % 2] for request in requests]

    def collect(self, decode_steps):
        self._call(DECODE_S)
        done = [request for request, left in self.running if not left]
        self.running = [[request, left - 1] for request, left in self.running if left]
        return [self.sample(request, "stop") for request in done]

    def abort(self, group_ids=None):
        self._call()
        gone = [r for r, _ in self.running if group_ids is None or r.group_id in group_ids]
        self.running = [pair for pair in self.running if pair[0] not in gone]
        return [self.sample(request, "abort") for request in gone]

    def sample(self, request, reason):
        before = request.partial
        versions = [*(before.versions if before else []), self.version]
        return Sample(
            group_id=request.group_id,
            index=request.index,
            prompt_ids=[1],
            response_ids=[2] * len(versions),
            logprobs=[-1.0] * len(versions),
            loss_mask=[1] * len(versions),
            versions=versions,
            finish_reason=reason,
            turns=continued_turns(before.turns if before else [], len(versions)),
        )


class Graders:
    failure = ""

    def grade(self, samples):
        return [Grade(float(s.index % 2), s.index % 2 == 1) for s in samples]

    def take_reports(self):
        return []


class Run:
    "The asynchronous half of a run: sampler and weight update over stub processes"

    def __init__(self):
        config = override(
            qwen3_4b_colocate("laptop"),
            {
                "num_steps": STEPS,
                "placement.mode": "split",
                "placement.devices": 2 + NUM_ENGINES,
                "placement.trainer_devices": 2,
                "rollout.prompts_per_step": PROMPTS,
                "rollout.samples_per_prompt": 2,
                "rollout.depth": 1,
                "rollout.max_staleness": 2,
            },
        )
        prompts = [Prompt(prompt_id=f"p{n}", ids=[1], text="?") for n in range(5)]
        self.engines = Engines([self.engine() for _ in range(config.num_engines)])
        self.state = SimpleNamespace(
            config=config,
            engines=self.engines,
            episodes=None,
            grading=nullcontext,
            version=-1,
            held_out=[],
            prompts=PromptDataset(EpochOrder(prompts)),
            rewards=Graders(),
            folder=SimpleNamespace(event=lambda kind, **fields: None),
            tracker=Tracker(),
            trainer=SimpleNamespace(
                start=lambda method, version: SimpleNamespace(
                    result=lambda: [Manifest(version, buckets=[{"m": "b"}])]
                ),
                call=lambda method: None,
            ),
            workers=SimpleNamespace(
                reserve_devices=lambda num_engines: None,
                add_engine=self.add_engine,
                restart_engine=self.restart,
                end_engine=self.end,
                cluster=SimpleNamespace(
                    slots=[SimpleNamespace(node_id="m")] * 20, on_wait=None
                ),
            ),
        )
        failures = SimpleNamespace(count=lambda error: None)
        self.sampler = AsyncSampler(self.state, Grading(self.state), failures)
        self.weights = AsyncWeightUpdate(self.state, self.sampler)
        self.step = 0
        self.trained = []

    def engine(self):
        return LocalWorkerGroup.create("rollout", Engine)

    def add_engine(self, number):
        if number == len(self.engines.groups):
            self.engines.groups.append(None)

    def restart(self, number):
        time.sleep(DECODE_S)
        self.engines.groups[number] = self.engine()

    def end(self, number):
        self.engines.groups[number] = None

    def begin(self):
        self.weights.update()
        self.sampler.start(self.step)

    def halt(self):
        "What a lost trainer does: sampling halts, and starts again at the checkpoint"
        self.sampler.halt()
        pool = self.sampler.engines
        assert pool.status is PoolStatus.HALTED and not self.sampler.groups
        time.sleep(LOAD_S)  # a weight update that was under way has ended, or ends now
        assert pool.status is PoolStatus.HALTED and not self.sampler.groups
        for number, group in enumerate(self.engines.groups):
            if group is not None and group.workers[0].dies:
                self.restart(number)  # as the recovery does
        self.state.version = self.step - 1
        self.begin()

    def drop(self):
        "A straggler"
        with self.sampler.jobs.changed:
            for group in list(self.sampler.groups.values())[:1]:
                self.sampler.engines.abandon(group)
                self.sampler._drop(group)
            self.sampler._admit()

    def add(self):
        self.weights.wait()
        self.sampler.set_num_engines(len(self.sampler.engines.in_service) + 1)

    def remove(self):
        self.weights.wait()
        self.sampler.set_num_engines(max(len(self.sampler.engines.in_service) - 1, 1))

    def update(self):
        "A step: take its groups, train, and let the engines load in the background"
        rollout = self.sampler.take(self.weights.resend)
        assert max(sample_age(s, self.step) for s in rollout.samples) <= 2
        for draw in rollout.draws:
            self.state.prompts.end_draw(draw.number)
            self.trained.append(draw.number)
        self.weights.finish(self.weights.start())
        self.step += 1

    def loss(self):
        "An engine dies in its next call"
        for group in self.engines.groups:
            if group is not None and not group.workers[0].dies:
                group.workers[0].dies = True
                return


def play(events):
    run = Run()
    try:
        run.begin()
        for event in events:
            getattr(run, event)()
        for _ in range(2):
            run.update()
        run.weights.wait()
        run.sampler.jobs.check()
        assert all(thread.in_flight >= 0 for thread in run.sampler.engines.threads)
        assert len(set(run.trained)) == len(run.trained) == PROMPTS * run.step
    finally:
        run.sampler.close()


def check(orders):
    "Play each order in a thread with a deadline, a few at a time"
    failed = {}

    def work(mine):
        for events in mine:
            done = threading.Event()
            error = []

            def run(events=events, done=done, error=error):
                try:
                    play(events)
                except BaseException as e:  # reported below, with its order
                    error.append(e)
                done.set()

            threading.Thread(target=run, daemon=True).start()
            if not done.wait(400):
                failed[events] = "hangs"
            elif error:
                failed[events] = repr(error[0])

    threads = [threading.Thread(target=work, args=(orders[i::8],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, dict(list(failed.items())[:5])


@pytest.mark.parametrize("length", [1, 2, 3])
def test_every_order_of_events(length):
    check(list(itertools.product(EVENTS, repeat=length)))


def test_orders_of_four_events():
    orders = list(itertools.product(EVENTS, repeat=4))
    check(random.Random(0).sample(orders, 100))
