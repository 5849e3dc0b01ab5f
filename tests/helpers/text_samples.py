"""Responses as an engine returns them, of which only the text or the tokens matter."""

from typing import Any

from cookbook_npu.data.sample import Sample


def token_sample(
    number: int,  # two make a group
    prompt: list[int],
    response: list[int],
    logprob: float = -1.0,  # of each token
    **more: Any,  # other fields, or other values of these
) -> Sample:
    "A response of the policy alone, sampled with the first weights"
    n = len(response)
    fields = {"group_id": f"g{number // 2}", "index": number % 2, "finish_reason": "stop"}
    fields |= {"prompt_ids": prompt, "response_ids": response, "logprobs": [logprob] * n}
    return Sample(**fields | {"loss_mask": [1] * n, "versions": [0] * n} | more)


def text_sample(text: str, label: Any = "4", **more: Any) -> Sample:
    "A sample of one token with a text to grade; `more`: other fields"
    fields = {"group_id": "p", "text": text, "label": label, **more}
    return token_sample(0, [1], [1], 0.0, **fields)
