"""Hubs behind one interface: the real packages take the arguments we pass; pass rates agree with counting."""

import inspect
import json

import pytest
from hypothesis import settings

from cookbook_npu.config import DataConfig
from cookbook_npu.data.prompts import load_prompts
from cookbook_npu.data.tokenizer import build_tokenizer

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("repeatable")


def test_datasets_takes_the_arguments_we_pass():
    datasets = pytest.importorskip("datasets")
    assert {"path", "name", "split", "revision"} <= inspect.signature(
        datasets.load_dataset
    ).parameters.keys()


def test_the_same_rows_from_jsonl_parquet_folder_and_hub(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = [{"question": f"{i}+{i}?", "answer": f"so\n#### {2 * i}"} for i in range(9)]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "b").mkdir()
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "b" / "train.parquet")
    sources = [
        tmp_path / "a" / "train.jsonl",
        tmp_path / "b" / "train.parquet",
        tmp_path / "a",
        f"hf://{tmp_path}/b?split=train",
    ]
    found = [
        load_prompts(DataConfig(prompt_data=str(s)), build_tokenizer()) for s in sources
    ]
    texts = {json.dumps([(p.text, p.label) for p in data.next_batch(9)]) for data in found}
    assert len(texts) == 1
