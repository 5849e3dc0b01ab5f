"""An asyncio event loop in virtual time: nothing is waited for; that all tasks wait for ever is an error."""

import asyncio
import random
import selectors


class Jumps(selectors.DefaultSelector):
    "Lets the time of a loop jump to its next timer"

    seconds = 0.0

    def select(self, timeout=None):
        assert timeout is not None, "every task waits, and nothing is under way"
        self.seconds += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    "What would run in a thread runs after a random time"

    def __init__(self, seed=0):
        self.jumps = Jumps()
        self.random = random.Random(seed)
        super().__init__(self.jumps)

    def time(self):
        return self.jumps.seconds

    def run_in_executor(self, executor, work, *args):
        return self.create_task(self._later(work, *args))

    async def _later(self, work, *args):
        await asyncio.sleep(self.random.uniform(0, 0.001))
        return work(*args)


def play(work, seed=0):
    "Run a coroutine in virtual time, at most a minute of it"
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(seed)) as runner:
        return runner.run(asyncio.wait_for(work, 60.0))
