#!/usr/bin/env bash
# reasoning-gym pays a wrong number that contains the right one: "420" for 42 gets two thirds.
#
# `score_answer` of reasoning-gym 0.1.25 (the default, and that of chain_sum) looks for the right
# answer anywhere in the given one, and pays their ratio of lengths. For text around an answer that
# is partial credit. A bare number gets half to three quarters for ten times the right one, and
# nothing for a near miss, so GRPO sees a spread of rewards among responses that are all wrong.
#
# Seen on 2026-11-30 (reasoning-gym 0.1.25), mean reward of 20 problems:
#   kind          right  ten times  plus one
#   chain_sum       1.0       0.71       0.0
#   gcd             1.0       0.52       0.0
#   leg_counting    1.0       0.75       0.0
#   lcm             1.0       0.75       0.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check reasoning-gym==0.1.25
cd "$folder"
venv/bin/python - <<'P' | tee found
import reasoning_gym

print("kind          right  ten times  plus one")
for kind in ("chain_sum", "gcd", "leg_counting", "lcm"):
    problems = reasoning_gym.create_dataset(kind, size=20, seed=0)
    entries = [problems[i] for i in range(20)]
    labels = [int(entry["answer"]) for entry in entries]
    assert all(labels)  # ten times 0 is right

    def mean(answers):
        pairs = zip(answers, entries, strict=True)
        return sum(problems.score_answer(str(a), entry) for a, entry in pairs) / len(entries)

    values = mean(labels), mean(10 * n for n in labels), mean(n + 1 for n in labels)
    print(f"{kind:12s} {values[0]:6.1f} {values[1]:10.2f} {values[2]:9.1f}")
P
diff found - <<'P'
kind          right  ten times  plus one
chain_sum       1.0       0.71       0.0
gcd             1.0       0.52       0.0
leg_counting    1.0       0.75       0.0
lcm             1.0       0.75       0.0
P
