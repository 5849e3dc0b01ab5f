"""The plan against Megatron at the true TP (meta device), vLLM's configuration, memory of simulated NPUs"""

import json
import subprocess
import sys
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from places import HELPERS
from preloaded_jobs import TRAINER_RANK
from ranks import run_ranks

from cookbook_npu.cli import planned_config
from cookbook_npu.errors import ConfigError, DeviceError
from cookbook_npu.plan.dimensions import (
    PUBLISHED,
    dimensions_of_tiny,
    image_token_flops,
    parameters_per_rank,
    published_dimensions,
)
from cookbook_npu.plan.memory import (
    check_fits,
    micro_batch,
    planned_backend,
    planned_cache,
    scoring,
    stages_of,
    trainer_state,
    training,
)
from cookbook_npu.plan.plan import make_plan, process_groups
from cookbook_npu.plan.roles import architecture
from cookbook_npu.recipes import RECIPES
from cookbook_npu.rl.algorithms import algorithm_overrides

JOBS = HELPERS / "plan_jobs"
# transfer backend, phases that hold a copy of the weights on the device
BACKENDS = {
    "qwen3_4b_colocate": ("ipc", 2),
    "qwen3_30b_a3b_grpo": ("shm", 0),
    "qwen3_4b_opd": ("ipc", 2),
    "qwen3_5_9b_colocate": ("ipc", 2),
    "qwen3_5_9b_async": ("shm", 0),
    "qwen3_vl_8b_grpo": ("ipc", 2),
    "qwen3_vl_8b_ppo": ("shm", 0),
}


@pytest.mark.parametrize(
    ("name", "tensor", "rank", "expert"),
    [
        ("Qwen3-4B", 2, 3, 1),
        ("Qwen3-VL-8B", 4, 1, 1),
        ("Qwen3.5-9B", 4, 6, 1),
        ("Qwen3-30B-A3B", 4, 0, 8),
    ],
)
def test_real_dimensions_on_the_meta_device(name, tensor, rank, expert):
    "Parameters of a rank, every Hugging Face name and shape, groups and shape arguments: as planned, exactly"
    job = dict(name=name, tensor=tensor, expert=expert, at=rank, of=8)
    (got,) = run_ranks(
        f"{JOBS}/meta.py:rank_of_a_model", 1, job, bootstrap="trainer", preload=TRAINER_RANK
    )
    assert got["devices"] == ["meta"]
    held = parameters_per_rank(published_dimensions(name), tensor, max(tensor, expert))
    assert got["parameters"] == held
    assert got["exported"] == got["hf"]
    assert {
        k: got["config"][k] for k in architecture(published_dimensions(name))
    } == architecture(published_dimensions(name))
    assert (
        got["config"]["tensor_model_parallel_size"] == tensor
        and got["config"]["recompute_granularity"] == "full"
    )
    config = planned_config(
        "qwen3_4b_colocate", "910b", {"overrides": {"parallel.tensor": tensor}}
    )
    assert got["tp"] == next(g for g in process_groups(config)["TP"] if rank in g)
    assert got["dp"] == next(g for g in process_groups(config)["DP"] if rank in g)


FLOPS = """
import json, sys
from cookbook_npu.npu.shims.torchvision_ops import install_finder
install_finder()
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen3_vl import Qwen3VLVisionModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
tower = Qwen3VLVisionModel._from_config(Qwen3VLVisionConfig(**json.loads(sys.argv[1])))
with FlopCounterMode(display=False) as counter, torch.no_grad():
    tower(torch.zeros(24, 1536), grid_thw=torch.tensor([[1, 4, 6]]))
found = counter.get_flop_counts()["Global"]
print("RESULT", sum(n for name, n in found.items() if "attention" not in str(name)))
"""


