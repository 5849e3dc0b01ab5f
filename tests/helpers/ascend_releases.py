"""What RL can use of each release of vllm-ascend, and what changed between two, from their files alone.

    python tests/helpers/ascend_releases.py                        writes nbs/tutorials/releases_910b.md
    python tests/helpers/ascend_releases.py 0.23.0 0.30.0rc2       prints the changes that concern RL

Files come from the wheel where the package index has one, else from the source distribution.
"""

import ast
import json
import re
import sys
from collections import defaultdict

from package_index import sources, wheels
from places import ROOT

TABLE = ROOT / "nbs/tutorials/releases_910b.md"
LANE = ROOT / "nbs/tutorials/lane_910b.json"
RELEASES = ("0.18.0", "0.23.0", "0.23.0.post1", "0.26.0rc1", "0.30.0rc2")
# area -> paths that concern it; the first that fits counts
AREAS = {
    "sleep": r"camem|sleep",
    "weight update": r"weight_transfer|model_loader/(?!rfork|netloader)",
    "LoRA": r"lora",
    "hybrid models": r"mamba|gdn|gated_delta|/fla/|qwen3_5|causal_conv",
    "sampling": r"sample/|sampler|logits_process",
    "graphs": r"acl_graph|compilation/",
    "rollout": r"worker/(worker|model_runner_v1|npu_input_batch)|ascend_config|envs|platform\.py",
}
IGNORED = re.compile(r"_310p|/v2/|xlite|_version|_build_info|_cann_ops|/passes/|glm5next")
CONFIG, WORKER = "ascend_config.py", "worker/worker.py"
Functions = dict[str, ast.AST]


class Release:
    "The Python files of one release"

    def __init__(self, version: str):
        self.version = version
        files = sources("vllm-ascend", version, ".py")
        self.root = next(files.rglob("vllm_ascend/__init__.py")).parent
        found = sorted(str(f.relative_to(self.root)) for f in self.root.rglob("*.py"))
        self.paths = [path for path in found if not IGNORED.search(path)]

    def text(self, path: str) -> str:
        file = self.root / path
        return file.read_text(encoding="utf-8") if file.is_file() else ""

    def functions(self, path: str) -> Functions:
        "Name, with its class, -> function or class of a file"
        found: Functions = {}
        for node in ast.walk(ast.parse(self.text(path))):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    outer = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
                    found[outer + child.name] = child
        return found

    def source(self, path: str, name: str) -> str:
        "Code of a function or class; empty when there is none"
        node = self.functions(path).get(name)
        return ast.unparse(node) if node else ""

    def has(self, word: str) -> bool:
        return any(word in self.text(path) for path in self.paths)


# ---- the table


def distribution(r: Release) -> str:
    tags = {"3.11": "cp311", "3.12": "cp312"}
    on = [p for p, tag in tags.items() if wheels("vllm-ascend", r.version, python=tag)]
    return f"wheel, Python {' and '.join(on)}" if on else "source only: read"


def executed(r: Release) -> str:
    "What the lane of the 910B software ran on it"
    lane = json.loads(LANE.read_text())["stacks"].get(f"vllm-ascend-{r.version}", {})
    rows = [row["state"] == "executed" for row in lane.get("rows", [])]
    parts = "1 part" if sum(rows) == 1 else f"{sum(rows)} parts"
    return f"{parts} of `make test-910b`" if any(rows) else "no"


def nz(r: Release) -> str:
    if "VLLM_ASCEND_ENABLE_NZ" in r.text("envs.py"):
        return "`VLLM_ASCEND_ENABLE_NZ=0`"
    default = re.search(r"weight_nz_mode: int = (\d)", r.text(CONFIG))
    return f"`weight_nz_mode: 0`; default {default[1] if default else 'not found'}"


def three_calls(r: Release) -> str:
    found = re.search(
        r"def (start_weight_update)\(self(?:, )?(.*?)(?::.*)?\)", r.text(WORKER)
    )
    return f"`{found[1]}({found[2]})`" if found else "no"


