"""Makes the tiny models that the package ships: `make tiny-models` (MODELS="arithmetic geometry": some).

For each it writes demonstrations as conversations and takes two runs of the SFT stage on them: on correct
answers, then on answers of which some have random digits. The weights are stored in bfloat16; a run of the
recipe measures their held-out accuracy. `--check NAME` makes one again and compares its accuracy.
"""

import argparse
import hashlib
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save

from cookbook_npu import session
from cookbook_npu.config import RunConfig, override
from cookbook_npu.data.environments import calculate, find_environment, marks
from cookbook_npu.data.sample import Prompt
from cookbook_npu.data.tasks import PICTURED, generated_task
from cookbook_npu.model.tiny import (
    SHIPPED,
    needed_skills,
    reads_pictures,
    shipped_models,
    tiny_folder,
)
from cookbook_npu.recipes import RECIPES, qwen3_4b_sft

BATCH = 64  # demonstrations of a step
NOISY_LEARNING_RATE = 3e-4
DIRECT = 0.25  # fraction of the calculator's demonstrations without a call
WITHIN = 0.15  # by how much the accuracy of two makes may differ


@dataclass(frozen=True)
class Made:
    "How a model is made"

    recipe: str
    prompt_data: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    steps: int = 600  # on correct answers
    learning_rate: float = 5e-3
    noisy_steps: int = 45
    corrupt: float = 0.7  # fraction of random answers in these

    def config(self, **parameters: Any) -> RunConfig:
        "The configuration of the recipe's run"
        own = {**self.overrides, **parameters.pop("overrides", {})}
        call = RECIPES[self.recipe]
        return call(prompt_data=self.prompt_data, overrides=own, **parameters)


TURNS = {"rollout.environment": "geo3k"}
MODELS = {
    "arithmetic": Made("qwen3_4b_colocate", steps=1000),
    "arithmetic_teacher": Made(
        "qwen3_4b_colocate",
        overrides={"model.tiny.hidden_size": 96, "model.tiny.ffn_size": 288},
        steps=1000,
        noisy_steps=0,
    ),
    "arithmetic_counting": Made("qwen3_4b_multi_lora_grpo", steps=1200),
    "arithmetic_moe": Made("qwen3_30b_a3b_grpo"),
    "arithmetic_hybrid": Made("qwen3_5_9b_colocate", steps=250, noisy_steps=60),
    "geometry_hybrid": Made(
        "qwen3_5_9b_colocate",
        prompt_data="geometry",
        steps=250,
        learning_rate=2e-3,
        noisy_steps=50,
    ),
    "calculator": Made(
        "qwen3_4b_colocate",
        prompt_data="calculator",
        steps=450,
        learning_rate=3e-3,
        noisy_steps=12,
        corrupt=0.25,
    ),
    "geometry": Made("qwen3_vl_8b_grpo", steps=250, learning_rate=2e-3, noisy_steps=50),
    "geometry_areas": Made(
        "qwen3_vl_8b_ppo", steps=450, learning_rate=2e-3, noisy_steps=50
    ),
    "triangles": Made(
        "qwen3_vl_8b_grpo",
        overrides=TURNS,
        steps=350,
        learning_rate=2e-3,
        noisy_steps=50,
        corrupt=0.5,
    ),
    "triangles_oracle": Made(
        "qwen3_vl_8b_grpo",
        overrides={**TURNS, "rollout.environment_arguments.oracle": True},
        steps=350,
        learning_rate=2e-3,
        noisy_steps=50,
        corrupt=0.5,
    ),
    "wordle": Made("wordle_grpo", steps=800, learning_rate=3e-3, noisy_steps=30),
}


def other_digits(text: str, rng: random.Random) -> str:
    "The text with random digits"
    return "".join(rng.choice("0123456789") if c.isdigit() else c for c in text)


