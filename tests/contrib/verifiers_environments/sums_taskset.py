"""Environments of the newer interface of `verifiers`: tasks with rewards; turns; a tool server."""

import verifiers.v1 as vf
from pydantic import Field

ROWS = (("2+3=", "5"), ("4+4=", "8"), ("9-2=", "7"))


class SumData(vf.TaskData):
    answer: str


class AddConfig(vf.ToolsetConfig):
    pass


class Add(vf.Toolset[AddConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def add(self, a: int, b: int) -> int:
        "Adds two numbers."
        return a + b


class SumConfig(vf.TaskConfig):
    with_tool: bool = False
    add: AddConfig = AddConfig()


class Sum(vf.Task[SumData, vf.State, SumConfig]):
    "Right when the last answer is the number alone"

    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        replies = [m for m in trace.messages if m.role == "assistant"]
        return float((replies[-1].content or "").strip() == self.data.answer)

    @classmethod
    def toolsets(cls, config: SumConfig) -> list[vf.Toolset]:
        return [Add(config.add)] if config.with_tool else []


class SumsConfig(vf.TasksetConfig):
    task: SumConfig = SumConfig()
    rows: int = Field(3, ge=1)


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self):
        for question, answer in ROWS[: self.config.rows]:
            data = SumData(
                prompt=question, system_prompt="Answer with a number.", answer=answer
            )
            yield Sum(data, self.config.task)


__all__ = ["Sums"]

if __name__ == "__main__":  # how verifiers starts a tool's server
    Add.run()
