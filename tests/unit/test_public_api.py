"""What a notebook user imports from the package: names and signatures"""

import importlib
import inspect
import re

import pytest
from IPython.core.interactiveshell import InteractiveShell

import cookbook_npu

PRESET = (
    "scale='laptop', model=None, prompt_data=None, engine=None, num_steps=None, prompts_per_step=None, "
    "samples_per_prompt=None, learning_rate=None, seed=None, overrides=None"
)
SIGNATURES = {
    "RunConfig": None,  # its keys are the configuration: `cookbook-npu config --all`
    "config_keys": "model=RunSections, prefix=''",
    "load_config": "path",
    "override": "config, overrides, given=None",
    "find_recipe": "name",
    "qwen3_30b_a3b_grpo": PRESET,
    "qwen3_4b_colocate": PRESET,
    "qwen3_4b_multi_lora_grpo": PRESET,
    "qwen3_4b_opd": PRESET,
    "qwen3_4b_sft": PRESET,
    "qwen3_5_9b_async": PRESET,
    "qwen3_5_9b_colocate": PRESET,
    "qwen3_vl_8b_grpo": PRESET,
    "qwen3_vl_8b_ppo": PRESET,
    "smollm2_grpo": PRESET,
    "wordle_grpo": PRESET,
    "make_plan": "config, soc='Ascend910B1', check=True",
    "check_machine": "config, environ=None, files=True",
    "session": "config, resume=None, fresh=False",
    "ask": "path, prompts=(), step=None, max_tokens=None",
    "export_policy": "path, step=None, to=None, merged=False",
    "compare_before": "path",
    "compare_runs": "a, b",
    "answer_table": "run, prompts=6",
    "check_learning": "folder",
    "check_parameters": "names=None",
    "show_result": "folder",
    "watch": "run, every_s=1.0",
    "write_report": "folder, references=None, title='', panels=...",
    "TransformersEngine": "hf_path, dtype='bfloat16', device=None, batch_size=128, stop_token_ids=(), "
    "simulated_latency=0.0, lora=None, routing_replay=False, resident=False",
    "VllmEngine": "hf_path, dtype='bfloat16', max_tokens=None, memory_utilization=0.35, "
    "kv_cache_bytes=None, max_sequences=256, graphs='off', tensor_parallel=1, "
    "stop_token_ids=(), weight_update_method='auto', request_seeds=True, "
    "simulated_latency=0.0, max_pixels=None, engine_args=None, load_weights=True, "
    "routing_replay=False, lora=None, capture_sizes=()",
    "Trainer": "rank, world_size, config, hf_path",
}
VERBS = {
    "Trainer": {
        "logprobs": "batch, policy='actor'",
        "forward_backward": "batch, rows, accumulate=False",
        "optim_step": "",
        "save": "folder, hf_path",
        "sleep": "",
        "wake": "",
    },
    "TransformersEngine": {
        "generate": "requests, sampling",
        "submit": "requests, sampling",
        "collect": "decode_steps=None",
        "abort": "group_ids=None",
        "generate_text": "prompts, n=1, max_response_tokens=128, temperature=1.0, seed=0",
        "update_weights": "version, named_tensors, expected=None, handles=None",
        "checksums": "names=None",
        "pause": "mode='keep'",
        "resume": "",
        "sleep": "level=2",
        "wake": "tags=...",
        "health": "",
        "close": "",
    },
}


def plain(default) -> str:
    "A default as it stands in SIGNATURES"
    if isinstance(default, type):
        return default.__name__
    text = repr(default)
    return text if len(text) < 20 else "..."


def signature(function) -> str:
    "Parameters with their defaults, without types"
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        given = parameter.default is not inspect.Parameter.empty
        found.append(f"{name}={plain(parameter.default)}" if given else name)
    return ", ".join(found)


def test_names():
    assert sorted(cookbook_npu.__all__) == sorted(SIGNATURES)
    assert set(SIGNATURES) <= set(dir(cookbook_npu))
    with pytest.raises(AttributeError, match="has no attribute 'sesion'"):
        cookbook_npu.sesion  # noqa: B018


@pytest.mark.parametrize("name", [n for n, s in SIGNATURES.items() if s is not None])
def test_signature(name):
    assert signature(getattr(cookbook_npu, name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", VERBS)
def test_verbs(name):
    kind = getattr(cookbook_npu, name)
    found = {verb: signature(getattr(kind, verb)) for verb in VERBS[name]}
    assert found == VERBS[name]


def test_engines_have_the_same_verbs():
    engines = [cookbook_npu.TransformersEngine, cookbook_npu.VllmEngine]
    for verb in VERBS["TransformersEngine"]:
        first, second = (signature(getattr(engine, verb)) for engine in engines)
        assert first == second, verb


def test_a_wrong_setting_is_shown_without_the_frames_of_the_package(capsys):
    cell = "from cookbook_npu import qwen3_4b_colocate as recipe\nrecipe(overrides={'optim.lr': 1})"
    InteractiveShell().run_cell(cell)
    shown = capsys.readouterr().out
    assert "line 2" in shown and "Did you mean 'optim.learning_rate'" in shown, shown
    assert shown.count("File ") == 1, shown


@pytest.mark.parametrize("room", ["rl", "data"])
def test_a_room_names_only_modules_that_it_has(room):
    words = importlib.import_module(f"cookbook_npu.{room}").__doc__ or ""
    for name in re.findall(r"`([a-z_]+)`", words):
        importlib.import_module(f"cookbook_npu.{room}.{name}")
