#!/usr/bin/env bash
# datasets 5 writes a column of mixed types as JSON texts; pyarrow gives the texts back.
#
# Labels such as 4, "Paris" and [1, 2] in one JSONL column load without an error in datasets 5.2.0 as
# a column of its type Json. `to_parquet` stores it with Arrow's extension type arrow.json. A reader
# that uses pyarrow's `to_pylist` gets the JSON text: the label Paris comes with its quotation
# marks, and no answer equals it. `load_dataset` of the same file gives the values.
#
# Seen on 2026-11-28 (datasets 5.2.0, pyarrow 26.0.1):
#   pyarrow:  ['4', '"Paris"', '[1,2]']
#   datasets: [4, 'Paris', [1, 2]]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check datasets==5.2.0 pyarrow==26.0.1
cd "$folder"
export HF_HOME=$folder/home HF_DATASETS_OFFLINE=1
printf '{"label": 4}\n{"label": "Paris"}\n{"label": [1, 2]}\n' > rows.jsonl
venv/bin/python - <<'P' 2>/dev/null
import pyarrow.parquet
from datasets import load_dataset
load_dataset("json", data_files="rows.jsonl", split="train").to_parquet("rows.parquet")
texts = pyarrow.parquet.read_table("rows.parquet")["label"].to_pylist()
values = load_dataset("parquet", data_files="rows.parquet", split="train")["label"][:]
print("pyarrow: ", texts)
print("datasets:", values)
assert texts == ["4", '"Paris"', "[1,2]"]
assert values == [4, "Paris", [1, 2]]
P
