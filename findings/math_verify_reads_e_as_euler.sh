#!/usr/bin/env bash
# math-verify reads the usual scientific notation as Euler's number, and a LaTeX thousands space as a product.
#
# In math-verify 0.9.0 "1.5e3" is 1.5 * e * 3 = 12.2, not 1,500 (with a capital E it is 1,500), and
# "1\,000" is 1 * 000 = 0: an answer 0 equals the label 1\,000. Both parse without an error, so a reward
# that compares with them is wrong in silence.
#
# Seen on 2026-11-28 (math-verify 0.9.0, latex2sympy2_extended 1.11.0):
#   1.5e3 equals 1500: False; 1.5E3 equals 1500: True
#   0 equals 1\,000: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  math-verify==0.9.0 latex2sympy2_extended==1.11.0
"$folder/venv/bin/python" - <<'P'
from math_verify import parse, verify
def equal(label, answer):
    return verify(parse(rf"\boxed{{{label}}}"), parse(rf"\boxed{{{answer}}}"))
lower, upper, zero = equal("1500", "1.5e3"), equal("1500", "1.5E3"), equal(r"1\,000", "0")
print(f"1.5e3 equals 1500: {lower}; 1.5E3 equals 1500: {upper}")
print(rf"0 equals 1\,000: {zero}")
assert (lower, upper, zero) == (False, True, True)
P
