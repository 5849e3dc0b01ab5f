"""A model that wants nothing but placeholders of images and videos."""

from pathlib import Path

from safetensors.torch import load_file, save_file


def want_placeholders(folder: Path) -> Path:
    "Rewrite the head of a tiny Qwen3-VL: of every token's logits, one placeholder's is far above the others"
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    head_VH = weights["lm_head.weight"]
    wanted_H = 100 * head_VH[32]
    # one of both is positive, whatever the hidden state is
    head_VH[config.image_token_id] = wanted_H
    head_VH[config.video_token_id] = -wanted_H
    save_file(weights, file, metadata={"format": "pt"})
    return folder
