"""A whole GRPO step of this library on the simulated NPU against TRL's GRPOTrainer on plain CPU PyTorch.

    pip install trl==1.16.0
    python tests/benchmarks/grpo_step.py [--sizes S M] [--repeats 7] [--steps 10]
    python tests/benchmarks/grpo_step.py --device cuda --sizes 0.6B    # both sides on a GPU
    python tests/benchmarks/grpo_step.py --sizes SmolLM2 --equal [--lora 16] [--dtype bfloat16] [--no-levers]

Both sides start from the same folder (a tiny random Qwen3), in float32, on one thread, and take the same
step: 4 x 8 responses of a fixed number of tokens, temperature 1, the same reward, advantages centred by
group and not divided by the standard deviation (each adds another constant to it), clip 0.2/0.28, sequence
mean, no KL term, gradient norm clipped at 1, AdamW with the same rates, no logging. Ours is the driver's
`step` in one process with every phase of a run; TRL shares its weights between trainer and generator, and
skips the log-prob pass.

The gate comes first: one rollout of ours goes through both sides, and through TRL in float64, which shows
what float32 costs TRL itself. Our gradient must differ from that of float64 by less than 1e-6 of its norm
or than twice TRL's own, the weights after one AdamW step by less than twice TRL's. No timing otherwise.

Then both run in turns, each time in a fresh process: medians over steps and repeats, their spread, by
processor time (the figure to trust on a busy machine; on a GPU the clock); the ratio TRL / ours; phases;
start; memory.
"""

import argparse
import importlib.metadata
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from options import option_parser

TRL = "1.16.0"
PROMPTS, SAMPLES, RATE = 4, 8, 1e-3
CHAT = """<|im_start|>system
Reply with a number.<|im_end|>
<|im_start|>user
{}<|im_end|>
<|im_start|>assistant
"""
SIZES = {
    "S": {"layers": 2, "hidden": 64, "tokens": 32},
    "M": {"layers": 4, "hidden": 256, "tokens": 128},
    "L256": {"layers": 8, "hidden": 384, "tokens": 256},  # 14 million weights
    "L1024": {"layers": 8, "hidden": 384, "tokens": 1024},
    "SmolLM2": {"layers": 30, "hidden": 576, "tokens": 12},  # the pretrained model
    "0.6B": {"layers": 28, "hidden": 1024, "tokens": 256},  # of Qwen3, for --device cuda
}
SHAPE_06B = dict(
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=151936
)
# what the gate lets pass: a relative difference, or a multiple of float32's own
GRADIENT = 1e-6
ROUNDING = 2.0
Task = dict[str, Any]


def reward(ids: list[int]) -> float:
    """Any function of the response will do; this one differs within every group.

    Over a power of two: TRL keeps rewards in float32, and those of long responses are nearly equal, so
    that another number's rounding would be seen in the advantages."""
    return sum(i % 10 for i in ids) / (1 << (9 * len(ids)).bit_length())


def rewards(responses: list[list[int]], task: Task) -> list[float]:
    "The rewards of a rollout; with `equal` every second group has one reward, as half of a real model's do"
    same = [task["equal"] and i // SAMPLES % 2 for i in range(len(responses))]
    return [1.0 if one else reward(ids) for one, ids in zip(same, responses, strict=True)]


def used() -> dict[str, float]:
    "Time and memory that this process has taken so far"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"cpu": time.process_time(), "clock": time.perf_counter(), "peak": peak}


# ---- ours


class Prompts:
    "The same prompts in the same order as the other side"

    def __init__(self, task: Task):
        from transformers import AutoTokenizer

        from cookbook_npu.data.messages import TurnEnd
        from cookbook_npu.data.sample import Prompt

        tokenizer = AutoTokenizer.from_pretrained(task["folder"])
        self.turn_end = TurnEnd()
        self.at = 0
        self.all = [
            Prompt(prompt_id=str(i), ids=tokenizer(text)["input_ids"], text=text)
            for i, text in enumerate(task["prompts"])
        ]

    def next_draws(self, count: int) -> list:
        from cookbook_npu.data.prompts import Draw

        self.at += count
        return [Draw(n, self.all[n]) for n in range(self.at - count, self.at)]

    def end_draw(self, number: int, outcome: str) -> None:
        "Nothing is resumed here"

    def state(self) -> dict[str, Any]:
        return {}


