"""Hubs behind one interface: the real packages take the arguments we pass; pass rates agree with counting."""

import importlib.util
import inspect
import json
import random
import sys
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cookbook_npu.config import DataConfig
from cookbook_npu.data.pass_at_k import pass_at_k, pass_curve, tally
from cookbook_npu.data.prompts import load_prompts
from cookbook_npu.data.sample import Sample
from cookbook_npu.data.tokenizer import build_tokenizer
from cookbook_npu.errors import MissingError

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("repeatable")


def test_datasets_takes_the_arguments_we_pass():
    datasets = pytest.importorskip("datasets")
    assert {"path", "name", "split", "revision"} <= inspect.signature(
        datasets.load_dataset
    ).parameters.keys()


def test_modelscope_takes_the_arguments_we_pass():
    "Read from the source, because importing its data sets needs many packages"
    spec = importlib.util.find_spec("modelscope")
    if spec is None:
        pytest.skip("modelscope is not installed (pip install modelscope)")
    folder = next(iter(spec.submodule_search_locations))
    with open(f"{folder}/msdatasets/ms_dataset.py", encoding="utf-8") as file:
        source = file.read()
    head = source[source.index("def load(") :]
    head = head[: head.index(") ->")]
    for name in ("dataset_name:", "subset_name:", "split:", "version:"):
        assert name in head
    assert "def to_hf_dataset(self)" in source


def test_a_package_that_cannot_be_imported_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope.msdatasets", None)
    monkeypatch.setattr("cookbook_npu.data.datasets.check_reachable", lambda *args: None)
    with pytest.raises(MissingError, match=r"pip install 'modelscope\[datasets\]'"):
        load_prompts(DataConfig(prompt_data="modelscope://AI/gsm"), build_tokenizer())


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
        load_prompts(DataConfig(prompt_data=str(s), shuffle=False), build_tokenizer())
        for s in sources
    ]
    texts = {json.dumps([(p.text, p.label) for p in data.next_batch(9)]) for data in found}
    assert len(texts) == 1


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n, data):
    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    subsets = list(combinations([1] * c + [0] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(np.mean([any(s) for s in subsets]), abs=1e-9)


@given(st.integers(1, 400), st.data())
def test_pass_at_k_agrees_with_numpy_and_rises_with_k(n, data):
    "The published numpy form of Chen et al., figure 3"
    c = data.draw(st.integers(0, n))
    values = [pass_at_k(n, c, k) for k in range(1, n + 1)]
    for k in range(1, n + 1):
        want = 1.0 if n - c < k else 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1))
        assert values[k - 1] == pytest.approx(want, abs=1e-9)
    assert all(a <= b + 1e-12 for a, b in zip(values, values[1:], strict=False))
    assert values[0] == pytest.approx(c / n)


@given(
    st.dictionaries(
        st.text(max_size=3),
        st.lists(st.booleans(), min_size=4, max_size=8),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 9),
)
def test_pass_rates_do_not_depend_on_the_order_of_the_samples(groups, seed):
    fields = dict(
        prompt_ids=[1],
        response_ids=[],
        logprobs=[],
        loss_mask=[],
        versions=[],
        finish_reason="stop",
    )
    samples = [
        Sample(group_id=g, index=i, reward=float(r), correct=bool(r), **fields)
        for g, rewards in groups.items()
        for i, r in enumerate(rewards)
    ]
    before = tally(samples)
    random.Random(seed).shuffle(samples)
    assert tally(samples) == before == {g: (len(r), sum(r)) for g, r in groups.items()}
    assert pass_curve(before.values())[1] == pytest.approx(
        np.mean([np.mean(r) for r in groups.values()])
    )
