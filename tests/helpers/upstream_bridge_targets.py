"""What the process of test_upstream_bridge.py runs: the records of Megatron-Bridge on its real sources.

`megatron.bridge` wants more packages than a laptop has. Its modules are imported one by one, without the
`__init__` of their packages (which import every model); where one of them cannot be imported here, the
members that a record looks at are taken out of its source.
"""

import ast
import importlib
import sys
import types
from pathlib import Path

import torch

from cookbook_npu.errors import ShimError
from cookbook_npu.npu.shims.megatron_core.imports import findable
from cookbook_npu.npu.shims.nvidia_bridge import TE_LAYERS, enter_nvidia_bridge
from cookbook_npu.npu.shims.registry import registry

CONVERSION, QWEN = "models.conversion", "models.qwen_vl.modelling_qwen3_vl"
WHOLE = (
    f"{CONVERSION}.utils",
    f"{QWEN}.transformer_block",
    f"{QWEN}.rope",
    f"{QWEN}.utils",
    "utils.fusions",
)
MEMBERS = {  # module -> class -> what the records look at
    f"{CONVERSION}.param_mapping": {
        "AutoMapping": (
            "_MODULE_TYPE_REGISTRY",
            "_FUSED_LAYER_NORM_COLUMN_PARALLEL_SUBSTRING",
            "register_module_type",
            "_detect_parallelism_type",
        )
    },
    f"{CONVERSION}.model_bridge": {
        "MegatronModelBridge": ("build_conversion_tasks", "load_weights_hf_to_megatron")
    },
    f"{CONVERSION}.auto_bridge": {"AutoBridge": ("to_megatron_provider",)},
    f"{QWEN}.model": {"Qwen3VLModel": ("forward",)},
}
LAYERS = (
    "TEColumnParallelLinear",
    "TELayerNormColumnParallelLinear",
    "TEColumnParallelGroupedLinear",
    "TERowParallelGroupedLinear",
    "TEDotProductAttention",
    "TELinear",
)


def packages(root: Path) -> None:
    "The packages below megatron.bridge as folders, nothing executed"
    for folder in [
        root,
        *(p.parent for p in root.rglob("__init__.py") if p.parent != root),
    ]:
        name = ".".join(["megatron", "bridge", *folder.relative_to(root).parts])
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = [str(folder)]


def absent(modules: dict[str, tuple[str, ...]]) -> None:
    "A third-party package that is not installed here, with empty classes for what is imported from it"
    if findable(next(iter(modules))):
        return
    for module, names in modules.items():
        found = sys.modules[module] = types.ModuleType(module)
        found.__path__ = []
        for name in names:
            setattr(found, name, type(name, (), {}))


def taken_out(root: Path, name: str) -> types.ModuleType:
    "A module with nothing but some members of its classes, from the real source"
    tree = ast.parse(root.joinpath(*name.split(".")).with_suffix(".py").read_text())
    header = "from __future__ import annotations\nimport json\nimport torch\n"
    header += "is_modelopt_dynamic_module = lambda module: False\n"
    classes = []
    for node in tree.body:
        wanted = MEMBERS[name].get(getattr(node, "name", ""), ())
        if wanted:
            node.body = [
                m
                for m in node.body
                if {getattr(m, "name", None), *targets(m)} & set(wanted)
            ]
            node.bases, node.keywords, node.decorator_list = [], [], []
            classes.append(ast.unparse(node))
    module = types.ModuleType(f"megatron.bridge.{name}")
    exec(header + "\n".join(classes), vars(module))
    return module


def targets(node: ast.stmt) -> set[str]:
    "Names that a statement of a class body assigns"
    if isinstance(node, ast.AnnAssign):
        return {ast.unparse(node.target)}
    return {ast.unparse(t) for t in node.targets} if isinstance(node, ast.Assign) else set()


def load(root: Path) -> dict[str, str]:
    "Every module that the records look at, and how it was had"
    packages(root)
    absent(
        {
            "omegaconf": ("OmegaConf", "DictConfig", "ListConfig"),
            "omegaconf._utils": ("is_structured_config",),
        }
    )
    how = {}
    for name in [*WHOLE, *MEMBERS]:
        try:
            importlib.import_module(f"megatron.bridge.{name}")
            how[name] = "imported"
        except ImportError as error:
            if name in WHOLE:
                raise
            sys.modules[f"megatron.bridge.{name}"] = taken_out(root, name)
            how[name] = f"taken out of its source: {error}"
    return how