class Rewards:
    def __init__(self, task: Task) -> None:
        self.task = task
        from cookbook_npu.data.rewards import Counts, FailingLabels

        self.counts = Counts()
        self.labels = FailingLabels()

    def grade(self, samples: list) -> list[Any]:
        from cookbook_npu.data.rewards import Grade

        found = rewards([s.response_ids for s in samples], self.task)
        return [Grade(value, value > 0) for value in found]

    def take_reports(self) -> list:
        return []


def start_ours(task: Task, old_logprobs: str = "rollout") -> Any:
    "The driver of a run, all workers in this process, engines awake with the first weights"
    import torch
    from torch.utils import _device

    # cached here, before names of torch are redirected: transformers needs the originals
    _device._device_constructors()
    from cookbook_npu.npu.shims.bootstrap import bootstrap

    bootstrap("trainer")
    torch.set_num_threads(1)
    if task.get("mkl"):
        torch.backends.mkldnn.set_flags(False)
    from cookbook_npu.cluster.worker_group import LocalWorkerGroup
    from cookbook_npu.config import override
    from cookbook_npu.recipes import qwen3_4b_colocate
    from cookbook_npu.runs.folder import RunFolder
    from cookbook_npu.runs.metrics import SpanLog, Tracker
    from cookbook_npu.train.driver import Driver
    from cookbook_npu.train.rollout_worker import Engines, RolloutWorker
    from cookbook_npu.train.trainer import ModelPasses, Trainer
    from cookbook_npu.train.workers import DriverState, Workers

    longest = max(map(len, task["prompts"])) + task["tokens"]
    overrides = {
        "parallel.tensor": 1,
        "placement.devices": 1,
        "sampling.max_response_tokens": task["tokens"],
        "rollout.batch_size": PROMPTS * SAMPLES,  # in one batch, as TRL's
        "algorithm.use_reference": False,
        "model.fused_kernels": True,
        "algorithm.normalize_std": False,
        "optim.beta2": 0.999,
        "train.micro_batch_tokens": PROMPTS * SAMPLES * longest,
        "output.save_samples": False,
        # trainer and engine share a process
        "rollout.engine": "transformers",
        "lora.rank": task["lora"],
        "model.dtype": task["dtype"],
        "placement.simulated_memory_bytes": 16 << 30,
        # without it a row without an advantage is needed for its old log-probs
        "algorithm.old_logprob_source": old_logprobs if task["levers"] else "trainer",
    }
    if not task["levers"]:
        ModelPasses.shares_prompts = False
    config = qwen3_4b_colocate(
        scale="cuda" if task["device"] == "cuda" else "laptop",
        model=task["folder"],
        prompts_per_step=PROMPTS,
        samples_per_prompt=SAMPLES,
        learning_rate=RATE,
        num_steps=task["steps"] + 1,  # the last step of a run also saves
        overrides=overrides,
    )
    kwargs = {"config": config, "hf_path": task["folder"]}
    trainer = LocalWorkerGroup.create("trainer", Trainer, kwargs=kwargs)
    kwargs["load_weights"] = not task["lora"]  # the first update sends an adapter
    engine = LocalWorkerGroup.create("rollout", RolloutWorker, kwargs=kwargs)
    engine.call(RolloutWorker.sleep)
    workers = Workers(None, config, task["folder"], trainer, Engines([engine]))
    tracker = Tracker(span_log=SpanLog(clock=time.process_time))
    root = tempfile.mkdtemp(dir=Path(task["output"]).parent)
    folder = RunFolder.create(override(config, {"output.root": root}))
    state = DriverState(config, workers, Prompts(task), [], Rewards(task), folder, tracker)
    driver = Driver(state)
    driver.placement.send_first_weights()  # there is nothing to resume
    return driver


