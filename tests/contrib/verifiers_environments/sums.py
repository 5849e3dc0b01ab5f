"""Environments of the classic interface of `verifiers`: one turn, several turns, tools."""

import verifiers as vf
from datasets import Dataset

ROWS = [
    {"question": "2+3=", "answer": "5"},
    {"question": "4+4=", "answer": "8"},
    {"question": "9-2=", "answer": "7"},
]
SYSTEM = "Answer with a number."


def exact(completion, answer, **_) -> float:
    "1 for the answer alone, in the policy's last turn"
    said = [m["content"] for m in completion if m["role"] == "assistant"]
    return float((said[-1] or "").strip() == answer)


def length(completion, **_) -> float:
    "How much was said"
    return float(len(completion))


def compared(completions, **_) -> list[float]:
    "A reward that needs the whole group"
    return [float(n) for n, _ in enumerate(completions)]


def add(a: int, b: int) -> int:
    "Adds two numbers."
    return int(a) + int(b)


class Guessing(vf.MultiTurnEnv):
    "Says higher or lower until the answer is found"

    async def env_response(self, messages, state, **kwargs):
        said = int(messages[-1]["content"])
        wanted = int(state["answer"])
        if said == wanted:
            state["final_env_response"] = [{"role": "user", "content": "yes"}]
            return state["final_env_response"]
        word = "higher" if said < wanted else "lower"
        return [{"role": "user", "content": word}]


class Forgetful(vf.MultiTurnEnv):
    "Writes the conversation anew in its second turn"

    async def get_prompt_messages(self, state):
        if not state["trajectory"]:
            return state["prompt"]
        return [{"role": "user", "content": "start again"}]

    async def env_response(self, messages, state, **kwargs):
        return []


class Failing(vf.MultiTurnEnv):
    "Breaks after the first turn"

    async def env_response(self, messages, state, **kwargs):
        raise RuntimeError("the board fell from the table")


def rubric(*functions) -> vf.Rubric:
    "Their sum; a number of messages beside it, which counts nothing"
    weights = [1.0 for _ in functions]
    return vf.Rubric(funcs=[*functions, length], weights=[*weights, 0.0])


def load_environment(kind: str = "single", max_turns: int = 4, rows: int = 3):
    "The environment of a test"
    given = {
        "dataset": Dataset.from_list(ROWS[:rows]),
        "system_prompt": SYSTEM,
        "rubric": rubric(exact),
    }
    if kind == "single":
        return vf.SingleTurnEnv(**given)
    if kind == "group":
        return vf.SingleTurnEnv(**{**given, "rubric": rubric(compared)})
    if kind == "tools":
        return vf.ToolEnv(tools=[add], max_turns=max_turns, **given)
    kinds = {"guess": Guessing, "forget": Forgetful, "fail": Failing}
    return kinds[kind](max_turns=max_turns, **given)
