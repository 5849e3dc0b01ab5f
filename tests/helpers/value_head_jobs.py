"""A critic over two tensor-parallel ranks with sequence parallelism: used by test_value_head.py."""

from types import SimpleNamespace

from cookbook_npu.config import ModelConfig, ParallelConfig
from cookbook_npu.model.megatron import init_parallel
from cookbook_npu.model.packing import pack
from cookbook_npu.train.critic import load_critic, packed_values

SAMPLES = [
    SimpleNamespace(prompt_ids=[2, 3, 4], response_ids=[5, 6]),
    SimpleNamespace(prompt_ids=[7], response_ids=[8, 9, 10, 11]),
]


def critic_gradients(rank: int, world_size: int, hf_path: str) -> dict:
    "Values, head, and gradients of parts that every rank holds whole"
    parallel = ParallelConfig(tensor=world_size)
    init_parallel(parallel, seed=rank)
    critic = load_critic(hf_path, ModelConfig(dtype="float32"), parallel, seed=7)
    value_R = packed_values(critic, pack(SAMPLES, critic.layout.row_multiple))
    critic.zero_grad()
    value_R.square().sum().backward()
    critic.finish_gradients()
    norm = critic.decoder.decoder.final_layernorm.weight
    words = critic.decoder.embedding.word_embeddings.weight
    found = {
        "values": value_R.detach(),
        "head": critic.head.detach(),
        "head gradient": critic.head.main_grad,
        "norm gradient": norm.main_grad,
        "embedding gradient": words.main_grad,
    }
    return {name: tensor.cpu().numpy() for name, tensor in found.items()}
