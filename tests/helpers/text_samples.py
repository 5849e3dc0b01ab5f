"""A response as an engine returns it, of which only the text matters."""

from typing import Any

from cookbook_npu.data.sample import Sample


def text_sample(text: str, label: Any = "4", **more: Any) -> Sample:
    "A sample of one token with a text to grade; `more`: other fields"
    fields = {"group_id": "p", "index": 0, "finish_reason": "stop", **more}
    return Sample(
        prompt_ids=[1],
        response_ids=[1],
        logprobs=[0.0],
        loss_mask=[1],
        versions=[0],
        text=text,
        label=label,
        **fields,
    )