class Demonstrations:
    "Conversations of a policy that solves the generated task of a run"

    def __init__(self, config: RunConfig, folder: Path):
        self.config = config
        self.folder = folder  # of the drawings
        self.name = config.data.prompt_data
        self.tasks: Any = generated_task(self.name, config.data.task)
        self.problems: Any = self.tasks.train
        rollout = config.rollout
        self.environment: Any = None
        if rollout.environment:
            made = find_environment(rollout.environment, rollout.environment_arguments)
            self.environment = made()

    def images(self, problem: Any) -> list[str]:
        "The files of a problem's drawing"
        if self.name not in PICTURED:
            return []
        digest = hashlib.sha256(problem.name.encode()).hexdigest()[:16]
        file = self.folder / f"{digest}.png"
        if not file.exists():
            problem.draw().save(file)
        return [str(file)]

    def records(self, corrupt: float, seed: str) -> Iterator[dict[str, Any]]:
        "Yield conversations, endlessly; a fraction of them with random digits"
        rng = random.Random(f"{self.name}/{seed}")
        while True:
            problem = rng.choice(self.problems)
            messages = self.messages(problem, rng.random() < corrupt, rng)
            yield {"messages": messages, "images": self.images(problem)}

    def game(
        self, problem: Any, corrupted: bool, rng: random.Random
    ) -> Iterator[dict[str, str]]:
        "Yield the turns of a game; its guesses fit all marks so far, or are random in a corrupted one"
        prompt = Prompt(prompt_id="", ids=[], text=problem.prompt, label=problem.label)
        self.environment.reset(prompt, 0)
        words = [one.answer for one in self.tasks.problems]
        last = self.config.rollout.max_turns - 1
        for turn in range(last + 1):
            guess = rng.choice(words)
            yield {"role": "assistant", "content": guess}
            answer = self.environment.step(guess)
            if answer.done:
                return
            if not corrupted:
                found = marks(guess, problem.label)
                words = [word for word in words if marks(guess, word) == found]
            if turn < last:
                yield from answer.messages

    def messages(
        self, problem: Any, corrupted: bool, rng: random.Random
    ) -> list[dict[str, str]]:
        "One conversation; a corrupted one answers with random digits, or calls the tool with them"
        asked = [{"role": "user", "content": problem.prompt}]
        if self.name == "wordle":
            return [*asked, *self.game(problem, corrupted, rng)]
        text = problem.answer
        oracle = getattr(self.environment, "oracle", False)
        calls = bool(self.environment) and (bool(problem.asks) or oracle)
        if self.name == "calculator" and rng.random() < DIRECT:
            calls = False
        if calls and not oracle:
            text = problem.asks
        if corrupted:
            text = other_digits(text, rng)
        if calls:
            prompt = Prompt(prompt_id="", ids=[], text=problem.prompt, label=problem.label)
            asked = self.environment.reset(prompt, 0) or asked
            call = self.environment.call(text)
            asked += [{"role": "assistant", "content": call}]
            asked += self.environment.step(call).messages
            # the oracle's answer is corrected; a calculator's result is copied
            text = problem.answer if oracle else calculate(text) or "?"
        return [*asked, {"role": "assistant", "content": text}]


def demonstrations(
    config: RunConfig, folder: Path, corrupt: float, seed: str
) -> Iterator[dict[str, Any]]:
    "Yield the conversations of a run; those of its tenants in turns"
    several = list(config.of_tenants.values()) or [config]
    each = [Demonstrations(one, folder).records(corrupt, seed) for one in several]
    return chain.from_iterable(zip(*each, strict=True))


def train(
    folder: str, data: Path, steps: int, pictures: bool, root: Path, **optim: Any
) -> str:
    "The Hugging Face folder after an SFT run on a file of conversations"
    overrides = {
        "data.apply_chat_template": False,
        "data.image_key": "images" if pictures else None,
        "data.eval_prompts": 0,
        "rollout.eval_every": 0,
        "sampling.max_response_tokens": 80,
        "placement.devices": 1,
        "parallel.tensor": 1,
        "train.micro_batch_tokens": 8192,
        "train.save_every": 0,
        "output.root": str(root),
        "output.name": data.stem,
        **{f"optim.{name}": value for name, value in optim.items()},
    }
    config = qwen3_4b_sft(
        model=folder,
        prompt_data=str(data),
        num_steps=steps,
        prompts_per_step=BATCH,
        overrides=overrides,
    )
    with session(config) as run:
        for _ in run.steps():
            pass
    return str(run.folder / "checkpoints" / f"step_{steps:06d}" / "hf")