def time_ours(task: Task) -> dict[str, Any]:
    from cookbook_npu.runs.metrics import TIME_PREFIX

    driver = start_ours(task)
    marks = [used()]
    phases = []
    for step in range(task["steps"]):
        row = driver.step(step)
        times = driver.state.tracker.spans.take()
        phases.append({name.removeprefix(TIME_PREFIX): t for name, t in times.items()})
        marks.append(used())
        if row["response_length_mean"] != task["tokens"]:
            raise SystemExit(f"ours: {row['response_length_mean']} tokens on average")
    return {"marks": marks, "phases": phases}


def gate_ours(task: Task) -> dict[str, Any]:
    "One rollout, its gradient and the weights after one step, under Hugging Face names"
    import torch

    from cookbook_npu.model.megatron import export_weights
    from cookbook_npu.train.batch import make_batch
    from cookbook_npu.train.train_step import merge_sequences
    from cookbook_npu.train.trainer import Trainer

    # the ratio of TRL's step is 1; against the engine's log-probs it is 1 up to their rounding
    driver = start_ours(task, old_logprobs="trainer")
    state = driver.state
    config = state.config
    trainer = state.trainer.workers[0]
    prompts = [draw.prompt for draw in state.prompts.next_draws(PROMPTS)]
    samples = driver.placement.sampler.generate(prompts, SAMPLES, step=0)
    driver.placement.restarts.sleep_engines()
    state.trainer.call(Trainer.wake)
    batch = make_batch(
        samples, SAMPLES, config.algorithm, config.global_batch_size, task["tokens"]
    )
    # no old log-probs, as in the steps that are timed: they are those of the forward pass itself
    trainer.forward_backward(batch, batch.optimizer_steps[0])
    logprobs = merge_sequences(state.trainer.call(Trainer.trained_logprobs), len(batch))
    weights = {p: p.detach().clone() for p in trainer.model.module.parameters()}

    def exported() -> dict[str, Any]:
        return {n: t.detach().cpu().clone() for n, t in export_weights(trainer.model)}

    # gradients travel through the export as if they were weights: it only cuts and renames
    with torch.no_grad():
        for p in weights:
            p.copy_(p.main_grad)
        gradient = exported()
        for p, value in weights.items():
            p.copy_(value)
    norm = trainer.optim_step()["grad_norm"]
    pairs = zip((s.logprobs for s in samples), logprobs, strict=True)
    difference = max(
        abs(a - b) for own, row in pairs for a, b in zip(own, row, strict=True)
    )
    return {
        "tokens": [{"prompt": s.prompt_ids, "response": s.response_ids} for s in samples],
        "gradient": gradient,
        "weights": exported(),
        "norm": norm,
        "logprobs": float(difference),
    }


# ---- TRL

NO_TOKEN = 10**6  # ends a response, and is none of the model's


def start_trl(task: Task, steps: int) -> Any:
    import torch

    torch.set_num_threads(1)
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        output_dir=task["output"],
        max_steps=steps,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        gradient_accumulation_steps=1,
        num_generations=SAMPLES,
        max_completion_length=task["tokens"],
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="grpo",  # mean over the tokens of a sequence, then over sequences
        scale_rewards="none",
        shuffle_dataset=False,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=False,
        use_cpu=task["device"] != "cuda",
        gradient_checkpointing=False,
        # none would become the tokenizer's end token when training begins
        generation_kwargs={"eos_token_id": NO_TOKEN},
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    score = lambda completion_ids, **_: rewards(completion_ids, task)  # noqa: E731
    score.__name__ = "reward"
    data = Dataset.from_dict({"prompt": task["prompts"]})
    model = AutoModelForCausalLM.from_pretrained(
        task["folder"], dtype=getattr(torch, task["dtype"])
    )
    targets = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    rank = task["lora"]
    adapter = LoraConfig(r=rank, lora_alpha=2 * rank, **targets) if rank else None
    trainer = GRPOTrainer(
        model, reward_funcs=score, args=args, train_dataset=data, peft_config=adapter
    )
    trainer.eos_token_ids = [NO_TOKEN]
    return trainer


