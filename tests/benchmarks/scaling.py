"""How the cost of a step grows: with prompts, response length, model size and devices.

    python tests/benchmarks/scaling.py [--axes prompts response hidden devices] [--figure scaling.svg]

One axis at a time, the others at their smallest. For prompts, response length and model size every point
is a fresh process that holds the driver and all its workers (see `grpo_step.py`; a random Qwen3 without
an end token, so all responses have the same length): processor time of each phase, of what is left of the
step (the driver), and of a checkpoint, on one thread. For devices it is a run with its processes under Ray:
processor time of driver, trainer and engines, all their processes together, whose sum is what more devices
cost. Medians over steps, after the first two.

The exponent of a row is the slope of its line in the figure: time ~ size ** exponent. 0: a fixed cost;
1: proportional. For model size the abscissa is bytes of weights. Simulated NPUs: nothing here says
anything about Ascend hardware, except that the driver is the same there. That memory stays flat over
200 steps is what `soak.py` measures.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from options import option_parser

SAMPLES = 8  # of a prompt
BASE = {"prompts": 8, "response": 16, "hidden": 64, "devices": 1}
AXES = {
    "prompts": (2, 8, 32),
    "response": (16, 64, 256),
    "hidden": (64, 192, 576),
    "devices": (1, 2, 4),
}
UNITS = {
    "prompts": "prompts of 8 samples",
    "response": "tokens of a response",
    "hidden": "MB of weights",
    "devices": "simulated NPUs",
}
LAYERS = 4
WARM = 2  # steps that are not counted
Point = dict[str, Any]  # of an axis: what it measured, in ms, by row
Task = dict[str, Any]


def prompt_texts(count: int) -> list[str]:
    "Any prompts"
    return [f"{37 * i % 113}+{53 * i % 97}=" for i in range(1, count + 1)]


# ---- one point, in a process of its own


def in_one_process(task: Task) -> Point:
    "Phases of the driver's own step, all workers in this process"
    import grpo_step

    grpo_step.PROMPTS = task["at"]["prompts"]
    grpo_step.SAMPLES = SAMPLES
    steps = WARM + task["steps"]
    driver = grpo_step.start_ours(
        {
            "folder": task["folder"],
            "output": task["output"],
            "tokens": task["at"]["response"],
            "steps": steps + 1,
            "device": "npu",
            "prompts": prompt_texts(task["at"]["prompts"] * steps),
        }
    )
    from cookbook_npu.runs.metrics import TIME_PREFIX

    rows = defaultdict(list)
    for step in range(steps):
        began = time.process_time()
        driver.step(step)
        whole = time.process_time() - began
        spans = driver.state.tracker.spans.take()
        phases = {name.removeprefix(TIME_PREFIX): t for name, t in spans.items()}
        if step < WARM:
            continue
        rows["step"].append(whole)
        for name in ("rollout", "actor_train", "update_weights"):
            rows[name].append(phases[name])
        rows["sleep, wake"].append(phases["sleep"] + phases["wake_up"])
        rows["driver"].append(whole - sum(phases.values()))
    rows["checkpoint"] = checkpoints(driver, Path(task["output"]))
    weights = driver.state.trainer.workers[0].model.weight_bytes
    return {"weights": weights} | middle(rows)


def checkpoints(driver: Any, folder: Path) -> list[float]:
    "Processor time of some checkpoints, written to the end"
    trainer = driver.state.trainer
    driver.placement.restarts.sleep_engines()
    trainer.call("wake")
    found = []
    for number in range(WARM + 2):
        target = folder / f"checkpoint_{number}"
        target.mkdir(parents=True)
        began = time.process_time()
        trainer.call("save_state", str(target))
        trainer.call("finish_state")
        found.append(time.process_time() - began)
    return found[WARM:]


def on_devices(task: Task) -> Point:
    "Processor time of the processes of a run, by role"
    import psutil

    from cookbook_npu.recipes import qwen3_4b_colocate
    from cookbook_npu.train.session import session

    overrides = {
        "output.root": task["output"],
        "placement.devices": task["at"]["devices"],
        "parallel.tensor": 1,
        "sampling.max_response_tokens": task["at"]["response"],
        "rollout.eval_every": 0,
    }
    config = qwen3_4b_colocate(
        model=task["folder"],
        prompts_per_step=task["at"]["prompts"],
        samples_per_prompt=SAMPLES,
        num_steps=WARM + task["steps"],
        overrides=overrides,
    )
    rows = defaultdict(list)
    with session(config) as run:
        processes = {"driver": [psutil.Process()]}
        for group in run.state.workers.cluster.worker_groups:
            role = "engines" if group.name.startswith("rollout") else group.name
            found = [psutil.Process(pid) for pid in group.pids]
            processes[role] = processes.get(role, []) + found
        before = used(processes)
        for step, _ in enumerate(run.steps()):
            after = used(processes)
            # the last step also saves
            if WARM <= step < WARM + task["steps"] - 1 or task["steps"] == 1:
                for role, seconds in after.items():
                    rows[role].append(seconds - before[role])
                rows["step"].append(sum(after.values()) - sum(before.values()))
            before = after
    return middle(rows)


def used(processes: dict[str, list]) -> dict[str, float]:
    "Processor time so far, by role"
    times = {role: [p.cpu_times() for p in own] for role, own in processes.items()}
    return {role: sum(t.user + t.system for t in own) for role, own in times.items()}


def middle(rows: dict[str, list[float]]) -> Point:
    "Medians, ms"
    return {name: 1e3 * statistics.median(values) for name, values in rows.items()}


def work(task_file: Path, result_file: Path) -> None:
    "Measure one point in this process"
    task = json.loads(task_file.read_text())
    measure = on_devices if task["axis"] == "devices" else in_one_process
    result_file.write_text(json.dumps(measure(task)))


# ---- all points


def measured(axis: str, value: int, steps: int, folder: Path) -> Point:
    "One point of an axis, measured in a fresh process"
    import grpo_step

    at = BASE | {axis: value}
    size = {"layers": LAYERS, "hidden": at["hidden"], "tokens": at["response"]}
    own = Path(tempfile.mkdtemp(dir=folder))
    task = {"axis": axis, "at": at, "steps": steps, "output": str(own / "output")}
    Path(task["output"]).mkdir()
    task["folder"] = str(grpo_step.build(size, own / "model"))
    (own / "task.json").write_text(json.dumps(task))
    env = os.environ | {
        "COOKBOOK_NPU_SIMULATE": "1",
        "COOKBOOK_NPU_SIM_DEVICES": str(at["devices"]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
    }
    files = [str(own / "task.json"), str(own / "result.json")]
    command = [sys.executable, __file__, "--work", *files]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{axis} {value} failed:\n{done.stdout[-500:]}{done.stderr[-3000:]}"
        )
    point = json.loads((own / "result.json").read_text())
    size = point.pop("weights", 0) / 1e6 if axis == "hidden" else value
    return {"size": size} | {k: v for k, v in point.items() if k != "weights"}


def exponent(points: list[Point], row: str) -> float:
    "Slope of the line through the points, both axes logarithmic"
    import numpy as np

    sizes, times = ([p[name] for p in points] for name in ("size", row))
    return float(np.polyfit(np.log(sizes), np.log(times), 1)[0])


def show(axis: str, points: list[Point]) -> None:
    "The table of an axis"
    sizes = [f"{p['size']:9.4g}" for p in points]
    print(f"\n{UNITS[axis]:22}", *sizes, " exponent", flush=True)
    for row in points[0]:
        if row != "size":
            times = [f"{p[row]:9.3g}" for p in points]
            slope = f"{exponent(points, row):9.2f}" if len(points) > 1 else ""
            print(f"{row + ', ms':22}", *times, slope, flush=True)


def draw(found: dict[str, list[Point]], path: Path) -> None:
    "All axes in one figure"
    import matplotlib.pyplot as plt

    from cookbook_npu.runs.plots import COLOURS, INK

    plt.rcParams |= {
        "svg.fonttype": "none",
        "font.size": 8,
        "text.color": INK,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
    }
    columns = min(2, len(found))
    lines = -(-len(found) // columns)
    figure, panels = plt.subplots(
        lines, columns, figsize=(3.9 * columns, 2.7 * lines), squeeze=False
    )
    for panel in panels.flat[len(found) :]:
        panel.set_visible(False)
    for panel, (axis, points) in zip(panels.flat, found.items(), strict=False):
        sizes = [p["size"] for p in points]
        rows = [row for row in points[0] if row != "size"]
        for row, colour in zip(rows, COLOURS, strict=False):
            slope = f": {exponent(points, row):.2f}" if len(points) > 1 else ""
            label = row + slope
            times = [p[row] for p in points]
            panel.loglog(sizes, times, "o-", color=colour, markersize=3, label=label)
        panel.set(xlabel=UNITS[axis], ylabel="ms of processor time")
        # the sizes that were measured, and no others
        panel.set_xticks(sizes, [f"{size:.3g}" for size in sizes])
        panel.minorticks_off()
        panel.legend(
            frameon=False,
            fontsize=7,
            title="exponent",
            title_fontsize=7,
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
        )
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, transparent=True)
    print(f"\n{path}")


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--points", type=int, default=3, help="of each axis (default: 3)")
    parser.add_argument("--steps", type=int, default=5, help="counted steps of a point")
    parser.add_argument("--figure", type=Path, help="where to draw the lines (.svg, .png)")
    parser.add_argument("--work", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(*args.work)
    found: dict[str, list[Point]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for axis in args.axes:
            values = AXES[axis][: args.points]
            found[axis] = [measured(axis, v, args.steps, Path(folder)) for v in values]
            show(axis, found[axis])
    if args.figure:
        draw(found, args.figure)


if __name__ == "__main__":
    main()