def bind_mindspeed() -> None:
    "Megatron's layers under MindSpeed's names"
    layers = importlib.import_module(TE_LAYERS)
    for name in LAYERS:
        setattr(layers, name, type(f"MindSpeed{name}", (getattr(layers, name),), {}))


def deepstack_gradients() -> list[list[float]]:
    "Gradients of two deepstack features through the real block's recomputation"
    block = importlib.import_module(
        f"megatron.bridge.{QWEN}.transformer_block"
    ).Qwen3VLTransformerBlock
    names = ("fp8", "fp4", "distribute_saved_activations")
    config = types.SimpleNamespace(
        recompute_method="uniform", recompute_num_layers=1, **dict.fromkeys(names, False)
    )

    def layer(hidden_states, context, **_):
        return hidden_states * 2, context

    layers = [layer, lambda **kwargs: layer(**kwargs)]
    for number, one in enumerate(layers, 1):
        one.layer_number = number
    me = types.SimpleNamespace(
        config=config,
        num_layers_per_pipeline_rank=2,
        pre_process=True,
        _get_layer=layers.__getitem__,
    )
    me._deepstack_process = lambda *args: block._deepstack_process(me, *args)
    hidden = torch.ones(3, 1, 4, device="npu", requires_grad=True)
    seen = torch.tensor([[0, 1, 1]], dtype=torch.bool, device="npu")
    deep = [torch.ones(2, 4, device="npu", requires_grad=True) for _ in layers]
    first = (hidden, None, None, None, None, None, None)
    more = dict(
        visual_pos_masks=seen, deepstack_visual_embeds=deep, use_inner_fp8_context=False
    )
    if "padding_mask" in block._checkpointed_forward.__code__.co_varnames:
        more["padding_mask"] = None
    block._checkpointed_forward(me, *first, **more).sum().backward()
    return [d.grad.flatten().tolist() for d in deep]


def mask_types_agree() -> bool:
    "Whether get_rope_index gives an integer mask and a boolean one the same positions"
    module = sys.modules[f"megatron.bridge.{QWEN}.rope"]
    if not hasattr(module, "get_rope_index"):
        module = sys.modules[f"megatron.bridge.{QWEN}.utils"]
    ids = torch.tensor([[5, 1, 2, 2, 2, 2, 6, 7, 0, 0]])
    mask = (ids != 0).int()
    tokens = dict(
        spatial_merge_size=2, image_token_id=2, video_token_id=3, vision_start_token_id=1
    )
    grid = torch.tensor([[1, 4, 4]])
    found = [
        module.get_rope_index(
            **tokens, input_ids=ids, image_grid_thw=grid, attention_mask=m
        )[0]
        for m in (mask, mask.bool())
    ]
    return torch.equal(*found) and found[0][0, 0, 7] > found[0][0, 0, 1]


def outcome(work) -> object:
    "What a function returns, or the name of what it raises"
    try:
        return work()
    except (TypeError, RuntimeError) as error:
        return type(error).__name__


def contract(rank, world_size, root):
    "Enter the records on the real sources, look at what they repair, and take them back"
    how = load(Path(root))
    bind_mindspeed()
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    initialize_rng_tracker()
    torch.cuda.manual_seed(1)
    states = {s.name: (s.state, s.detail) for s in enter_nvidia_bridge()}
    verified = {
        name: registry[name].shim.verify()
        for name, (state, _) in states.items()
        if state == "applied"
    }
    repaired = outcome(deepstack_gradients)
    needed_again = {}
    for name in reversed(verified):
        registry.undo(name)
        try:
            needed_again[name] = registry[name].shim.needed()[0]
        except ShimError as error:
            needed_again[name] = str(error)
    return {
        "how": how,
        "states": states,
        "verified": verified,
        "needed_again": needed_again,
        "deepstack": repaired,
        "deepstack_without": outcome(deepstack_gradients),
        "mask_types_agree": mask_types_agree(),
    }