def make(name: str, root: Path) -> bytes:
    "The safetensors file of a model, made in the folder `root`"
    made = MODELS[name]
    config = made.config()
    pictures = reads_pictures(config)
    (root / "drawings").mkdir()
    folder = tiny_folder(config.model.tiny, pictures=pictures)
    clean = {"schedule": "linear", "learning_rate": made.learning_rate, "warmup_steps": 20}
    noisy = {
        "schedule": "constant",
        "learning_rate": NOISY_LEARNING_RATE,
        "warmup_steps": 0,
    }
    for stage, steps, corrupt, optim in (
        ("clean", made.steps, 0.0, clean),
        ("noisy", made.noisy_steps, made.corrupt, noisy),
    ):
        if not steps:
            continue
        data = root / f"{stage}.jsonl"
        shown = islice(
            demonstrations(config, root / "drawings", corrupt, stage), steps * BATCH
        )
        if not pictures:
            shown = ({"messages": record["messages"]} for record in shown)
        data.write_text("".join(json.dumps(record) + "\n" for record in shown))
        folder = train(folder, data, steps, pictures, root, **optim)
    weights = load_file(Path(folder) / "model.safetensors")
    return save({key: weights[key].bfloat16().contiguous() for key in sorted(weights)})


def accuracy(name: str, weights: bytes, root: Path) -> float:
    "The sampled held-out accuracy of a model before the first step of its recipe"
    made = MODELS[name]
    config = made.config()
    pictures = reads_pictures(config)
    folder = tiny_folder(config.model.tiny, weights, pictures=pictures)
    place = {"output.root": str(root), "output.name": "recipe"}
    # with the settings of the tiny model: `model=folder` would take those of a real one
    config = override(made.config(num_steps=1, overrides=place), {"model.path": folder})
    with session(config) as run:
        first = next(run.driver.steps())  # the evaluation before the first step
    return round(first["eval_accuracy"], 3)


def remake(name: str) -> tuple[bytes, float]:
    "The file of a model that is made again, and its accuracy"
    with tempfile.TemporaryDirectory() as folder:
        weights = make(name, Path(folder))
        return weights, accuracy(name, weights, Path(folder))


def write(name: str) -> None:
    "Make a model and put it into the package"
    weights, reached = remake(name)
    SHIPPED.mkdir(exist_ok=True)
    (SHIPPED / f"{name}.safetensors").write_bytes(weights)
    file = SHIPPED / "manifest.json"
    manifest = json.loads(file.read_text()) if file.exists() else {"models": {}}
    packages = ("torch", "transformers", "megatron-core", "mcore-bridge")
    manifest["command"] = "make tiny-models"
    skills = needed_skills(MODELS[name].config())
    manifest["models"][name] = {
        **skills | {"tasks": dict(skills["tasks"])},
        "sha256": hashlib.sha256(weights).hexdigest(),
        "accuracy": reached,
        "made": asdict(MODELS[name]),
        "versions": {package: version(package) for package in packages},
    }
    models = manifest["models"]
    manifest["models"] = {key: models[key] for key in MODELS if key in models}
    file.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    print(f"{name}: accuracy {reached}, {len(weights)} bytes", flush=True)


def check(name: str) -> int:
    "Make a model again and compare its accuracy with that of the shipped one; 1: they differ"
    _, reached = remake(name)
    recorded = shipped_models()[name].accuracy
    print(f"{name}: accuracy {reached}, the shipped one has {recorded}")
    return int(abs(reached - recorded) > WITHIN)


def main() -> int:
    "Make models, or check one"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="models; none: all")
    parser.add_argument("--check", metavar="NAME", choices=MODELS)
    args = parser.parse_args()
    if args.check:
        return check(args.check)
    for name in args.names or MODELS:
        write(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
