"A critic over two ranks equals plain transformers: values, and gradients from head to embedding"

import torch
from ranks import run_trainers
from value_head_jobs import SAMPLES

from cookbook_npu.config import TinyConfig


def test_a_critic_over_two_ranks_equals_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    from cookbook_npu.data.tokenizer import build_tokenizer
    from cookbook_npu.model.tiny import build_tiny

    hf_path = build_tiny(TinyConfig(), build_tokenizer(), tmp_path / "tiny", seed=0)
    env = {"COOKBOOK_NPU_SIMULATE": "1", "COOKBOOK_NPU_SIM_DEVICES": "2"}
    target = "value_head_jobs:critic_gradients"
    ranks = run_trainers(target, 2, env, hf_path=str(hf_path))
    hf = AutoModelForCausalLM.from_pretrained(hf_path, dtype=torch.float32)
    head_1H = torch.from_numpy(ranks[0]["head"]).requires_grad_()
    values = []
    for sample in SAMPLES:
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        hidden_TH = hf.model(input_ids=ids).last_hidden_state[0]
        values.append((hidden_TH[len(sample.prompt_ids) - 1 : -1] @ head_1H.t())[:, 0])
    value_R = torch.cat(values)
    value_R.square().sum().backward()
    words = hf.model.embed_tokens.weight.grad
    for rank in ranks:
        assert (rank["head"] == ranks[0]["head"]).all()
        wanted = {
            "values": value_R.detach(),
            "head gradient": head_1H.grad,
            "norm gradient": hf.model.norm.weight.grad,
        }
        for name, tensor in wanted.items():
            assert tensor.abs().max() > 1e-3, name
            assert abs(rank[name] - tensor.numpy()).max() < 1e-5, name
    shards = [torch.from_numpy(rank["embedding gradient"]) for rank in ranks]
    assert (torch.cat(shards)[: len(words)] - words).abs().max() < 1e-5