def engines(r: Release) -> str:
    files = (r.root / "distributed/weight_transfer").glob("*_engine.py")
    return ", ".join(sorted(f.stem.removesuffix("_engine") for f in files)) or "no"


def rl_keys(r: Release) -> str:
    keys = re.findall(r"^    (\w+): bool", r.source(CONFIG, "RlConfig"), re.M)
    return ", ".join(f"`{key}`" for key in keys) or "no"


def cleanup(r: Release) -> str:
    if "sleep_mode_extra_cleanup" in rl_keys(r):
        return "`rl_config.sleep_mode_extra_cleanup`"
    name = "enable_sleep_mode_extra_cleanup"
    return f"`{name}`" if r.has(name) else "no"


def in_source(path: str, name: str, word: str):
    return lambda r: "yes" if word in r.source(path, name) else "no"


def anywhere(word: str):
    return lambda r: "yes" if r.has(word) else "no"


SLEEP = "CaMemAllocator.sleep"
FEATURES = {
    "distribution": distribution,
    "executed": executed,
    "sleep waits for the device": in_source(
        "device_allocator/camem.py", SLEEP, "synchronize"
    ),
    "NZ weights are turned off by": nz,
    "wake-up refuses NZ": in_source(WORKER, "NPUWorker.wake_up", "NZ"),
    "wake-up transposes experts": in_source(WORKER, "NPUWorker.wake_up", "w2_weight"),
    "weight update in three calls": three_calls,
    "transfer engines": engines,
    "a weight update resets LoRA": anywhere("reset_lora_state"),
    "default of the sampler's log-probs": lambda r: (
        "raw" if "raw_logprobs" in r.text("sample/sampler.py") else "processed"
    ),
    "`rl_config` keys": rl_keys,
    "extra cleanup at sleep": cleanup,
    "batch invariance": anywhere("VLLM_BATCH_INVARIANT"),
    "attention of FA3": anywhere("flash_attn_npu_v3"),
    "routed experts of a rollout": anywhere("routed_experts"),
}


def table(versions: tuple[str, ...] = RELEASES) -> str:
    releases = [Release(version) for version in versions]
    lines = [["vllm-ascend", *versions], ["---"] * (len(versions) + 1)]
    lines += [[name, *(find(r) for r in releases)] for name, find in FEATURES.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# ---- the comparison


def codes(functions: Functions) -> dict[str, str]:
    "Name -> code without docstring; of a class, its fields alone"
    found = {}
    for name, node in functions.items():
        body = [n for n in node.body if not isinstance(n, ast.FunctionDef | ast.ClassDef)]
        body = body if isinstance(node, ast.ClassDef) else [node.args, *node.body]
        texts = [n for n in body if not isinstance(getattr(n, "value", n), ast.Constant)]
        found[name] = "\n".join(map(ast.unparse, texts))
    return found


def compare(old: Release, new: Release) -> str:
    "Functions and classes that were added, removed or changed, by area and file"
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted({*old.paths, *new.paths}):
        area = next((name for name, fits in AREAS.items() if re.search(fits, path)), None)
        if area is None or old.text(path) == new.text(path):
            continue
        before, after = (codes(r.functions(path)) for r in (old, new))
        kinds = {
            "added": after.keys() - before.keys(),
            "removed": before.keys() - after.keys(),
            "changed": {n for n in before.keys() & after.keys() if before[n] != after[n]},
        }
        parts = [
            f"{kind} {', '.join(sorted(names))}" for kind, names in kinds.items() if names
        ]
        found[area] += [f"- {path}: {'; '.join(parts)}"] if parts else []
    title = f"vllm-ascend {old.version} -> {new.version}: changes that concern RL\n"
    return title + "".join(
        f"\n## {a}\n" + "\n".join(found[a]) + "\n" for a in AREAS if found[a]
    )


def main(*versions: str) -> None:
    if len(versions) == 2:
        print(compare(*map(Release, versions)), end="")
    else:
        TABLE.write_text(table(versions or RELEASES), encoding="utf-8")
        print(f"wrote {TABLE.relative_to(ROOT)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
