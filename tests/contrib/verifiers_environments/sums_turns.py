"""An environment of several turns: the policy is told higher or lower."""

import verifiers.v1 as vf
from sums_taskset import Sums as _Sums


class Guesses(_Sums):
    pass


class GuessingEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class GuessingEnv(vf.Env[GuessingEnvConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            said = await talk.turn()
            for _ in range(3):
                if said.terminated or said.last_reply == task.data.answer:
                    return
                low = said.last_reply < task.data.answer
                said = await talk.turn("higher" if low else "lower")


__all__ = ["Guesses", "GuessingEnv"]
