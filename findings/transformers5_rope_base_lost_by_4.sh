#!/usr/bin/env bash
# A Qwen3 folder that transformers 5 saved loses its RoPE base in transformers 4, without a warning.
#
# transformers 5.19.0 writes the base into `rope_parameters` and leaves out `rope_theta`.
# transformers 4.57.4 knows `rope_theta` only: it reads the file, says nothing, and takes its
# default of 10,000 for a model that was trained with 1,000,000. Log-probs are then wrong at every
# position but the first. Stacks of vllm-ascend 0.18 pin transformers 4.57.
#
# Seen on 2026-11-28:
#   transformers 5.19.0 wrote rope_theta None, rope_parameters {'rope_theta': 1000000.0, 'rope_type': 'default'}
#   transformers 4.57.4 read  rope_theta 10000.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 5.19.0 4.57.4; do
  python3 -m pip install --quiet --disable-pip-version-check --target "$folder/$version" \
    "transformers==$version" "numpy<3"
done
PYTHONPATH=$folder/5.19.0 python3 - "$folder/model" <<'P' 2>/dev/null
import json, sys, transformers
from transformers import Qwen3Config
config = Qwen3Config(rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0})
config.save_pretrained(sys.argv[1])
saved = json.load(open(f"{sys.argv[1]}/config.json"))
parameters = dict(sorted(saved["rope_parameters"].items()))
print(f"transformers {transformers.__version__} wrote rope_theta {saved.get('rope_theta')}, rope_parameters {parameters}")
assert "rope_theta" not in saved
P
PYTHONPATH=$folder/4.57.4 python3 -W error - "$folder/model" <<'P' 2>/dev/null
import sys, transformers
from transformers import AutoConfig
config = AutoConfig.from_pretrained(sys.argv[1])
print(f"transformers {transformers.__version__} read  rope_theta {config.rope_theta}")
assert config.rope_theta == 10_000.0, config.rope_theta
P
