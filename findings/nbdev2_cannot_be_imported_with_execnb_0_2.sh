#!/usr/bin/env bash
# A pinned nbdev 2 can no longer be imported: its dependency execnb has lost the module it needs.
#
# nbdev 2.4.14 asks for execnb without an upper limit and imports `execnb.nbio`, which execnb 0.2.0
# removed. `pip install nbdev==2.4.14` takes execnb 0.3.4, succeeds, and `pip check` finds nothing
# wrong, but every command of nbdev fails at its import. execnb 0.1.18 still has the module; it needs
# fastcore and ghapi of the 1.x series.
#
# Seen on 2026-11-30 (nbdev 2.4.14, execnb 0.3.4 and 0.1.18):
#   with execnb 0.3.4:  No module named 'execnb.nbio'
#   pip check:          No broken requirements found.
#   with execnb 0.1.18: imported
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
install() {
  python3 -m venv "$folder/$1"
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check nbdev==2.4.14 "${@:2}"
}
load() {
  "$folder/$1/bin/python" -c "import nbdev; print('imported')" 2>&1 | tail -1 |
    sed 's/^ModuleNotFoundError: //'
}
install new execnb==0.3.4 fastcore==2.2.41 ghapi==2.1.4
install old execnb==0.1.18 fastcore==1.14.5 ghapi==1.1.1
checked=$("$folder/new/bin/pip" check 2> /dev/null)
echo "with execnb 0.3.4:  $(load new)"
echo "pip check:          $checked"
echo "with execnb 0.1.18: $(load old)"
[ "$(load new)" = "No module named 'execnb.nbio'" ]
[ "$checked" = "No broken requirements found." ]
[ "$(load old)" = imported ]
