#!/usr/bin/env bash
# ClearML stores a metric that is NaN or infinite as 0.0: a diverged run looks perfect.
#
# `Logger.report_scalar` of clearml 2.1.12 takes NaN, and its offline session holds the value 0.0 for
# that step; the log has one line. A gradient norm or a KL of NaN is then the best value of its curve.
#
# Seen on 2026-11-28 (clearml 2.1.12, offline mode):
#   reported [0.5, nan, inf], stored [0.5, 0.0, 0.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check clearml==2.1.12 'setuptools<81'
cd "$folder"
export CLEARML_CACHE_DIR=$folder/cache HOME=$folder CLEARML_OFFLINE_MODE=1
venv/bin/python - > log 2>&1 <<'P'
import json, math
from clearml import Task
task = Task.init("p", "t", auto_connect_frameworks=False, auto_resource_monitoring=False)
for step, value in enumerate((0.5, math.nan, math.inf)):
    task.get_logger().report_scalar("grad_norm", "policy", value, step)
folder = task.get_offline_mode_folder()
task.flush(wait_for_uploads=True)
task.close()
rows = [row for line in open(f"{folder}/metrics.jsonl") for row in json.loads(line)]
found = [row["value"] for row in sorted(rows, key=lambda r: r["iter"]) if row.get("metric") == "grad_norm"]
open("found", "w").write(json.dumps(found))
P
echo "reported [0.5, nan, inf], stored $(cat found)"
test "$(cat found)" = "[0.5, 0.0, 0.0]"
