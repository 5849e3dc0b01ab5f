"""Data files that are none: each ends in seconds, with an error that names the file and the line."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cookbook_npu.config import DataConfig
from cookbook_npu.data.datasets import read_path
from cookbook_npu.data.prompts import load_prompts
from cookbook_npu.data.tokenizer import build_tokenizer
from cookbook_npu.errors import DataError

GOOD = b'{"prompt": "1+1=", "label": "2"}\n'
LINES = {
    "brace": b"{",
    "list": b"[]",
    "null": b"null",
    "cut": b'{"prompt": "x"',
    "surrogate": b'{"prompt": "\\ud800", "label": "2"}',
    "surrogate in metadata": b'{"prompt": "?", "label": "2", "metadata": {"\\uDC00": 1}}',
    "integer": b'{"prompt": "?", "label": ' + b"9" * 5000 + b"}",
    "nested": b'{"prompt": ' + b"[" * 100_000,
    "long line": b'{"prompt": "' + b"x" * 10_000_000 + b'", "label": "2"}',
    "long prompt": b'{"prompt": "' + b"x" * 5_000_000 + b'", "label": "2"}',
    "zeros": bytes(5000),
    "not UTF-8": b'{"prompt": "\xff", "label": "2"}',
    "binary": bytes(range(1, 10)) * 100,
}


def load(path):
    return load_prompts(DataConfig(prompt_data=str(path)), build_tokenizer())


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_line_that_is_none_is_named(tmp_path, line):
    path = tmp_path / "train.jsonl"
    path.write_bytes(GOOD + line + b"\n" + GOOD)
    with pytest.raises(DataError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path} line 2")
    assert len(str(caught.value)) < 1000


def test_a_line_without_end_is_not_read_into_memory(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(GOOD)
    os.truncate(path, 1 << 40)  # a sparse file of a TiB
    with pytest.raises(DataError, match=f"{path} line 2 has more than 8 MiB"):
        load(path)


def folder(path):
    path.mkdir()


def dangling(path):
    path.symlink_to("nothing")


def loop(path):
    path.symlink_to(path.name)


@pytest.mark.timeout(120)  # opening a pipe would never return
@pytest.mark.parametrize("make", [os.mkfifo, folder, dangling, loop])
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_what_is_no_file_is_named_at_once(tmp_path, make, ending):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_bytes(GOOD)
    path = tmp_path / "data" / f"b.{ending}"
    make(path)
    for source in (path, tmp_path / "data"):
        with pytest.raises(DataError, match=str(path)):
            load(source)


def test_a_link_to_a_file_is_read(tmp_path):
    "The caches of hubs consist of links"
    (tmp_path / "blob").write_bytes(GOOD)
    (tmp_path / "train.jsonl").symlink_to("blob")
    assert len(load(tmp_path / "train.jsonl")) == 1


def test_damaged_parquet_is_named_or_read(tmp_path):
    "Any cut and any changed bit; without checksums in the file, another value cannot be known"
    rows = [
        {"prompt": f"{i}+{i}=", "label": str(2 * i), "metadata": json.dumps({"i": i})}
        for i in range(9)
    ]
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    written = path.read_bytes()
    refused = 0
    damaged = [written[:size] for size in range(0, len(written), 41)]
    for bit in range(0, 8 * len(written), 71):
        changed = bytearray(written)
        changed[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(changed))
    for data in damaged:
        path.write_bytes(data)
        try:
            list(read_path(path))
        except DataError as error:
            assert error.what.startswith(f"{path} is not a readable parquet file after row")
            refused += 1
    assert refused > len(damaged) // 3


def test_page_checksums_are_compared(tmp_path):
    path = tmp_path / "train.parquet"
    table = pa.Table.from_pylist([{"prompt": f"{i}+{i}=", "label": "?"} for i in range(9)])
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(table, path, write_page_checksum=True, **plain)
    written = path.read_bytes()
    assert written.count(b"3+3=") == 1
    path.write_bytes(written.replace(b"3+3=", b"3+4="))
    with pytest.raises(DataError, match="after row 0: .*CRC"):
        list(read_path(path))
