"""The recipes carry the outputs of a recorded run: `make record` (RECIPE=name records one).

Runs each recipe at its defaults, and commits of its outputs what is the same on every machine: no stderr,
no paths, no times of day. `faults(recipe)` says why a recorded recipe is not what it claims to be.
`python -m recorded --tables` runs nothing and renders the tables of settings again.
"""

import hashlib
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat

from cookbook_npu.config import REMOVED_KEYS, RunConfig, key_table
from cookbook_npu.recipes import RECIPES, Expected
from cookbook_npu.runs.folder import RunFolder, start_time
from cookbook_npu.runs.metrics import count_steps, load_metrics, metric_points
from cookbook_npu.runs.smoke import smoke_config
from cookbook_npu.terminal import counted

ROOT = Path(__file__).resolve().parents[2]
KEY = "recorded"  # in the metadata of a notebook
RESULTS = {
    "image/png",
    "text/html",
}  # types of outputs that show curves, answers or the result
MOST_BYTES = 400_000
# outputs that belong to one machine or one moment
UNWANTED = {
    "a path of a machine": re.compile(
        r"(?<![\w.:/])/(?:tmp|root|home|work|usr|opt|check)/"
    ),
    "a time of day": re.compile(r"\b\d\d:\d\d:\d\d\b"),
    "an address of an object": re.compile(r" at 0x[0-9a-f]{6,}"),
    "a frame, which no page but JupyterLab shows": re.compile("<iframe"),
    "a script": re.compile("<script"),
}


def code_sources(notebook: dict[str, Any]) -> list[str]:
    "The code of a notebook, but of what papermill put in"
    return [
        "".join(cell["source"])
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
        and "injected-parameters" not in cell["metadata"].get("tags", ())
    ]


def digest(value: Any) -> str:
    "A short checksum of JSON-able values"
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def settings(config: RunConfig) -> dict[str, Any]:
    "The configuration of a run without its place, as in JSON"
    flat = dict(config.flat())
    places = ("output.", "code_folder")
    found = {key: flat[key] for key in flat if not key.startswith(places)}
    return json.loads(json.dumps(found))


def changed_settings(recorded: dict[str, Any], now: dict[str, Any]) -> list[str]:
    "Keys with another value than in the recorded run; a new key may have its default"
    unset = json.loads(json.dumps({k: v.default for k, v in key_table().items()}))
    removed = recorded.keys() - key_table().keys() - REMOVED_KEYS.keys()
    return [
        key
        for key in sorted(now.keys() | removed)
        if now.get(key, "removed") != recorded.get(key, unset.get(key))
    ]


def where(run: RunFolder) -> str:
    "A sentence about the machine and the versions of a run"
    config, stack = run.config(), run.stack()
    device = stack["device"]
    names = ("torch", "torch_npu", "megatron-core", "transformers", "vllm")
    versions = [f"{n} {stack['packages'][n]}" for n in names if n in stack["packages"]]
    simulated = " (simulated: nothing measured here says anything about Ascend hardware)"
    return (
        f"Recorded run: scale {config.scale}, {config.num_steps} steps, seed {config.seed}, on "
        f"{device['count']} x {device['name']}{simulated if device['simulated'] else ''}; "
        f"{', '.join(versions)}."
    )


def label(run: RunFolder) -> str:
    "What the outputs of a recorded run say: a reader may have changed the parameters above them"
    day = time.strftime("%Y-%m-%d", time.gmtime(start_time(run.path)))
    steps = counted(count_steps(load_metrics(run.path)), "step")
    return f"recorded by the project, {day}, {steps}"


def shows_run(outputs: list[dict[str, Any]]) -> bool:
    "Whether a cell shows curves, answers or a result"
    return any(RESULTS & output.get("data", {}).keys() for output in outputs)


def labelled(outputs: list[dict[str, Any]], words: str) -> list[dict[str, Any]]:
    "The outputs of a cell, below a line with the label if they show something of a run"
    line = {
        "text/html": f"<em>{words}; running the cell replaces it</em>",
        "text/plain": words,
    }
    head = {"data": line, "metadata": {}, "output_type": "display_data"}
    return [head, *outputs] if shows_run(outputs) else outputs


LINKED = re.compile(r'<a href="runs/[^"]*"[^>]*>([^<]*)</a>')  # the run is not committed


def clean(output: dict[str, Any], root: Path) -> dict[str, Any] | None:
    "An output as it is committed; None: it is not"
    if output.get("name") == "stderr":
        return None
    output = json.loads(json.dumps(output).replace(f"{root}/", "runs/"))
    page = output.get("data", {}).get("text/html")
    if page is not None:
        output["data"]["text/html"] = LINKED.sub(r"\1", "".join(page))
    output["metadata"] = {} if "metadata" in output else None
    for name in [name for name, value in output.items() if value is None]:
        del output[name]
    if output["output_type"] == "execute_result":
        output["execution_count"] = None
    return output


