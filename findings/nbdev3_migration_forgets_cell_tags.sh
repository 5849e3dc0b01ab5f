#!/usr/bin/env bash
# nbdev's migration drops the list of cell metadata to keep; the next clean removes papermill's tag.
#
# In settings.ini, `allowed_cell_metadata_keys = tags` makes nbdev-clean keep the tags of cells.
# nbdev 3.3.26 knows the same key in [tool.nbdev] of pyproject.toml, but its nbdev-migrate-config
# does not copy it (nor `allowed_metadata_keys`), without a message. After the migration,
# nbdev-clean, which its git hooks call, removes the tag `parameters`: papermill then puts its
# parameters into a new first cell, and the notebook's own defaults overwrite them.
#
# Seen on 2026-11-30 (nbdev 2.4.14 before, 3.3.26 after; papermill 2.7.0):
#   cleaned by 2.4.14:         {'tags': ['parameters']}
#   migrated, cleaned:         {}
#   steps given as 5:          1
#   key added by hand:         {'tags': ['parameters']}
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/2.4.14"
"$folder/2.4.14/bin/pip" install --quiet --disable-pip-version-check nbdev==2.4.14 \
  execnb==0.1.18 fastcore==1.14.5 ghapi==1.1.1
python3 -m venv "$folder/3.3.26"
"$folder/3.3.26/bin/pip" install --quiet --disable-pip-version-check nbdev==3.3.26 \
  papermill==2.7.0 ipykernel==7.4.0
mkdir -p "$folder/project/nbs" "$folder/project/demo"
cd "$folder/project"
export JUPYTER_PREFER_ENV_PATH=1
echo '__version__ = "0.0.1"' > demo/__init__.py
cat > settings.ini <<'S'
[DEFAULT]
repo = demo
lib_name = demo
lib_path = demo
nbs_path = nbs
version = 0.0.1
min_python = 3.11
license = apache2
user = me
author = A. Person
author_email = a@example.org
description = A demo
keywords = nbdev
branch = main
copyright = 2026, A. Person
allowed_cell_metadata_keys = tags
S
cat > notebook.py <<'P'
import sys, nbformat
path = "nbs/00_demo.ipynb"
if sys.argv[1] == "write":
    cell = nbformat.v4.new_code_cell("steps = 1", metadata={"tags": ["parameters"]})
    shown = nbformat.v4.new_code_cell("print(steps)")
    notebook = nbformat.v4.new_notebook(cells=[cell, shown])
    notebook.metadata["kernelspec"] = {
        "name": "python3", "display_name": "python3", "language": "python"
    }
    nbformat.write(notebook, path)
elif sys.argv[1] == "run":
    import papermill
    done = papermill.execute_notebook(path, None, parameters={"steps": 5}, progress_bar=False)
    print(done.cells[-1].outputs[0]["text"].strip())
else:
    print(dict(nbformat.read(path, 4).cells[0].metadata))
P
old=$folder/2.4.14/bin new=$folder/3.3.26/bin
"$new/python" notebook.py write
"$old/nbdev_clean"
kept=$("$new/python" notebook.py show)
"$new/nbdev-migrate-config" > /dev/null
rm settings.ini
"$new/nbdev-clean"
migrated=$("$new/python" notebook.py show)
ran=$(PATH=$new:$PATH "$new/python" notebook.py run 2> /dev/null)
echo 'allowed_cell_metadata_keys = ["tags"]' >> pyproject.toml
"$new/python" notebook.py write
"$new/nbdev-clean"
added=$("$new/python" notebook.py show)
echo "cleaned by 2.4.14:         $kept"
echo "migrated, cleaned:         $migrated"
echo "steps given as 5:          $ran"
echo "key added by hand:         $added"
[ "$kept" = "{'tags': ['parameters']}" ]
[ "$migrated" = "{}" ]
[ "$ran" = 1 ]
[ "$added" = "{'tags': ['parameters']}" ]
