#!/usr/bin/env bash
# Importing torch._dynamo changes the environment that child processes inherit.
#
# The import writes TORCHINDUCTOR_CACHE_DIR into os.environ, with the default of the importing
# process: a folder below its temporary folder. Nothing is compiled for it. A child that is started
# afterwards with a temporary folder of its own keeps its compile cache in the parent's folder, and
# the variable cannot be told from one that the user has set. transformers imports torch._dynamo
# with many of its classes, so a launcher that only reads a tokenizer pins the cache of its workers.
#
# Seen on 2026-11-30 (torch 2.13.0):
#   before the import: None
#   after the import:  PARENT/torchinductor_USER
#   child's cache:     PARENT/torchinductor_USER, with TMPDIR=CHILD
#   child of a parent without the import: CHILD/torchinductor_USER
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.3.5
cd "$folder"
mkdir parent child
unset TORCHINDUCTOR_CACHE_DIR
TMPDIR=$folder/parent "$folder/venv/bin/python" - <<'P'
import os, subprocess, sys

CODE = "from torch._inductor.runtime.cache_dir_utils import cache_dir; print(cache_dir())"


def childs_cache():
    env = {**os.environ, "TMPDIR": os.path.abspath("child")}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True)
    path = os.path.relpath(done.stdout.strip())
    return path[: path.index("_") + 1] + "USER"


untouched = childs_cache()
print("before the import:", os.environ.get("TORCHINDUCTOR_CACHE_DIR"))
assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
import torch

assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ  # torch alone does not set it
import torch._dynamo

after = childs_cache()
print("after the import: ", os.path.relpath(os.environ["TORCHINDUCTOR_CACHE_DIR"]).split("_")[0] + "_USER")
print("child's cache:    ", after, "with TMPDIR=child")
print("child of a parent without the import:", untouched)
assert (untouched, after) == ("child/torchinductor_USER", "parent/torchinductor_USER")
P
