"""The shims of `npu.shims.mcore_bridge`: each check passes with its shim and fails without."""

import pytest
from preloaded_jobs import TRAINER_RANK
from proof import each

from cookbook_npu.config import TinyConfig
from cookbook_npu.data.tokenizer import build_tokenizer
from cookbook_npu.model.tiny import build_tiny

LOAD = """
import os, torch, torch.distributed as dist
from cookbook_npu.config import ModelConfig, ParallelConfig
from cookbook_npu.model import megatron
def tiny(family):
    parallel = ParallelConfig(tensor=int(os.environ["WORLD_SIZE"]))
    megatron.init_parallel(parallel, seed=0)
    return megatron.load_model(root/family, ModelConfig(dtype="float32"), parallel)
def same_on_all_ranks(tensor):
    copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, tensor.contiguous())
    return all(torch.allclose(copy, tensor, rtol=1e-4) for copy in copies)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    "Code that loads a tiny model of a family over the ranks"
    root = tmp_path_factory.mktemp("tiny")
    sizes = dict(hidden_size=64, num_layers=2, ffn_size=64)
    for family in ("qwen3", "qwen3_vl", "qwen3_5"):
        config = TinyConfig(family=family, **sizes)
        build_tiny(config, build_tokenizer(), root / family, seed=0)
    return f"from pathlib import Path\nroot = Path({str(root)!r})" + LOAD


# fmt: off
test_shim = each(
    # The check imports the module that fails, then drops it, so that the second run imports it again
    ("mcore_bridge.triton_modules", "import of triton halted", """
        import importlib.util, sys
        def check():
            assert importlib.util.find_spec("triton") is None
            from megatron.core.ssm import mamba_mixer
            for name in [n for n in sys.modules if n.startswith("megatron.core.ssm")]: del sys.modules[name]
            return sys.modules["triton"] is None
    """, dict(bootstrap="cookbook_npu.npu.shims.mcore_bridge:without_triton")),
    ("mcore_bridge.rope_initialiser", "rope_theta", """
        import torch
        from types import SimpleNamespace as Config
        from transformers import Qwen3Config, Qwen3ForCausalLM
        from cookbook_npu.npu.shims.bootstrap import model_ready
        heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
        sizes = dict(hidden_size=32, num_hidden_layers=1, intermediate_size=32, vocab_size=64)
        rope = dict(rope_type="default", rope_theta=1e6)
        config = Qwen3Config(**sizes, **heads, rope_parameters=rope)
        before = Qwen3ForCausalLM(config).model.rotary_emb.inv_freq
        from mcore_bridge.model.rope import get_rope_inv_freq
        # what building a Megatron model does
        get_rope_inv_freq(Config(rope_scaling=None), text_config=Config(rope_theta=1e6, head_dim=16))
        model_ready()
        def check():
            return torch.equal(before, Qwen3ForCausalLM(config).model.rotary_emb.inv_freq)
    """, dict(preload=TRAINER_RANK)),
    ("mcore_bridge.value_head_rows", "check() returned False", """
        import torch
        from types import SimpleNamespace
        from mcore_bridge.bridge.gpt_bridge import GPTBridge
        from cookbook_npu.npu.shims.bootstrap import model_ready
        head, vocabulary = torch.ones(1, 4), torch.ones(5, 4)
        rank = SimpleNamespace(tp_size=2, tp_rank=1)
        model_ready()
        def check():
            whole = GPTBridge._split_tp(rank, head, None, False, is_embedding=True)
            part = GPTBridge._split_tp(rank, vocabulary, 0, False, is_embedding=True)
            assert part.shape == (3, 4)  # still padded, then split
            return torch.equal(whole, head)
    """, dict(preload=TRAINER_RANK)),
    ("mcore_bridge.lora_linear_classes", "check() returned False", """
        import torch
        from mcore_bridge.tuners import lora, patcher
        from cookbook_npu.npu.shims.bootstrap import model_ready
        class TERowParallelLinear(torch.nn.Module):
            "As MindSpeed's: of no class that mcore-bridge adapts"
        patcher.is_torch_npu_available = lambda: True
        lora.TERowParallelLinear = TERowParallelLinear
        model_ready()
        def check():
            try:
                return patcher.dispatch_megatron(TERowParallelLinear(), "default") is not None
            except AttributeError as error:  # adapted: a real layer has a config
                return "config" in str(error)
    """, dict(preload=TRAINER_RANK)),
)
# fmt: on


# fmt: off
test_shim_of_a_model = each(
    ("mcore_bridge.gated_delta_sums", "check() returned False", """
