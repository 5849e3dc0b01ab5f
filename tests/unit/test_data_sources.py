"""Records from every kind of file and hub: the real packages take the arguments we pass."""

import inspect
import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cookbook_npu.config import DataConfig
from cookbook_npu.data.conversations import ConversationFormat, ConversationReader
from cookbook_npu.data.prompts import PromptReader
from cookbook_npu.data.tokenizer import build_tokenizer


def test_datasets_takes_the_arguments_we_pass():
    datasets = pytest.importorskip("datasets")
    assert {"path", "name", "split", "revision"} <= inspect.signature(
        datasets.load_dataset
    ).parameters.keys()


WORDS = st.text("ab é\n/'{", min_size=1, max_size=5).map(lambda text: f"a{text}b")
# one key each: a table gives the keys of all objects one order, and cannot hold an empty one
ARGUMENTS = st.one_of(
    st.fixed_dictionaries({"x": st.integers(0, 9)}), st.fixed_dictionaries({"city": WORDS})
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
    for number in range(draw(st.integers(1, 4))):
        arguments = draw(ARGUMENTS)
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        chat = [{"role": "user", "content": f"{number}{draw(WORDS)}"}]
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
            prompt_data=source, apply_chat_template=True, max_prompt_tokens=10_000
        )
        read = PromptReader(config, tokenizer).read(source).prompts
        form = ConversationFormat(tokenizer)
        chats, *_ = ConversationReader(config, form, 10_000).read(source)
        found.append(
            [(p.text, p.ids, p.label, p.metadata, p.tools) for p in read]
            + [(c.text, c.ids, c.loss_mask) for c in chats]
        )
    assert len(found[0]) == 2 * len(records)
    assert found == [found[0]] * len(sources)