def record(name: str) -> None:
    "Run a recipe at its defaults and put the outputs into its notebook"
    path = ROOT / "recipes" / f"{name}.ipynb"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        place = json.dumps({"output.root": str(root), "output.name": name})
        command = [sys.executable, "-m", "cookbook_npu.cli", "run", str(path)]
        subprocess.run([*command, "-p", f"overrides={place}"], cwd=ROOT, check=True)
        run = RunFolder.open(root / name)
        executed = json.loads(run.notebook.read_text(encoding="utf-8"))
        expected = RECIPES[name].expected["laptop"].metrics if name in RECIPES else {}
        metrics = load_metrics(run.path)
        measured = {
            metric: {
                str(step): dict(metric_points(metrics, metric))[step] for step in points
            }
            for metric, points in expected.items()
        }
        config = settings(run.config())
        ran, words = where(run), label(run)
        by_source = {
            "".join(cell["source"]): [
                kept for o in cell["outputs"] if (kept := clean(o, root)) is not None
            ]
            for cell in executed["cells"]
            if cell["cell_type"] == "code"
        }
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = labelled(by_source["".join(cell["source"])], words)
    notebook["metadata"][KEY] = {
        "sources": digest(code_sources(notebook)),
        "settings": config,
        "metrics": measured,
        "where": ran,
        "label": words,
    }
    path.write_text(as_written(notebook), encoding="utf-8")


# what JupyterLab writes of the kernel, with its version of Python
KERNEL: dict[str, Any] = {
    "kernelspec": {
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "name": "python3",
    },
    "language_info": {
        "codemirror_mode": {"name": "ipython", "version": 3},
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "nbconvert_exporter": "python",
        "pygments_lexer": "ipython3",
        "version": platform.python_version(),
    },
}


def whole_numbers(value: Any) -> Any:
    "A value as JavaScript writes it: 1.0 is 1"
    if isinstance(value, dict):
        return {key: whole_numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [whole_numbers(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def as_written(notebook: dict[str, Any]) -> str:
    "The text of a notebook as JupyterLab saves it, so that opening and saving it changes nothing"
    notebook = whole_numbers(notebook)
    notebook["metadata"] = (
        KERNEL | notebook["metadata"] | {"kernelspec": KERNEL["kernelspec"]}
    )
    return nbformat.writes(nbformat.from_dict(notebook), version=nbformat.NO_CONVERT) + "\n"


def unexpected(expected: Expected, recorded: dict[str, dict[str, float]]) -> list[str]:
    "Expected numbers of a recipe that its recorded run does not have"
    found = []
    for metric, points in expected.metrics.items():
        for step, value in points.items():
            measured = recorded.get(metric, {}).get(str(step))
            if measured is None or abs(measured - value) > expected.within:
                found.append(f"{metric} at step {step} is {measured}, expected {value}")
    return found


def settings_table(notebook: dict[str, Any]) -> dict[str, Any]:
    "The recorded output of the cell that shows the settings of each scale"
    outputs = [o for c in notebook["cells"] for o in c.get("outputs", [])]
    tables = [o["data"] for o in outputs if "text/markdown" in o.get("data", {})]
    (table,) = [t for t in tables if "| key |" in "".join(t["text/markdown"])]
    return table


def render_tables() -> None:
    "Replace the tables of settings by those of the recipes as they are"
    for name, recipe in RECIPES.items():
        path = ROOT / "recipes" / f"{name}.ipynb"
        notebook = json.loads(path.read_text(encoding="utf-8"))
        table = settings_table(notebook)
        table["text/markdown"] = recipe._repr_markdown_().splitlines(keepends=True)
        table["text/plain"] = repr(recipe).splitlines(keepends=True)
        path.write_text(as_written(notebook), encoding="utf-8")


def faults(path: Path) -> list[str]:
    "Why the outputs of a recipe are not those of a recorded run of this recipe; empty: they are"
    notebook = nbformat.reads(path.read_text(encoding="utf-8"), nbformat.NO_CONVERT)
    recorded = notebook["metadata"].get(KEY)
    if recorded is None:
        return ["it has no recorded run"]
    found = []
    if recorded["sources"] != digest(code_sources(notebook)):
        found.append("its code has changed since it was recorded")
    config = RECIPES[path.stem]() if path.stem in RECIPES else smoke_config("tp")
    if changed := changed_settings(recorded["settings"], settings(config)):
        found.append(f"{', '.join(changed)} changed since it was recorded")
    if path.stem in RECIPES:
        recipe = RECIPES[path.stem]
        found += unexpected(recipe.expected["laptop"], recorded["metrics"])
        if "".join(settings_table(notebook)["text/markdown"]) != recipe._repr_markdown_():
            found.append("its table of settings is an earlier one (recorded --tables)")
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    if silent := [
        c for c in cells if not c["outputs"] and "display" in "".join(c["source"])
    ]:
        found.append(f"{len(silent)} cells show nothing")
    outputs = json.dumps([cell["outputs"] for cell in cells], ensure_ascii=False)
    # a notebook that was recorded before has none
    words = recorded.get("label", "")
    shown = [c["outputs"] for c in cells if shows_run(c["outputs"])]
    if words and (bare := sum(o != labelled(o[1:], words) for o in shown)):
        found.append(f"{bare} cells do not say {words!r}")
    found += [
        f"its outputs have {what}"
        for what, sign in UNWANTED.items()
        if sign.search(outputs)
    ]
    size = path.stat().st_size
    if size > MOST_BYTES:
        found.append(f"it has {size} bytes, at most {MOST_BYTES}")
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["--tables"]:
        render_tables()
        sys.exit()
    for wanted in sys.argv[1:] or [*RECIPES, "smoke"]:
        record(wanted)
        for fault in faults(ROOT / "recipes" / f"{wanted}.ipynb"):
            print(f"{wanted}: {fault}")
