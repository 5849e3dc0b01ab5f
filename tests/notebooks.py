"""Run every notebook as a test, each in a process of its own: `python tests/notebooks.py [PART OF A NAME] [--workers N]`

`nbdev_test` with several workers uses a process for many notebooks; ours load a device and patch torch, which is once per process.
"""

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(notebook: Path) -> tuple[Path, bool, float, str]:
    "(notebook, passed, seconds, output)"
    command = [str(Path(sys.executable).parent / "nbdev_test"), "--path", str(notebook), "--n_workers", "0"]
    began = time.monotonic()
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, timeout=900)
    return notebook, done.returncode == 0, time.monotonic() - began, done.stdout + done.stderr


def main() -> int:
    "Run them, slowest rooms first; print a line for each and the output of those that failed"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="", help="only notebooks whose path contains this")
    parser.add_argument("--workers", type=int, default=2, help="notebooks at a time")
    args = parser.parse_args()
    found = [p for p in sorted((ROOT / "nbs").rglob("*.ipynb")) if "checkpoint" not in p.name and args.part in str(p)]
    found.sort(key=lambda p: p.parent.name not in ("tutorials", "shims", "model"))
    failed = []
    with ThreadPoolExecutor(args.workers) as pool:
        for notebook, passed, seconds, output in pool.map(run, found):
            name = notebook.relative_to(ROOT)
            print(f"{'ok  ' if passed else 'FAIL'} {seconds:6.1f} s  {name}", flush=True)
            if not passed:
                failed.append(name)
                print(output, flush=True)
    print(f"notebooks: {len(found) - len(failed)} passed, {len(failed)} failed {[str(f) for f in failed] if failed else ''}")
    return int(bool(failed) or not found)


if __name__ == "__main__":
    sys.exit(main())
