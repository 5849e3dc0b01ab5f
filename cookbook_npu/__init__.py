"""RL post-training of Qwen3-family models on Ascend NPUs, as notebooks that run on a laptop first

Each public name is imported from its module on first use, so importing the package is cheap and changes
nothing in the process. No notebook exports this module.
"""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import RunConfig, config_keys, load_config, override
    from .notebook import check_parameters
    from .plan.plan import make_plan
    from .plan.preflight import check_machine
    from .policy.evaluate import ask
    from .policy.export import export_policy
    from .recipes import (
        find_recipe,
        qwen3_30b_a3b_grpo,
        qwen3_4b_colocate,
        qwen3_4b_multi_lora_grpo,
        qwen3_4b_opd,
        qwen3_4b_sft,
        qwen3_5_9b_async,
        qwen3_5_9b_colocate,
        qwen3_vl_8b_grpo,
        qwen3_vl_8b_ppo,
        smollm2_grpo,
        wordle_grpo,
    )
    from .rollout.transformers import TransformersEngine
    from .rollout.vllm import VllmEngine
    from .runs.answers import answer_table
    from .runs.compare import compare_before, compare_runs
    from .runs.plots import watch
    from .runs.report import write_report
    from .runs.report import check_learning, show_result
    from .train.session import session
    from .train.trainer import Trainer

__version__ = "0.1.0"

_HOMES = {  # name -> module
    "RunConfig": "config",
    "config_keys": "config",
    "load_config": "config",
    "override": "config",
    "find_recipe": "recipes",
    "qwen3_30b_a3b_grpo": "recipes",
    "qwen3_4b_colocate": "recipes",
    "qwen3_4b_multi_lora_grpo": "recipes",
    "qwen3_4b_opd": "recipes",
    "qwen3_4b_sft": "recipes",
    "qwen3_5_9b_async": "recipes",
    "qwen3_5_9b_colocate": "recipes",
    "qwen3_vl_8b_grpo": "recipes",
    "qwen3_vl_8b_ppo": "recipes",
    "smollm2_grpo": "recipes",
    "wordle_grpo": "recipes",
    "make_plan": "plan.plan",
    "check_machine": "plan.preflight",
    "session": "train.session",
    "ask": "policy.evaluate",
    "export_policy": "policy.export",
    "compare_before": "runs.compare",
    "compare_runs": "runs.compare",
    "answer_table": "runs.answers",
    "check_learning": "runs.report",
    "check_parameters": "notebook",
    "show_result": "runs.report",
    "write_report": "runs.report",
    "watch": "runs.plots",
    "TransformersEngine": "rollout.transformers",
    "VllmEngine": "rollout.vllm",
    "Trainer": "train.trainer",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    "Import a public name on first use (PEP 562)"
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    collects = gc.isenabled()
    gc.disable()  # imports leave almost no garbage
    try:
        if name == "session":
            # a driver needs no device; torch would load torch_npu
            import_module(f"{__name__}.npu.device").import_torch_alone()
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    finally:
        if collects:
            gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    "Return all public names"
    return sorted({*globals(), *_HOMES})
