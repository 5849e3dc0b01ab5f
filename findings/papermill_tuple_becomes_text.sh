#!/usr/bin/env bash
# A tuple that is given to papermill arrives in the notebook as a text, and no error says so.
#
# papermill 2.7.0 translates lists, dicts, numbers and texts into Python literals; any other type
# is written as the text of its str(). `parameters={"steps": (1, 2)}` gives the notebook the
# string "(1, 2)", whose first element is "(". Lists inside of lists keep their type.
#
# Seen on 2026-11-28 (papermill 2.7.0):
#   tuple: str '(1, 2)'
#   list:  list [1, 2]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check papermill==2.7.0 ipykernel==7.4.0
cd "$folder"
export PATH=$folder/venv/bin:$PATH JUPYTER_PREFER_ENV_PATH=1
python - <<'P' 2>/dev/null
import nbformat, papermill
notebook = nbformat.v4.new_notebook(cells=[
    nbformat.v4.new_code_cell("a = b = None", metadata={"tags": ["parameters"]}),
    nbformat.v4.new_code_cell("print(type(a).__name__, repr(a))\nprint(type(b).__name__, repr(b))"),
])
notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "python3", "language": "python"}
nbformat.write(notebook, "in.ipynb")
done = papermill.execute_notebook(
    "in.ipynb", "out.ipynb", parameters={"a": (1, 2), "b": [1, 2]}, progress_bar=False
)
first, second = done.cells[-1].outputs[0]["text"].splitlines()
print("tuple:", first)
print("list: ", second)
assert (first, second) == ("str '(1, 2)'", "list [1, 2]")
P