def time_trl(task: Task) -> dict[str, Any]:
    from transformers import TrainerCallback

    trainer = start_trl(task, task["steps"])
    marks, phases, generate = [], [], trainer._generate_single_turn

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        found = generate(*args, **kwargs)
        phases.append({"rollout": time.process_time() - began})
        if (lengths := {len(ids) for ids in found[0]}) != {task["tokens"]}:
            raise SystemExit(f"TRL: responses of {sorted(lengths)} tokens")
        return found

    class Marks(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            marks.append(used())

        on_step_end = on_train_begin

    trainer._generate_single_turn = timed
    trainer.add_callback(Marks())
    trainer.train()
    return {"marks": marks, "phases": phases}


def gate_trl(task: Task) -> dict[str, Any]:
    "Gradient and weights of the given rollout: everything of TRL's step but the sampling"
    from transformers import TrainerCallback

    trainer, gradient, prompts = start_trl(task, 1), {}, []

    def given(
        prompt_ids: list[list[int]], *_: Any, **__: Any
    ) -> tuple[list[list[int]], None]:
        prompts.extend(prompt_ids)
        return [row["response"] for row in task["tokens_given"]], None

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            gradient.update(
                {n: p.grad.cpu().clone() for n, p in trainer.model.named_parameters()}
            )

    trainer._generate_single_turn = given
    trainer.add_callback(Keep())
    trainer.train()
    if prompts != [row["prompt"] for row in task["tokens_given"]]:
        raise SystemExit("TRL: other prompts than ours")
    weights = {n: p.detach().cpu().clone() for n, p in trainer.model.named_parameters()}
    return {"gradient": gradient, "weights": weights}


# ---- the driver

WORK = {"ours": (time_ours, gate_ours), "trl": (time_trl, gate_trl)}


def work(name: str, task_file: Path, result_file: Path) -> None:
    "One side in its own process"
    import torch

    from cookbook_npu.npu.shims.torchvision_ops import install_finder

    install_finder()  # TRL imports torchvision
    kind, side = name.split("-")
    task = json.loads(task_file.read_text())
    torch.save(WORK[side][kind == "gate"](task), result_file)


def in_process(name: str, task: Task, folder: Path) -> dict[str, Any]:
    "Run one side in a fresh process and read what it found"
    import torch

    (folder / "task.json").write_text(json.dumps(task))
    env = {k: v for k, v in os.environ.items() if not k.startswith("COOKBOOK_NPU_SIM")}
    if name.endswith("ours") and task["device"] == "npu":
        env |= {"COOKBOOK_NPU_SIMULATE": "1", "COOKBOOK_NPU_SIM_DEVICES": "1"}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    env["TOKENIZERS_PARALLELISM"] = "false"
    files = [str(folder / file) for file in ("task.json", "result.pt")]
    command = [sys.executable, __file__, "--work", name, *files]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return torch.load(folder / "result.pt", weights_only=False)


def distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    "Norm of the difference over the norm of b, all tensors as one vector"
    apart = sum(float((a[n].double() - t.double()).square().sum()) for n, t in b.items())
    return (apart / sum(float(t.double().square().sum()) for t in b.values())) ** 0.5


def gate(task: Task, folder: Path) -> None:
    "Both sides make the same of one rollout, or nothing is timed"
    ours = in_process("gate-ours", task, folder)
    given = task | {"tokens_given": ours["tokens"]}
    theirs, exact = (
        in_process("gate-trl", given | {"dtype": t}, folder) for t in ("float32", "float64")
    )
    scale = max(1.0, ours["norm"])  # TRL's gradient is seen after clipping at 1
    gradient = {n: g / scale for n, g in ours["gradient"].items()}
    if missing := theirs["gradient"].keys() - gradient.keys():
        raise SystemExit(f"gate: ours has no gradient of {sorted(missing)[0]}")
    found, cost = (distance(g, exact["gradient"]) for g in (gradient, theirs["gradient"]))
    step, step_cost = (distance(w["weights"], exact["weights"]) for w in (ours, theirs))
    print(
        f"  gate: against TRL in float64 the gradient differs by {found:.1e} of its norm, "
        f"TRL's by {cost:.1e}\n"
        f"        the weights after a step differ by {step:.1e}, TRL's by {step_cost:.1e}\n"
        f"        log-probs of our engine and our trainer differ by {ours['logprobs']:.1e}",
        flush=True,
    )
    if not (found < max(GRADIENT, ROUNDING * cost) and step < ROUNDING * step_cost):
        raise SystemExit(
            "gate: the two sides do not take the same step: nothing to compare"
        )


def summary(result: dict[str, Any], warm: int) -> dict[str, Any]:
    "Median step of one run, without the first steps"
    marks, phases = result["marks"], result["phases"][warm:]
    steps = list(zip(marks[:-1], marks[1:], strict=True))[warm:]
    middle: dict[str, Any] = {
        kind: statistics.median(b[kind] - a[kind] for a, b in steps)
        for kind in ("cpu", "clock")
    }
    middle["phases"] = {
        n: statistics.median(p.get(n, 0.0) for p in phases) for n in phases[-1]
    }
    return middle | {"start": marks[1]["cpu"], "peak": marks[-1]["peak"]}


def show(runs: dict[str, list[dict[str, Any]]]) -> None:
    def over(side: str, kind: str) -> list[float]:
        return [run[kind] for run in runs[side]]

    def middle(side: str, kind: str) -> float:
        return statistics.median(over(side, kind))

    for kind, label in (("cpu", "processor time"), ("clock", "clock")):
        for side in runs:
            found = over(side, kind)
            print(
                f"  {label:14s} {side:5s} {middle(side, kind) * 1e3:8.1f} ms a step"
                f"   ({min(found) * 1e3:.1f} to {max(found) * 1e3:.1f} over {len(found)} runs)"
            )
        pairs = [b / a for a, b in zip(over("ours", kind), over("TRL", kind), strict=True)]
        ratio = middle("TRL", kind) / middle("ours", kind)
        spread = f"(pairs {min(pairs):.2f} to {max(pairs):.2f})"
        print(f"  {label:14s} TRL / ours {ratio:.2f}   {spread}")
    for side, found in runs.items():
        names = found[0]["phases"]
        parts = {n: statistics.median(run["phases"][n] for run in found) for n in names}
        parts["rest"] = middle(side, "cpu") - sum(parts.values())
        shown = ", ".join(f"{n} {t * 1e3:.1f}" for n, t in parts.items())
        print(
            f"  phases {side:5s} (ms of processor time): {shown}\n"
            f"  {side:5s} start to first step done {middle(side, 'start'):.1f} s of processor "
            f"time, peak memory {middle(side, 'peak') / 2**20:.0f} MiB"
        )


def build(size: dict[str, Any], folder: Path) -> Path:
    "The tiny model without an end token, and without the padding token: transformers does not train that"
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from cookbook_npu.config import TinyConfig
    from cookbook_npu.data.datasets import packaged_model
    from cookbook_npu.data.tokenizer import build_tokenizer
    from cookbook_npu.model.tiny import hf_config, random_model

    logging.disable_progress_bar()
    if size is SIZES["SmolLM2"]:
        source = packaged_model("smollm2")
        tokenizer = AutoTokenizer.from_pretrained(source)
        tokenizer.eos_token = tokenizer.chat_template = None
        tokenizer.save_pretrained(folder)
        values = json.loads((source / "config.json").read_text())
        values |= {"eos_token_id": None, "pad_token_id": None}
        (folder / "config.json").write_text(json.dumps(values))
        (folder / "model.safetensors").symlink_to(source / "model.safetensors")
        return folder
    tokenizer = build_tokenizer()
    hidden = size["hidden"]
    tiny = TinyConfig(
        hidden_size=hidden, num_layers=size["layers"], ffn_size=3 * hidden, init_std=0.1
    )
    config = hf_config(tiny, tokenizer)
    config.eos_token_id = config.pad_token_id = None
    if size is SIZES["0.6B"]:
        for name, value in SHAPE_06B.items():
            setattr(config, name, value)
    random_model(config, 0).save_pretrained(folder)
    # the engine stops at the end tokens of tokenizer and chat template, too
    tokenizer.eos_token = tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return folder


def compare(size: str, args: argparse.Namespace, folder: Path) -> None:
    s, steps = SIZES[size], args.warm + args.steps
    chat = CHAT if size == "SmolLM2" else "{}"
    task = {
        "folder": str(build(s, folder / f"model_{size}")),
        "output": str(folder / "trl"),
        "tokens": s["tokens"],
        "steps": steps,
        "device": args.device,
        "mkl": args.mkl,
        "equal": args.equal,
        "lora": args.lora,
        "dtype": args.dtype,
        "levers": not args.no_levers,
        # equally long: TRL counts positions from the padding on the left, and the angles that
        # transformers rounds to float32 would be others than ours
        "prompts": [
            chat.format(f"{10 + 37 * i % 89}+{10 + 53 * i % 87}=")
            for i in range(1, PROMPTS * steps + 1)
        ],
    }
    print(
        f"{size}: {s['layers']} layers x {s['hidden']}, "
        f"{PROMPTS} prompts x {SAMPLES} samples x {s['tokens']} tokens",
        flush=True,
    )
    if args.dtype == "float32" and not args.lora:  # whose adapters begin with other values
        gate({**task, "equal": False}, folder)
    runs: dict[str, list] = {"ours": [], "TRL": []}
    for _ in range(args.repeats):
        for side in runs:
            runs[side].append(
                summary(in_process(f"time-{side.lower()}", task, folder), args.warm)
            )
    show(runs)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["S"])
    parser.add_argument("--repeats", type=int, default=7, help="processes of each side")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a process")
    parser.add_argument("--warm", type=int, default=3, help="steps before, not counted")
    parser.add_argument("--device", choices=["npu", "cuda"], default="npu")
    parser.add_argument(
        "--mkl", action="store_true", help="our matrix products are MKL's, too"
    )
    parser.add_argument(
        "--equal", action="store_true", help="one reward in every second group"
    )
    parser.add_argument("--lora", type=int, default=0, help="rank of an adapter")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--no-levers", action="store_true", help="ours computes each prompt and row again"
    )
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mkl and args.dtype == "bfloat16":
        parser.error("--mkl: PyTorch multiplies bfloat16 matrices with oneDNN, too")
    if args.work:
        return work(args.work[0], Path(args.work[1]), Path(args.work[2]))
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    if installed.get("trl") != TRL:
        sys.exit(f"trl is {installed.get('trl', 'not installed')}: pip install trl=={TRL}")
    places = "ours: simulated NPU (one device, TP 1); TRL: CPU"
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            sys.exit("--device cuda, and this machine has no GPU that torch can use")
        places = f"both on {torch.cuda.get_device_name()} (TP 1)"
    names = ("torch", "transformers", "megatron-core", "trl")
    versions = ", ".join(f"{name} {installed[name]}" for name in names)
    print(f"{places}. {args.dtype}, one thread. {versions}")
    with tempfile.TemporaryDirectory() as folder:
        for size in args.sizes:
            compare(size, args, Path(folder))


if __name__ == "__main__":
    main()
