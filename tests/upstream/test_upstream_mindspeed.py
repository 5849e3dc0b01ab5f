"""The real MindSpeed on the simulated NPU: bootstrap, patching, and models that equal the ones of our
own stubs.

Needs COOKBOOK_UPSTREAM, a folder of checkouts named Project@ref. Some branches import scipy.
"""

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from places import HELPERS, TESTS
from ranks import run_ranks
from upstream_sources import checkout

from cookbook_npu.config import ParallelConfig, TinyConfig

PAIRS = [
    ("core_r0.15.3", "core_v0.15.3"),
    ("core_r0.16.0", "core_v0.16.1"),
    ("fc63de5c", "3714d81d"),
    ("dev", "3714d81d"),
]
TOLERANCE = 1e-5
SIMULATOR = TESTS / "simulator"  # its checks of model equality are repeated here
LENGTHS = [5, 8, 3]

pytestmark = pytest.mark.lane("upstream")


def environment(
    adaptor: str, mindspeed: str | None, megatron: str | None
) -> dict[str, str]:
    "Of ranks that see these checkouts; without a Megatron checkout they see the installed one"
    paths = [checkout(f"MindSpeed@{mindspeed}")] if mindspeed else []
    paths += [checkout(f"Megatron-LM@{megatron}")] if megatron else []
    if (
        mindspeed not in (None, "core_r0.15.3")
        and importlib.util.find_spec("scipy") is None
    ):
        pytest.skip(f"MindSpeed@{mindspeed} imports scipy, which is not installed")
    inherited = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return {
        "COOKBOOK_ADAPTOR": adaptor,
        "PYTHONPATH": os.pathsep.join(
            [*map(str, paths), str(HELPERS), str(SIMULATOR), *inherited]
        ),
    }


# ---------------------------------------------------------------- what the ranks do


def gathered(logits):
    from megatron.core.tensor_parallel.mappings import (
        gather_from_tensor_model_parallel_region,
    )

    return gather_from_tensor_model_parallel_region(logits).detach().float().cpu()


def gpt_logits(tensor: int, sequence: bool) -> dict[str, torch.Tensor]:
    "Logits of a tiny Qwen3-like GPT: sequences one by one, and the same packed into a row"
    import shims_targets
    from megatron.core.packed_seq_params import PackedSeqParams

    config = shims_targets._config(tensor, sequence, False, torch.float32, 0.0, False)
    model = shims_targets.fill(shims_targets._model(config, "transformer_engine"))
    ids = torch.randint(
        0, 64, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(2)
    ).cuda()
    ends = torch.tensor(
        [0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32, device="cuda"
    )
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None].cuda()
    longest = max(LENGTHS)
    packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
    row = gathered(model(ids, positions, None, packed_seq_params=packed))
    if sequence:  # needs lengths that tensor parallelism divides
        return {"packed": row[0], "row": gathered(model(ids, positions, None))[0]}
    alone = [
        gathered(model(i[None], p[None], None))[0]
        for i, p in zip(ids[0].split(LENGTHS), positions[0].split(LENGTHS), strict=True)
    ]
    return {
        "packed": row[0],
        "alone": torch.cat(alone),
        "row": gathered(model(ids, positions, None))[0],
    }


def gpt(rank: int, world_size: int, tensor: int, sequence: bool) -> dict:
    "Logits, three training steps, and what became of the shims"
    import shims_targets
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer import TransformerConfig

    from cookbook_npu.npu.shims.mindspeed.adaptor import current, false_flags
    from cookbook_npu.npu.shims.registry import registry

    history, _ = shims_targets.train(
        rank, world_size, tensor=tensor, sequence=sequence, filled=True
    )
    names = ("TEDotProductAttention", "TELayerNormColumnParallelLinear", "TENorm")
    second = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    return {
        "adaptor": current().name,
        "history": history,
        "logits": gpt_logits(tensor, sequence),
        "modules": [
            getattr(transformer_engine, name).__module__.partition(".")[0] for name in names
        ],
        "inherited": (
            second.num_moe_experts,
            second.qk_layernorm,
            second.num_query_groups,
            second.normalization,
        ),
        "false_flags": false_flags(),
        "shims": {row["name"]: (row["state"], row["detail"]) for row in registry.report()},
    }


