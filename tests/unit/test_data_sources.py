"""Hubs behind one interface: the real packages take the arguments we pass; pass rates agree with counting."""

import importlib.util
import inspect
import json
import random
import sys
from contextlib import suppress
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cookbook_npu.config import DataConfig
from cookbook_npu.data.conversations import ConversationFormat, ConversationReader
from cookbook_npu.data.pass_at_k import pass_at_k, pass_curve, tally
from cookbook_npu.data.prompts import load_prompts, load_source
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


WORDS = st.text("ab é\n/'{", min_size=1, max_size=5).map(lambda text: f"a{text}b")
# one key each: a table gives the keys of all objects one order, and cannot hold an empty one
ARGUMENTS = st.one_of(
    st.fixed_dictionaries({"x": st.integers(0, 9)}),
    st.fixed_dictionaries({"city": WORDS}),
)
NUMBERS = st.sampled_from([0.1, 2.35, 1e-07])
LABELS = {"whole": st.integers(0, 99), "texts": WORDS, "numbers": NUMBERS}
LABELS["mixed"] = st.one_of(list(LABELS.values()))
LABELS["lists"] = st.lists(WORDS, min_size=1, max_size=2)
LEVEL = {"level": st.integers(1, 5)}
METADATA = st.fixed_dictionaries(LEVEL, optional={"topic": WORDS, "more": ARGUMENTS})


def schema(name: str, arguments: dict) -> dict:
    properties = {key: {"type": "string", "description": key} for key in arguments}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@st.composite
def tool_records(draw, label: st.SearchStrategy) -> list[dict]:
    "Records whose objects have different keys"
    records = []
    for _ in range(draw(st.integers(1, 4))):
        arguments = draw(ARGUMENTS)
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        chat = [{"role": "user", "content": draw(WORDS)}]
        if draw(st.booleans()):
            chat += [{"role": "assistant", "content": "", "tool_calls": [call]}]
            chat += [{"role": "tool", "content": draw(WORDS)}]
        answer = {"role": "assistant", "content": draw(WORDS)}
        answer |= draw(st.sampled_from([{}, {"reasoning_content": "hm"}, {"weight": 0}]))
        first = {"role": "assistant", "content": "a"}
        record = {"prompt": chat, "messages": [chat[0], first, *chat, answer]}
        record |= {"label": draw(label), "tools": [schema("f", draw(ARGUMENTS))]}
        records.append(record | {"metadata": draw(METADATA)})
    return records


@pytest.mark.parametrize("labels", LABELS)
@given(st.data())
@settings(max_examples=6, phases=[Phase.generate])
def test_the_same_samples_from_every_kind_of_file(tmp_path_factory, labels, data):
    "JSONL, a table of pyarrow, the same with narrow numbers, one of datasets, and the hub"
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq
    import trl

    datasets.disable_progress_bars()
    records = data.draw(tool_records(LABELS[labels]))
    tokenizer = build_tokenizer()
    templates = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (templates / "qwen3_5_think.jinja").read_text()
    folder = tmp_path_factory.mktemp("kinds")
    files = [folder / name for name in ("a.jsonl", "b.parquet", "c.parquet", "d.parquet")]
    files[0].write_text("".join(json.dumps(record) + "\n" for record in records))
    datasets.Dataset.from_list(records, on_mixed_types="use_json").to_parquet(files[1])
    (folder / "hub").mkdir()
    (folder / "hub" / "train.parquet").write_bytes(files[1].read_bytes())
    wire = json.loads(json.dumps(records))  # as OpenAI sends it
    for call in [c for r in wire for m in r["messages"] for c in m.get("tool_calls", ())]:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    for record in wire:
        record["tools"] = json.dumps(record["tools"])
    wired = folder / "wire.jsonl"
    wired.write_text("".join(json.dumps(record) + "\n" for record in wire))
    sources = [*map(str, files[:2]), f"hf://{folder}/hub", str(wired)]
    with suppress(pa.ArrowException):  # labels of several types
        table = pa.Table.from_pylist(records)
        pq.write_table(table, files[2])
        at, kind = table.schema.get_field_index("label"), table.schema.field("label").type
        if kind == pa.float64():
            table = table.set_column(at, "label", table["label"].cast(pa.float32()))
        pq.write_table(table, files[3])
        sources += [*map(str, files[2:])]
    found = []
    for source in sources:
        config = DataConfig(
            prompt_data=source,
            apply_chat_template=True,
            deduplicate=False,
            max_prompt_tokens=10_000,
        )
        read = load_source(source, config, tokenizer).prompts
        form = ConversationFormat(tokenizer)
        chats, _ = ConversationReader(config, form, 10_000).read(source)
        found.append(
            [(p.text, p.ids, p.label, p.metadata, p.tools) for p in read]
            + [(c.text, c.ids, c.loss_mask) for c in chats]
        )
    assert len(found[0]) == 2 * len(records)
    assert found == [found[0]] * len(sources)


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