def test_operations_of_the_vision_tower_are_those_that_pytorch_counts():
    "Six image tokens; the attention kernel is counted apart, or not at all"
    small = {"depth": 3, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96}
    small |= {"out_hidden_size": 48, "num_position_embeddings": 64}
    vision = PUBLISHED["Qwen3-VL-8B"]["vision_config"] | small
    vision["deepstack_visual_indexes"] = [0, 1]
    command = [sys.executable, "-c", FLOPS, json.dumps(vision)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"RESULT {6 * image_token_flops(vision)}" in done.stdout


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_every_910b_preset_fits(recipe):
    "The copy of the weights included, where the transfer backend that a trainer chooses makes one"
    plan = make_plan(planned_config(recipe, "910b", {}))
    assert plan.model.name in PUBLISHED and all(
        p.nbytes <= plan.capacity for p in plan.phases
    )
    if plan.config.is_sft:  # no engines: neither their memory nor a copy for them
        names = {c.name for p in plan.phases for c in p.components}
        assert not names & {"engine weights", "key/value cache", "copy of the weights"}
        assert [e.name for e in plan.times] == [
            "actor_train"
        ] and "engine" not in plan.as_text()
        return
    if plan.config.tenants:  # the engine stays beside the trainer
        assert all("engine weights" in {c.name for c in p.components} for p in plan.phases)
        assert "2 adapters of 17,252,352 parameters" in plan.as_text()
        assert "wake_up" not in {e.name for e in plan.times}
        return
    # what a driver says of a 910B of 64 GiB
    backend, why = planned_backend(
        plan.config, plan.config.target.engine_capacity(65_787_658_240)
    )
    copies = [
        c for p in plan.phases for c in p.components if c.name == "copy of the weights"
    ]
    assert (backend, len(copies)) == BACKENDS[recipe], why
    assert bool(why) == (backend == "shm")
    page = plan.as_text()
    assert f"({backend})" in page or plan.config.placement.mode == "split"


def test_qwen3_4b_fits_four_devices():
    "At the utilization of the recipe; that of the script it follows fits at the lower end only"
    four = {"placement.devices": 4}
    plan = make_plan(planned_config("qwen3_4b_colocate", "910b", {"overrides": four}))
    assert (plan.config.parallel.tensor, plan.config.num_engines) == (4, 1)
    assert all(p.nbytes <= plan.capacity for p in plan.phases)
    as_in_the_script = {"overrides": four | {"rollout.memory_utilization": 0.8}}
    tight = make_plan(planned_config("qwen3_4b_colocate", "910b", as_in_the_script))
    assert all(p.low <= tight.capacity for p in tight.phases)
    (warning,) = [text for text in tight.warnings if "'start engines'" in text]
    assert "needs 51.0 to 63.0 GiB" in warning and "only the lower end fits" in warning
    over = {"overrides": four | {"rollout.memory_utilization": 0.99}}
    with pytest.raises(DeviceError, match="needs 62.6 to 74.6 GiB"):
        make_plan(planned_config("qwen3_4b_colocate", "910b", over))


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_every_910b_preset_is_true_to_its_source(recipe):
    "What each deviates from its source in is in the table of nbs/02_recipes.ipynb"
    config = planned_config(recipe, "910b", {})
    assert config.model.fused_kernels
    assert config.algorithm.kl_loss_coef or not config.algorithm.use_reference
    assert config.sampling.temperature == 1.0
    seeing = recipe.startswith("qwen3_vl")
    turns = (config.rollout.environment, config.rollout.max_turns)
    assert turns == (("geo3k", 3) if seeing else (None, 8))


def test_a_cache_without_room_for_an_evaluation_is_refused():
    "vLLM starts only when the longest sequence of training or evaluation fits"
    given = {"overrides": {"rollout.eval_max_response_tokens": 260_000}}
    with pytest.raises(DeviceError, match="eval_max_response_tokens"):
        make_plan(
            planned_config("qwen3_4b_colocate", "910b", given | {"model": "Qwen3-VL-8B"})
        )
    with pytest.raises(ConfigError, match="has 40960 positions"):
        make_plan(planned_config("qwen3_4b_colocate", "910b", given))


VLLM = """
import json, sys, tempfile
from pathlib import Path
from cookbook_npu.cli import planned_config
from cookbook_npu.plan.dimensions import PUBLISHED
from cookbook_npu.plan.roles import vllm_arguments
from cookbook_npu.rollout.vllm import engine_settings, prepare_environment
from cookbook_npu.npu.shims.torchvision_ops import install_finder
install_finder()
prepare_environment("cpu")
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry
registry._run_in_subprocess = lambda look: look()  # at a model's class: a process less for each
ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
}


def accepted(recipe, **overrides):
    config = planned_config(recipe, "910b", {"overrides": overrides})
    folder = Path(tempfile.mkdtemp())
    model = PUBLISHED[Path(config.model.path).name]
    architecture = ARCHITECTURES[model["model_type"]]
    values = model | {"architectures": [architecture], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(values))
    wanted = vllm_arguments(config) | {"model": str(folder)}
    known = engine_settings(wanted, EngineArgs.__dataclass_fields__)
    for name in ("use_tqdm_on_load", "enable_sleep_mode"):  # a CPU cannot sleep
        known.pop(name, None)
    made = EngineArgs(**known, skip_tokenizer_init=True).create_engine_config()
    pictures = made.model_config.multimodal_config
    image = pictures and pictures.limit_per_prompt.get("image")
    return dict(
        rows=made.scheduler_config.max_num_seqs,
        chunk=made.scheduler_config.max_num_batched_tokens,
        ops=made.compilation_config.custom_ops,
        additional=made.additional_config,
        picture=image and [image.width, image.height],
        picture_cache=pictures and pictures.mm_processor_cache_gb,
        tensor=made.parallel_config.tensor_parallel_size,
        length=made.model_config.max_model_len,
        eager=made.model_config.enforce_eager,
        logprobs=made.model_config.logprobs_mode,
        cache=made.cache_config.kv_cache_memory_bytes,
    )


PASSED = {
    "rollout.enforce_eager": False,
    "rollout.engine_args": {
        "max_num_seqs": 48,
        "max_num_batched_tokens": 4096,
        "compilation_config": {"custom_ops": ["-rms_norm"]},
        "additional_config": {"enable_sleep_mode_extra_cleanup": True, "weight_nz_mode": 0},
    },
}
made = {recipe: accepted(recipe) for recipe in sys.argv[1:]}
made["passed on"] = accepted("qwen3_4b_colocate", **PASSED)
print("RESULT", json.dumps(made))
"""
ON_VLLM = sorted(
    r
    for r in RECIPES
    if planned_config(r, "910b", {}).rollout.engine == "vllm" and r != "qwen3_4b_sft"
)


def lacks_torchvision(recipe: str) -> bool:
    "Whether vLLM cannot look at the recipe's model here"
    model = PUBLISHED[Path(planned_config(recipe, "910b", {}).model.path).name]
    return "vision_config" in model and find_spec("torchvision") is None


@pytest.fixture(scope="module")
def accepted_by_vllm() -> dict:
    "What vLLM makes of the arguments of each recipe: one process, since importing vLLM takes longest"
    pytest.importorskip("vllm", reason="the vllm extra is not installed")
    able = [recipe for recipe in ON_VLLM if not lacks_torchvision(recipe)]
    command = [sys.executable, "-c", VLLM, *able]
    out = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [line for line in out.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, out.stderr[-3000:]
    return json.loads(lines[0][7:])


@pytest.mark.lane("devices")
@pytest.mark.parametrize("recipe", ON_VLLM)
def test_vllm_accepts_the_arguments(recipe, accepted_by_vllm):
    "vLLM builds its whole configuration from what the plan lists; no weights, no engine"
    if lacks_torchvision(recipe):
        pytest.skip("torchvision is not installed")
    config = planned_config(recipe, "910b", {})
    got = accepted_by_vllm[recipe]
    longest = config.data.max_prompt_tokens + config.longest_response
    assert (got["tensor"], got["length"], got["eager"]) == (
        config.rollout.devices_per_engine,
        longest,
        config.rollout.enforce_eager,
    )
    assert got["logprobs"] == "processed_logprobs"
    assert got["cache"] == make_plan(config).cache_bytes


def test_vllm_receives_the_arguments_that_are_passed_on(accepted_by_vllm):
    "By vLLM's own configuration; what the loop sets beside them is unchanged"
    got = accepted_by_vllm["passed on"]
    plain = accepted_by_vllm["qwen3_4b_colocate"]
    assert (got["rows"], got["chunk"]) == (48, 4096)
    assert "-rms_norm" in got["ops"] and "-rms_norm" not in plain["ops"]
    assert got["additional"] == {
        "enable_sleep_mode_extra_cleanup": True,
        "weight_nz_mode": 0,
    }
    assert (plain["rows"], plain["eager"], got["eager"]) == (256, True, False)
    for kept in ("tensor", "length", "logprobs"):
        assert got[kept] == plain[kept]
    # fewer rows and tokens in a pass leave more for the cache
    assert got["cache"] > plain["cache"]


def test_vllm_plans_for_the_largest_picture_of_the_run(accepted_by_vllm):
    "Not for the 16 million pixels that Qwen3-VL allows"
    if "qwen3_vl_8b_grpo" not in accepted_by_vllm:
        pytest.skip("torchvision is not installed")
    assert accepted_by_vllm["qwen3_vl_8b_grpo"]["picture"] == [512, 512]


def test_the_command_names_the_cache_that_the_engine_gets():
    "One number: on the page, in the arguments, and what an engine on a device of that kind asks for"
    from typer.testing import CliRunner

    from cookbook_npu.cli import app

    total = 65_787_658_240  # what a 910B of 64 GiB says of itself
    words = ["plan", "qwen3_4b_colocate", "--scale", "910b"]
    page = CliRunner().invoke(app, words).output
    nbytes = planned_cache(planned_config("qwen3_4b_colocate", "910b", {}), total)
    assert f"vLLM is given kv_cache_memory_bytes {nbytes} on each device" in page
    assert 10 * 2**30 < nbytes < 0.35 * 64 * 2**30


def test_qwen35_9b_fits_four_devices_with_its_optimizer_on_the_host():
    "The recipe as it is; without the optimizer on the host only the lower end fits"
    parameters = {"model": "Qwen3.5-9B", "overrides": {"optim.cpu_offload": False}}
    on_device = planned_config("qwen3_5_9b_colocate", "910b", parameters)
    tight = make_plan(on_device)
    assert any(
        "'actor_train'" in text and "only the lower end" in text for text in tight.warnings
    )
    with pytest.raises(DeviceError, match="its largest part is optimizer"):
        check_fits(on_device)
    on_host = planned_config("qwen3_5_9b_colocate", "910b", {"model": "Qwen3.5-9B"})
    plan = make_plan(on_host)
    assert "on the host: the optimizer, 40.15 GiB for each trainer rank" in plan.as_text()
    phases = {phase.name: phase.nbytes for phase in plan.phases}
    saved = phases_of(on_device)["actor_train"] - phases["actor_train"]
    assert saved == 12 * parameters_per_rank(published_dimensions("Qwen3.5-9B"), 4)


@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        ("qwen3_4b_colocate", "Qwen3-4B"),
        ("qwen3_5_9b_colocate", "Qwen3.5-9B"),
        ("qwen3_5_9b_async", "Qwen3.5-9B"),
        ("qwen3_vl_8b_grpo", "Qwen3-VL-8B"),
    ],
)
def test_ppo_fits_in_every_recipe(recipe, model):
    "The critic's weights and gradients lie beside the policy's, but for the rows of an untied vocabulary"
    grpo = planned_config(recipe, "910b", {"model": model})
    parameters = {"model": model, "overrides": algorithm_overrides("ppo")}
    ppo = planned_config(recipe, "910b", parameters)
    phases = {phase.name: phase.nbytes for phase in make_plan(ppo).phases}
    assert {"values", "critic_train"} <= phases.keys()
    d = published_dimensions(model)
    tensor = ppo.parallel.tensor
    vocabulary = 0 if d.tied else -(-d.vocab // tensor) * d.hidden
    critic = parameters_per_rank(d, tensor) - vocabulary + d.hidden
    each = 2 + 4 + (0 if ppo.optim.cpu_offload else 12 / ppo.data_parallel)
    more = phases["actor_train"] - phases_of(grpo)["actor_train"]
    assert abs(more - each * critic) < 8


def phases_of(config) -> dict[str, int]:
    "Bytes of each phase, whether it fits or not"
    return {phase.name: phase.nbytes for phase in make_plan(config, check=False).phases}


ONE_RANK: list[dict[str, Any]] = [
    {},
    {"model.tiny.num_layers": 4, "model.recompute": "full"},
    {"model.tiny.ffn_size": 384},
    {"model.tiny.hidden_size": 128, "train.micro_batch_tokens": 1024},
    {"train.logprob_chunk_tokens": 256, "model.tiny.num_layers": 4},
    {"model.dtype": "bfloat16"},
    {"model.dtype": "bfloat16", "optim.cpu_offload": True},
]


def test_memory_of_one_rank_within_a_tenth(tmp_path):
    """Scoring, held and training; in bfloat16 what is held

    Kernels of the simulated NPU keep float32 copies in norms and softmax, which fused kernels do not."""
    from plan_jobs.measure import config_of

    from cookbook_npu.data.tokenizer import build_tokenizer
    from cookbook_npu.model.tiny import build_tiny

    configs = [config_of({"parallel.tensor": 1} | changes, 1) for changes in ONE_RANK]
    cases = []
    for n, config in enumerate(configs):
        folder = build_tiny(config.model.tiny, build_tokenizer(), tmp_path / str(n), seed=0)
        cases.append((str(folder), {"parallel.tensor": 1} | ONE_RANK[n]))
    (measured,) = run_ranks(
        f"{JOBS}/measure.py:measure_each",
        1,
        dict(cases=cases),
        bootstrap="trainer",
        preload=TRAINER_RANK,
        timeout=300,
    )
    for config, got in zip(configs, measured, strict=True):
        d = dimensions_of_tiny(config.model.tiny, 264)
        samples = micro_batch(config)[0] // 128  # whole samples only
        weights, gradients, optimizer = (c.nbytes for c in trainer_state(d, config))
        held = weights + gradients + optimizer
        if config.model.dtype == "bfloat16":
            # besides what stays asleep: 0.1 MiB of buffers that no formula counts
            assert held / (got["held"] - got["asleep"]) == pytest.approx(1, abs=0.05)
            continue
        score = sum(c.nbytes for c in scoring(d, config, samples * 128))
        passes = training(d, config, samples * 128, samples * 116)
        # Adam's state does not exist before the first step
        want = weights + gradients + score, held, held + sum(c.nbytes for c in passes)
        have = got["scoring"], got["held"], got["peak"]
        assert want == pytest.approx(have, rel=0.10), config
        assert got["asleep"] < 0.05 * got["held"], got
    ordinary, on_host = measured[-2:]
    parameters = parameters_per_rank(dimensions_of_tiny(configs[0].model.tiny, 264), 1)
    assert ordinary["held"] - on_host["held"] == pytest.approx(12 * parameters, rel=0.05)


@pytest.mark.parametrize(
    "overrides",
    [
        {"parallel.tensor": 2},
        {"parallel.tensor": 1, "model.recompute": "full"},
        {
            "parallel.tensor": 1,
            "parallel.pipeline": 2,
            "train.micro_batch_tokens": 1024,
        },
    ],
)
def test_memory_of_two_ranks_within_a_tenth(overrides, tmp_path):
    """TP 2 divides what the plan says it divides, DP 2 shares the optimizer

    PP 2 has the activations of two micro-batches on the first stage, the head on the last."""
    from plan_jobs.measure import config_of

    from cookbook_npu.data.tokenizer import build_tokenizer
    from cookbook_npu.model.tiny import build_tiny

    config = config_of(overrides, 2)
    folder = build_tiny(config.model.tiny, build_tokenizer(), tmp_path / "tiny", seed=0)
    env = {"COOKBOOK_NPU_SIMULATE": "1", "COOKBOOK_NPU_SIM_DEVICES": "2"}
    got = run_ranks(
        f"{JOBS}/measure.py:measure",
        2,
        dict(hf_path=str(folder), overrides=overrides),
        env=env,
        bootstrap="trainer",
        preload=TRAINER_RANK,
        timeout=200,
    )
    tokens, response = micro_batch(config)
    tokens = tokens // 128 * 128
    stages = stages_of(dimensions_of_tiny(config.model.tiny, 264), config)
    for d, rank in zip(cycle(stages), got, strict=False):
        held = sum(c.nbytes for c in trainer_state(d, config))
        passes = training(d, config, tokens, tokens * 116 // 128)
        peak = held + sum(c.nbytes for c in passes)
        assert abs(held / rank["held"] - 1) < 0.10, (held, rank)
        assert abs(peak / rank["peak"] - 1) < 0.10, (peak, rank)
        assert rank["asleep"] < 0.05 * rank["held"], rank