def dropped(rank: int, world_size: int) -> dict[str, object]:
    "What a repatch of MindSpeed does to others: to a wrapper put on top of its own, and to our shims"
    import torch.distributed as dist
    from megatron.core.models.common.embeddings import rope_utils

    from cookbook_npu.npu.shims.bootstrap import model_ready, parallel_ready
    from cookbook_npu.npu.shims.mindspeed.adaptor import current

    parallel_ready({"tensor_model_parallel_size": 1})
    theirs = dist.all_reduce

    def foreign(*args, **kwargs):
        return theirs(*args, **kwargs)

    dist.all_reduce = foreign
    current().reset()
    current().repatch(current().arguments({"tensor_model_parallel_size": 1}))
    x, y = torch.ones(1, dtype=torch.float64), torch.ones(4, 6)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    dist.all_reduce(x), dist.all_reduce(tensor=torch.ones(1))
    y[:, :3].view(4, 3, 1).fill_(0)
    states = {row["name"]: row["state"] for row in model_ready()}
    return {
        "foreign": dist.all_reduce is foreign,
        "sum": x.item(),
        "written": y.sum().item(),
        "compiled": torch.compile(len) is len,
        "rope": rope_utils.apply_rotary_pos_emb.__module__,
        "refused": [name for name, state in states.items() if state == "refused"],
    }


def bridge_models(
    rank: int, world_size: int, root: str, families: list[str], tensor: int
) -> dict:
    "The checks of test_model_equality, in a process that has MindSpeed"
    import test_model_equality as models

    from cookbook_npu.model.megatron import init_parallel

    parallel = ParallelConfig(tensor=tensor)
    init_parallel(parallel, seed=0, timeout_s=60)
    wants = {
        family: torch.load(Path(root, f"{family}.pt"), weights_only=False)
        for family in families
    }
    return {
        family: models.check(Path(root, family), parallel, want)
        for family, want in wants.items()
    }


# ---------------------------------------------------------------- the tests

ROPE = "mindspeed.core.fusions.fused_rope"
EVERY = {
    "optimizer_state",
    "module_scan",
    "compile",
    "all_reduce",
    "view",
    "argument_conflicts",
    "argument_defaults",
    "causal_mask",
    "sequence_ends",
}
OLD = EVERY | {"rope_cp_group", "zero_centered_norm"}
APPLIED = {  # which records each branch needs
    "core_r0.15.3": OLD,  # its Megatron has no newer fields of PackedSeqParams
    "core_r0.16.0": EVERY | {"triton"},
    "fc63de5c": OLD | {"packed_fields"},
    "dev": EVERY | {"packed_fields"},
}


def run_gpt(adaptor: str, mindspeed: str | None, megatron: str, tensor: int) -> dict:
    kwargs = {"tensor": tensor, "sequence": tensor > 1}
    env = environment(adaptor, mindspeed, megatron)
    ranks = run_ranks(
        f"{__file__}:gpt", tensor, kwargs, env=env, timeout=400, bootstrap="trainer"
    )
    assert all(r["history"] == ranks[0]["history"] for r in ranks)
    return ranks[0]


@pytest.fixture(scope="module")
def stub():
    "Results of our own TransformerEngine stub, by checkout of Megatron and tensor parallelism"
    known: dict[tuple, dict] = {}

    def get(megatron: str, tensor: int) -> dict:
        if (megatron, tensor) not in known:
            known[megatron, tensor] = run_gpt("none", None, megatron, tensor)
        return known[megatron, tensor]

    return get


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize(("mindspeed", "megatron"), PAIRS)
def test_its_layers_equal_our_stub(stub, mindspeed, megatron, tensor):
    got, want = (
        run_gpt("mindspeed", mindspeed, megatron, tensor),
        stub(megatron, tensor),
    )
    assert (got["adaptor"], set(got["modules"])) == ("mindspeed", {"mindspeed"})
    for name, logits in got["logits"].items():
        assert (logits - want["logits"][name]).abs().max() <= TOLERANCE, name
    if tensor == 1:
        assert (got["logits"]["packed"] - got["logits"]["alone"]).abs().max() <= TOLERANCE
    assert (got["logits"]["packed"] - got["logits"]["row"]).abs().max() > 1e-2, (
        "packing made no difference"
    )
    for (loss, norm), (loss_1, norm_1) in zip(got["history"], want["history"], strict=True):
        assert loss == pytest.approx(loss_1, abs=TOLERANCE) and norm == pytest.approx(
            norm_1, rel=1e-4
        )
    assert got["history"][-1][0] < got["history"][0][0] - 0.3
    assert got["inherited"] == (None, False, 2, "LayerNorm"), (
        "a second configuration starts from the first model's values"
    )
    assert not any(state == "refused" for state, _ in got["shims"].values())
    assert {
        n.removeprefix("mindspeed.")
        for n, (s, _) in got["shims"].items()
        if n[:9] == "mindspeed" and s == "applied"
    } == APPLIED[mindspeed]


