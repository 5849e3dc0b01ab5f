#!/usr/bin/env bash
# Importing megatron.core imports Weights & Biases where it is installed.
#
# The import reaches the contexts of the inference engine. They try `import wandb` and keep only whether
# it is there; no metric is sent. Each rank of a trainer pays for it, although a driver or rank 0 does the
# logging. Without wandb the same import works, and takes about half of the processor time (torch not counted).
#
# Seen on 2026-11-30 (megatron-core 0.16.1, wandb 0.31.0, torch 2.13.0):
#   wandb installed: megatron.core imported, wandb loaded: True, 2.40 s
#   wandb hidden:    megatron.core imported, wandb loaded: False, 1.34 s
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  torch==2.13.0 numpy==2.3.5 megatron-core==0.16.1 wandb==0.31.0 packaging einops
cd "$folder"
cat > look.py <<'P'
import sys, time, warnings

warnings.simplefilter("ignore")
hidden = sys.argv[1] == "hidden"
if hidden:
    sys.modules["wandb"] = None
import torch, torch.distributed.checkpoint, torch._dynamo  # what both need

began = time.process_time()
import megatron.core

spent = time.process_time() - began
loaded = sys.modules.get("wandb") is not None
print(f"wandb {sys.argv[1]}: megatron.core imported, wandb loaded: {loaded}, {spent:.2f} s")
assert loaded is not hidden
P
for state in installed hidden; do "$folder/venv/bin/python" look.py "$state"; done
