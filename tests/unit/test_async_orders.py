"""Asynchronous sampling under every order of up to four events: no hang, no lost or repeated draw.

The engines take one call at a time, decode slowly and load slowly; sampler and weight update are those of a
run. Time is virtual, and each call takes a random share of it."""

import asyncio
import itertools
import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import virtual_time

from cookbook_npu.cluster.worker_group import LocalCall, LocalWorkerGroup
from cookbook_npu.config import override
from cookbook_npu.data.prompts import EpochOrder, PromptDataset
from cookbook_npu.data.rewards import Grade
from cookbook_npu.data.sample import Prompt, Sample, continued_turns
from cookbook_npu.errors import RoleError
from cookbook_npu.recipes import qwen3_4b_colocate
from cookbook_npu.rl.filters import sample_age
from cookbook_npu.runs.metrics import Tracker
from cookbook_npu.train.async_sampling import AsyncSampler, PoolStatus
from cookbook_npu.train.rollout_worker import Engines
from cookbook_npu.train.sampling import Grading
from cookbook_npu.train.weight_update import AsyncWeightUpdate
from cookbook_npu.weights.manifest import Manifest

EVENTS = ("halt", "drop", "add", "remove", "update", "loss")
DECODE_S, LOAD_S = 0.0005, 0.003
NUM_ENGINES, STEPS, PROMPTS = 2, 12, 2


class Group(LocalWorkerGroup):
    "An engine whose calls take time"

    def _start_on(self, method, args, kwargs):
        async def returned():
            return [await getattr(self.workers[0], method)(*args[0])]

        return asyncio.create_task(returned())


class Engine:
    "One call at a time; answers after one or two of them"

    def __init__(self, rank, world_size):
        self.running = []
        self.version = -1
        self.dies = self.busy = False

    async def _call(self, seconds=0.0):
        assert not self.busy, "two calls at a time"
        self.busy = True
        await asyncio.sleep(seconds * asyncio.get_running_loop().random.uniform(0.1, 2))
        self.busy = False
        if self.dies:
            raise RoleError("the process died", "Restart it.")

    async def wake(self, tags):
        await self._call(LOAD_S / 3)

    async def update_weights(self, manifest):
        await self._call(LOAD_S)
        assert not self.running or self.version >= 0
        self.version = manifest.version

    async def submit(self, requests, sampling):
        await self._call()
        assert self.version >= 0, "no weights"
        self.running += [[request, request.index % 2] for request in requests]

    async def collect(self, decode_steps):
        await self._call(DECODE_S)
        done = [request for request, left in self.running if not left]
        self.running = [[request, left - 1] for request, left in self.running if left]
        return [self.sample(request, "stop") for request in done]

    async def abort(self, group_ids=None):
        await self._call()
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
            rewards=SimpleNamespace(
                grade=lambda samples: [Grade(float(s.index % 2), None) for s in samples],
                take_reports=list,
            ),
            folder=SimpleNamespace(event=lambda kind, **fields: None),
            tracker=Tracker(),
            trainer=SimpleNamespace(
                start=lambda method, v=0: LocalCall([Manifest(v, buckets=[{"m": "b"}])])
            ),
            workers=SimpleNamespace(
                reserve_devices=lambda num_engines: None,
                add_engine=lambda number: self.put(number, None),
                restart_engine=lambda number: self.put(number, self.engine()),
                end_engine=lambda number: self.put(number, None),
                cluster=SimpleNamespace(slots=[SimpleNamespace(node_id="m")] * 20),
            ),
        )
        failures = SimpleNamespace(count=lambda error: None)
        self.sampler = AsyncSampler(self.state, Grading(self.state), failures)
        self.weights = AsyncWeightUpdate(self.state, self.sampler)
        self.step, self.trained = 0, []

    def engine(self):
        return Group.create("rollout", Engine)

    def put(self, number, group):
        self.engines.groups[number : number + 1] = [group]

    async def begin(self):
        await self.weights.update()
        await self.sampler.start(self.step)

    async def halt(self):
        "What a lost trainer does: sampling halts, and starts again at the checkpoint"
        await self.sampler.halt()
        pool = self.sampler.engines
        assert pool.status is PoolStatus.HALTED and not self.sampler.groups
        await asyncio.sleep(LOAD_S)  # a weight update under way has ended, or ends now
        assert pool.status is PoolStatus.HALTED and not self.sampler.groups
        for number, group in enumerate(self.engines.groups):
            if group is not None and group.workers[0].dies:
                self.put(number, self.engine())  # as the recovery does
        self.state.version = self.step - 1
        await self.begin()

    async def drop(self):
        "A straggler"
        for group in list(self.sampler.groups.values())[:1]:
            self.sampler.engines.abandon(group)
            self.sampler._drop(group)
        self.sampler._admit()

    async def add(self, more=1):
        await self.weights.wait()
        before = len(self.sampler.engines.in_service)
        await self.sampler.set_num_engines(max(before + more, 1))

    async def remove(self):
        await self.add(-1)

    async def update(self):
        "A step: take its groups, train, and let the engines load in the background"
        rollout = await self.sampler.take(self.weights.resend)
        assert max(sample_age(s, self.step) for s in rollout.samples) <= 2
        for draw in rollout.draws:
            self.state.prompts.end_draw(draw.number)
            self.trained.append(draw.number)
        await self.weights.finish(await self.weights.start())
        self.step += 1

    async def loss(self):
        "An engine dies in its next call"
        for group in self.engines.groups:
            if group is not None and not group.workers[0].dies:
                group.workers[0].dies = True
                return


async def play(events):
    run = Run()
    await run.begin()
    for event in events:
        # the driver does something else between two events
        await asyncio.sleep(asyncio.get_running_loop().random.choice([0, DECODE_S, LOAD_S]))
        await getattr(run, event)()
    for _ in range(2):
        await run.update()
    await run.weights.wait()
    run.sampler.tasks.check()
    assert all(member.in_flight >= 0 for member in run.sampler.engines.members)
    assert len(set(run.trained)) == len(run.trained) == PROMPTS * run.step
    held = {**run.sampler.groups, **run.sampler.finished}.values()
    assert {group.number for group in held} == set(run.state.prompts.in_flight)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_orders_of_events(length):
    "Every order of up to three, 216 of four"
    orders = list(itertools.product(EVENTS, repeat=length))
    for events in random.Random(0).sample(orders, min(len(orders), 216)):
        try:
            virtual_time.play(play(events), seed=repr(events))
        except BaseException as error:
            error.add_note(f"the order of events is {events}")
            raise