@pytest.mark.parametrize(("mindspeed", "megatron"), PAIRS)
def test_a_repatch_drops_the_wrappers_of_others_and_keeps_ours(mindspeed, megatron):
    env = environment("mindspeed", mindspeed, megatron)
    ranks = run_ranks(f"{__file__}:dropped", 2, env=env, timeout=300, bootstrap="trainer")
    want = {
        "foreign": False,
        "sum": 2.0,
        "written": 12.0,
        "compiled": True,
        "rope": ROPE,
        "refused": [],
    }
    assert ranks == [want, want]


FAMILIES = ("qwen3", "qwen3_vl", "qwen3_5")


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SIMULATOR)
        from test_model_equality import reference, tokenizer

    from cookbook_npu.model.tiny import build_tiny

    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        shape = TinyConfig(
            family=family,
            hidden_size=64,
            num_layers=4 if family == "qwen3_5" else 2,
            ffn_size=128,
        )
        torch.save(
            reference(build_tiny(shape, tokenizer(), root / family, seed=0)),
            root / f"{family}.pt",
        )
    return root


@pytest.mark.parametrize("tensor", [1, 2])
def test_models_of_the_bridge_equal_hugging_face(tiny_models, tensor):
    "mcore-bridge on the installed megatron-core with MindSpeed: logits, gradients, packing, names, training"
    env = environment("mindspeed", "core_r0.16.0", None)
    kwargs = {"root": str(tiny_models), "families": FAMILIES, "tensor": tensor}
    for rank in run_ranks(
        f"{__file__}:bridge_models", 2, kwargs, env=env, timeout=500, bootstrap="trainer"
    ):
        for family, result in rank.items():
            assert (result["missing"], result["changed"]) == ([], []), family
            assert (
                max(
                    result["logits"],
                    *result["grads"].values(),
                    result["one_by_one"],
                    result["chunked"],
                )
                <= TOLERANCE
            ), family
            if family == "qwen3":
                assert (
                    max(
                        result["recomputed"]["selective"],
                        result["recomputed"]["full"],
                        result["trained"]["norm"],
                        result["trained"]["weights"],
                    )
                    <= TOLERANCE
                )


def test_fused_kernels_and_nothing_that_comes_back(tmp_path):
    "Of one micro-batch of the bridge's Qwen3 on the installed megatron-core"
    from kernel_checks import check_kernels

    from cookbook_npu.data.tokenizer import build_tokenizer
    from cookbook_npu.model.tiny import build_tiny

    shape = TinyConfig(hidden_size=64, num_layers=2, ffn_size=128)
    folder = build_tiny(shape, build_tokenizer(), tmp_path / "qwen3", seed=0)
    env = environment("mindspeed", "core_r0.16.0", None)
    target = f"{HELPERS / 'kernel_jobs.py'}:micro_batch"
    kwargs = {"folder": str(folder)}
    (found,) = run_ranks(target, 1, kwargs, env=env, timeout=400, bootstrap="trainer")
    check_kernels(found)


# ---------------------------------------------------------------- context parallelism

SIZES = {"context": 2}, {"tensor": 2, "context": 2}


def test_mindspeed_has_the_algorithms():
    "By the names that the trainer passes"
    from cookbook_npu.model.megatron import CONTEXT_ALGORITHMS

    features = checkout("MindSpeed@core_r0.16.0") / "mindspeed" / "features_manager"
    pages = (features / "context_parallel").glob("*.py")
    source = "".join(page.read_text(encoding="utf-8") for page in pages)
    for names in CONTEXT_ALGORITHMS.values():
        assert f"'{names.mindspeed}'" in source


def patches(rank: int, world_size: int, values: dict) -> dict[str, list[str]]:
    "What MindSpeed puts in place of each function"
    from cookbook_npu.npu.shims.bootstrap import parallel_ready

    parallel_ready(values)
    from mindspeed.patch_utils import MindSpeedPatchesManager

    def name(function):
        return f"{function.__module__}.{function.__qualname__}"

    return {
        target: [name(f) for f in (patch.patch_func, *patch.wrappers) if f is not None]
        for target, patch in MindSpeedPatchesManager.patches_info.items()
    }


