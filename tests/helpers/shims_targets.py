"""A tiny GPT of megatron-core, trained after `bootstrap("trainer")` and nothing else."""

import torch
import torch.distributed as dist


def _config(tensor, sequence, recompute, dtype, dropout, fusion):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=8,
        qk_layernorm=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        tensor_model_parallel_size=tensor,
        sequence_parallel=sequence,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        gradient_accumulation_fusion=fusion,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=True,
        **(
            dict(
                recompute_granularity="full",
                recompute_method="uniform",
                recompute_num_layers=1,
            )
            if recompute
            else {}
        ),
    )


def _model(config, layers):
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module

    te = layers == "transformer_engine"
    spec = (
        get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
        if te
        else get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    )
    model = GPTModel(
        config,
        spec,
        vocab_size=64,
        max_sequence_length=32,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).cuda()
    return Float16Module(config, model) if config.bf16 else model


def init(tensor):
    import os

    from megatron.core import parallel_state, tensor_parallel

    from cookbook_npu.npu.shims.bootstrap import parallel_ready

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor)
    torch.manual_seed(7)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    parallel_ready({"tensor_model_parallel_size": tensor})


def fill(model):
    """Weights that depend on the name of a parameter and on the rank only, not on how layers initialise
    themselves.
    """
    import zlib

    from megatron.core import parallel_state

    for name, p in model.named_parameters():
        whole = not getattr(p, "tensor_model_parallel", False) and p.dim() == 1
        slice_ = 0 if whole else parallel_state.get_tensor_model_parallel_rank()
        noise = (
            torch.randn(
                p.shape,
                generator=torch.Generator().manual_seed(zlib.crc32(name.encode()) + slice_),
            )
            / 10
        )
        p.data.copy_(noise + 1 if p.dim() == 1 else noise)
    return model


def train(
    rank,
    world_size,
    tensor=1,
    sequence=False,
    layers="transformer_engine",
    recompute=False,
    dtype="float32",
    dropout=0.0,
    fusion=False,
    steps=3,
    filled=False,
    offload=False,
):
    """Losses and gradient norms of a few steps of a tiny GPT with the distributed optimizer."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from cookbook_npu.npu.shims.bootstrap import model_ready

    init(tensor)
    dtype = getattr(torch, dtype)
    config = _config(tensor, sequence, recompute, dtype, dropout, fusion)
    model = fill(_model(config, layers)) if filled else _model(config, layers)
    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
    )
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        use_distributed_optimizer=True,
        clip_grad=1.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        optimizer_cpu_offload=offload,
        optimizer_offload_fraction=float(offload),
        use_precision_aware_optimizer=offload,
        overlap_cpu_optimizer_d2h_h2d=offload,
    )
    optimizer = get_megatron_optimizer(settings, [ddp])
    report = model_ready(ddp)
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1)).cuda()
    positions = torch.arange(16, device="cuda")[None].expand(2, -1)
    mask = torch.ones(16, 16, dtype=torch.bool, device="cuda").triu(1)[None, None]
    history = []
    for _ in range(steps):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        loss = ddp(ids, positions, mask, labels=ids).float().mean()
        loss.backward()
        finalize_model_grads([ddp])
        ok, norm, _ = optimizer.step()
        assert ok
        history.append((loss.item(), float(norm)))
    assert {p.device.type for p in ddp.parameters()} == {
        "npu"
    } and dist.get_backend() == "hccl"
    return history, [(row["name"], row["state"]) for row in report]
