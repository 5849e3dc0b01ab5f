"""The tiny models of the package: their files, and which run starts from which."""

from dataclasses import replace

import pytest

from cookbook_npu.errors import DataError
from cookbook_npu.model import tiny
from cookbook_npu.model.tiny import SHIPPED, shipped_model, shipped_models
from cookbook_npu.recipes import RECIPES
from cookbook_npu.runs.smoke import SMOKE_LAYOUTS, smoke_config

MOST_BYTES = 9_300_000


def test_the_files_are_those_of_the_manifest_and_small():
    files = sorted(SHIPPED.glob("*.safetensors"))
    assert [file.stem for file in files] == sorted(shipped_models())
    assert all(model.weights() for model in shipped_models().values())
    assert sum(file.stat().st_size for file in files) <= MOST_BYTES


def test_every_recipe_of_a_tiny_model_starts_from_one_but_sft():
    found = {name: shipped_model(recipe()) for name, recipe in RECIPES.items()}
    found |= {f"smoke {name}": shipped_model(smoke_config(name)) for name in SMOKE_LAYOUTS}
    without = [name for name, model in found.items() if model is None]
    assert without == ["qwen3_4b_sft", "smollm2_grpo"]
    for name, recipe in RECIPES.items():
        assert shipped_model(recipe("cuda")) == found[name]


@pytest.mark.parametrize("content", [None, b"", b"version https://git-lfs.github.com"])
def test_a_changed_file_is_refused_by_name(tmp_path, monkeypatch, content):
    model = shipped_models()["arithmetic"]
    monkeypatch.setattr(tiny, "SHIPPED", tmp_path)
    if content is not None:
        (tmp_path / "arithmetic.safetensors").write_bytes(content)
    with pytest.raises(DataError, match="arithmetic.safetensors is not.*checksum") as error:
        model.weights()
    assert "git checkout" in error.value.remedy


def test_two_models_of_equal_skills_are_told_apart_by_their_tasks(monkeypatch):
    "A run gets the model with the fewest tasks"
    one = shipped_models()["arithmetic"]
    more = replace(one, name="more", tasks={**one.tasks, "counting": {}})
    monkeypatch.setattr(tiny, "shipped_models", lambda: {"more": more, "one": one})
    assert shipped_model(RECIPES["qwen3_4b_colocate"]()) == one