from cookbook_npu.npu.shims.mcore_bridge import oversummed_weights
model = tiny("qwen3_5")
def check():
    return oversummed_weights() == []
    """, dict(ranks=2, preload=TRAINER_RANK)),
    ("mcore_bridge.gated_delta_context", "does not support context parallel", """
from mcore_bridge import ModelConfig as BridgeConfig, hf_to_mcore_config
from transformers import AutoConfig
from cookbook_npu.npu.shims.bootstrap import parallel_ready
parallel = ParallelConfig(context=2)
megatron.init_parallel(parallel, seed=0)
options = megatron.run_options(ModelConfig(dtype="float32"), parallel)
values = hf_to_mcore_config(AutoConfig.from_pretrained(root/"qwen3_5")) | options
parallel_ready(values)
def check(): return BridgeConfig(**values).context_parallel_size == 2
    """, dict(ranks=2, preload=TRAINER_RANK)),
    # Most of an image lies in the first rank's half of the row: the gradient is whole on every rank
    ("mcore_bridge.deepstack_sums", "check() returned False", """
model = tiny("qwen3_vl")
image = model.config.hf_config.image_token_id
ids = torch.tensor([[3, image, image, image, image, 4, 5, 6]], device="npu")
pixels = torch.randn(16, 1536, generator=torch.Generator().manual_seed(0)).to("npu")
grid = torch.tensor([[1, 4, 4]], device="npu")
positions = torch.arange(8, device="npu").expand(3, 1, 8)
merger = model.module.visual.visual.deepstack_merger_list[0]
def check():
    model.zero_grad()
    logits = model.ddp(input_ids=ids, position_ids=positions, attention_mask=None,
                       pixel_values=pixels, image_grid_thw=grid)
    logits.float().sum().backward()
    grad = merger.linear_fc1.weight.main_grad
    assert grad.abs().max() > 1e-4
    return same_on_all_ranks(grad)
    """, dict(ranks=2, preload=TRAINER_RANK)),
    ("mcore_bridge.vocabulary_marks", "check() returned False", """
model = tiny("qwen3")
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate as counts
def check(): return counts(model.head) and getattr(model.head, "partition_dim", None) == 0
    """, dict(ranks=2, preload=TRAINER_RANK)),
    ("mcore_bridge.value_head", "is invalid for input of size", """
from cookbook_npu.npu.shims.bootstrap import model_ready
from mcore_bridge import ModelConfig as BridgeConfig, get_mcore_model, hf_to_mcore_config
from transformers import AutoConfig
folder = root/"qwen3"
megatron.init_parallel(ParallelConfig(), seed=0)
hf = AutoConfig.from_pretrained(folder)
assert hf.tie_word_embeddings
options = megatron.run_options(ModelConfig(dtype="float32"), ParallelConfig())
critic_options = {"task_type": "seq_cls", "num_labels": 1}
config = BridgeConfig(**{**hf_to_mcore_config(hf), **options, **critic_options})
critic = get_mcore_model(config)[0].to(megatron.local_device())
model_ready(critic)
# mcore-bridge leaves the head uninitialised: its memory may hold NaN, which is never equal to itself
torch.nn.init.normal_(critic.output_layer.weight)
head = critic.output_layer.weight.clone()
ids = torch.arange(3, 15).view(2, 6).to("npu")
positions = torch.arange(6, device="npu").expand(2, 6)
def check():
    config.bridge.load_weights([critic], str(folder))
    assert torch.equal(critic.output_layer.weight, head)
    assert not config.untie_embeddings_and_output_weights
    values = critic(input_ids=ids, position_ids=positions, attention_mask=None)
    exported = dict(config.bridge.export_weights([critic]))
    return values.shape == (2, 6, 1) and "score.weight" in exported
    """, dict(preload=TRAINER_RANK)),
    ("mcore_bridge.lora_layers", "NPU LoRA path", """
from cookbook_npu.config import LoraConfig
from mcore_bridge.tuners import lora as layers
layers.is_torch_npu_available = lambda: True  # as with torch_npu installed
parallel = ParallelConfig()
megatron.init_parallel(parallel, seed=0)
adapter = LoraConfig(rank=2)
folder = root/"qwen3"
model = megatron.load_model(folder, ModelConfig(dtype="float32"), parallel, lora=adapter)
ids = torch.arange(3, 15).view(2, 6)
def check():
    return bool(model.logits(ids).isfinite().all())
    """, dict(preload=TRAINER_RANK)),
    fixture="tiny",
)
# fmt: on
