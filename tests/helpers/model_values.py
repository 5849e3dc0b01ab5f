"Values of models that tests compare: gradients under the names of weights, distances, bits."

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def gradients_as_weights(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    "Within the block the parameters hold their gradients, to be exported as if they were the weights"
    kept = [(p, p.data) for p in parameters]
    for p, weight in kept:
        grad = getattr(p, "main_grad", None)
        p.data = torch.zeros_like(weight) if grad is None else grad.clone()
    yield
    for p, weight in kept:
        p.data = weight


def hf_gradients(model) -> dict[str, torch.Tensor]:
    "The gradient buffer under Hugging Face names"
    from cookbook_npu.model.megatron import export_weights

    with gradients_as_weights(model.module.parameters()):
        return {n: t.cpu().clone() for n, t in export_weights(model)}


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.detach().cpu().float() - b.float()).abs().max().item()


def digest(module: torch.nn.Module) -> str:
    "The bits of this rank's weights"
    bits = hashlib.blake2b()
    for parameter in module.parameters():
        bits.update(parameter.detach().cpu().numpy().tobytes())
    return bits.hexdigest()
