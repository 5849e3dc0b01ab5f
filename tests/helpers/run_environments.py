"""An environment of whole runs: it answers whatever the policy says, and fails on some prompts."""

import time
from zlib import crc32

from cookbook_npu.data.environments import Environment, Observation


def fails_on(prompt_id, every):
    "Whether the environment raises for this prompt"
    return bool(every) and crc32(prompt_id.encode()) % every == 0


class Talker(Environment):
    "Answers with a number of its own, and is done after so many turns"

    def __init__(self, turns=2, every=0, delay=0.0):
        self.last = turns
        self.every = every  # so many prompts, and one of them fails; 0: none
        self.delay = delay  # longest call, s

    def reset(self, prompt, seed):
        self.turns = 0
        self.seed = seed
        self.broken = fails_on(prompt.prompt_id, self.every)

    def step(self, text):
        time.sleep(self.delay * (self.seed % 7) / 7)
        if self.broken:
            raise ValueError("no answer to this one")
        self.turns += 1
        if self.turns == self.last:
            return Observation(done=True, reward=float(len(text) % 2))
        return Observation(messages=[{"role": "tool", "content": f"{self.seed % 90}="}])


class Shower(Environment):
    "Shows the left half of the question's picture after a first turn"

    def reset(self, prompt, seed):
        self.picture = prompt.images[0].processor.picture(prompt.images[0])
        self.turns = 0

    def step(self, text):
        self.turns += 1
        if self.turns == 2:
            return Observation(done=True, reward=float(len(text) % 2))
        half = self.picture.crop((0, 0, self.picture.width // 2, self.picture.height))
        shown = [{"type": "image", "image": half}, {"type": "text", "text": "="}]
        return Observation(messages=[{"role": "user", "content": shown}])
