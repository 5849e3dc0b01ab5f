"Values of models that tests compare: references of transformers, gradients, distances, bits."

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from cookbook_npu.config import OptimConfig
from cookbook_npu.data.tokenizer import find_tokenizer, unsampled_token_ids

ADAM_EPS = 1e-4  # a tiny gradient does not become a step


def hf_model(folder: Path) -> Any:
    "The model of a folder in float32, as anybody would load it"
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    sees = (folder / "preprocessor_config.json").is_file()
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32)


def response_logp(
    hf: Any,  # a model of transformers
    s: Any,  # has prompt_ids and response_ids
    temperature: float = 1.0,
    images: Sequence[Any] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    "Log-probs of the response of one sample, by itself, [T], and of the whole vocabulary, [T, V]"
    ids_1T = torch.tensor([[*s.prompt_ids, *s.response_ids]])
    inputs = {}
    if images:
        pixels = [torch.as_tensor(image.pixel_values) for image in images]
        inputs["pixel_values"] = torch.cat(pixels)
        inputs["image_grid_thw"] = torch.tensor([image.grid_thw for image in images])
        if int(version("transformers").split(".")[0]) >= 5:
            inputs["mm_token_type_ids"] = (ids_1T == hf.config.image_token_id).int()
    logits_TV = hf(input_ids=ids_1T, **inputs).logits[0, len(s.prompt_ids) - 1 : -1]
    logits_TV = logits_TV / temperature
    # what a policy never samples has no share
    never = unsampled_token_ids(hf.config, find_tokenizer(hf.name_or_path))
    logits_TV[:, list(never)] = -1e30
    logp_TV = logits_TV.log_softmax(-1)
    return logp_TV.gather(1, ids_1T[0, len(s.prompt_ids) :, None])[:, 0], logp_TV


def plain_adamw(
    hf: Any, loss: Callable[[], torch.Tensor], optim: OptimConfig, steps: int
) -> list[float]:
    "Train a model of transformers on the host; the gradient norms"
    groups = [
        {
            "params": [p for p in hf.parameters() if (p.dim() > 1) == decays],
            "weight_decay": optim.weight_decay * decays,
        }
        for decays in (True, False)
    ]
    betas = (0.9, optim.beta2)
    adam = torch.optim.AdamW(groups, lr=optim.learning_rate, betas=betas, eps=ADAM_EPS)
    norms = []
    for _ in range(steps):
        hf.zero_grad()
        loss().backward()
        for p in hf.parameters():  # of a tower without images: weight decay alone
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norm = torch.nn.utils.clip_grad_norm_(hf.parameters(), optim.clip_grad)
        norms.append(norm.item())
        adam.step()
    return norms


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
