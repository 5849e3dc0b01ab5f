export PY=/work/wt/others/.venv/bin/python BIN=/work/wt/others/.venv/bin
for c in c05 c06 c03 c09 c11 c13 c10 c12 c14 c01 c02 c04 c07 c08; do f=$(ls /tmp/lab/x/o5/cases/$c*); mkdir -p /tmp/lab/x/o5/run/$c; cd /tmp/lab/x/o5/run/$c; case $f in *.py) timeout 500 $PY $f > log 2>&1;; *) timeout 900 bash $f >log 2>&1;; esac; echo "$c $(tail -1 log)"; done