@pytest.mark.parametrize("mindspeed", ["core_r0.15.3", "core_r0.16.0"])
def test_no_patch_depends_on_the_number_of_experts(mindspeed):
    "A dense teacher of a mixture shares the process of the policy"
    env = environment("mindspeed", mindspeed, dict(PAIRS)[mindspeed])
    dense = {"num_layers": 2, "tensor_model_parallel_size": 1}
    mixture = dense | {"num_moe_experts": 128, "expert_model_parallel_size": 8}
    found = [
        run_ranks(f"{__file__}:patches", 1, {"values": v}, env=env, bootstrap="trainer")[0]
        for v in (dense, mixture)
    ]
    assert len(found[0]) > 50
    assert found[0] == found[1]


def context_model(rank: int, world_size: int, root: str, algorithm: str, **sizes) -> dict:
    "The checks of test_context_parallel, in a process that has MindSpeed"
    import test_context_parallel as checks

    from cookbook_npu.model.megatron import init_parallel
    from cookbook_npu.npu.shims.registry import registry

    parallel = ParallelConfig(context_algorithm=algorithm, **sizes)
    init_parallel(parallel, seed=0, timeout_s=60)
    family = "qwen3" if Path(root, "qwen3").exists() else "qwen3_5"
    want = torch.load(Path(root, f"{family}.pt"), weights_only=False)
    if family == "qwen3_5":  # text and pictures
        return checks.check_pictures(Path(root, family), parallel, want)
    found = checks.check_text(Path(root, family), parallel, want)
    names = ("mindspeed.ring_groups", "mindspeed.packed_context")
    return found | {"shims": [registry[name].state.state for name in names]}


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{sum(sizes.values())}")
@pytest.mark.parametrize("algorithm", ["ring", "ulysses"])
def test_context_parallelism_equals_hugging_face(context_folder, algorithm, sizes):
    "MindSpeed's own attention, in rows that mcore-bridge has packed"
    env = environment("mindspeed", "core_r0.16.0", None)
    kwargs = {"root": str(context_folder), "algorithm": algorithm, **sizes}
    n = ParallelConfig(**sizes).model_size
    target = f"{__file__}:context_model"
    for rank in run_ranks(target, n, kwargs, env=env, timeout=400, bootstrap="trainer"):
        groups = "applied" if algorithm == "ring" else "not needed"
        assert rank["shims"] == [groups, "applied"]
        assert rank["logps"] <= TOLERANCE
        assert max(rank["trained"]["norm"], rank["trained"]["weights"]) <= TOLERANCE


def test_gated_delta_nets_exchange_heads(tmp_path):
    "Qwen3.5 with pictures; log-probs and trained weights are Hugging Face's"
    from cookbook_npu.data.tokenizer import build_tokenizer
    from cookbook_npu.model.tiny import build_tiny

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SIMULATOR)
        from test_context_parallel import picture_reference
    sizes = dict(hidden_size=64, num_layers=2, ffn_size=128, num_kv_heads=2)
    shape = TinyConfig(family="qwen3_5", **sizes)
    folder = build_tiny(shape, build_tokenizer(), tmp_path / "qwen3_5", seed=0)
    torch.save(picture_reference(folder), tmp_path / "qwen3_5.pt")
    kwargs = {"root": str(tmp_path), "algorithm": "ring", "context": 2}
    target = f"{__file__}:context_model"
    env = environment("mindspeed", "core_r0.16.0", None)
    for rank in run_ranks(target, 2, kwargs, env=env, timeout=400, bootstrap="trainer"):
        assert max(rank["logps"], *rank["weights"].values()) <= TOLERANCE


@pytest.fixture(scope="module")
def context_folder(tmp_path_factory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SIMULATOR)
        from test_model_equality import reference, tokenizer

    from cookbook_npu.model.tiny import build_tiny

    root = tmp_path_factory.mktemp("context")
    shape = TinyConfig(hidden_size=64, num_layers=2, ffn_size=128, num_kv_heads=4)
    folder = build_tiny(shape, tokenizer(), root / "qwen3", seed=0)
    torch.save(reference(folder), root / "qwen3.pt")
    return root
