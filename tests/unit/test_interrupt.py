"""Ctrl-C before a command has begun its work: exit code 130 and not a word."""

import json
import os
import subprocess
import sys

import pytest

RUN = ["run", "qwen3_4b_colocate", "-p", "num_steps", "1"]
PLAN = ["plan", "qwen3_4b_colocate"]
LAZY = "cookbook_npu.plan.plan"  # imported by the command `plan`, not by the command line

# The process interrupts itself when it is about to import a module, or to open a file
HOOK = """
import json, os, signal, sys

where, how, times = json.loads(os.environ["INTERRUPT"])

def interrupt():
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)

class Finalized:
    def __del__(self):
        interrupt()

def reached(name):
    if name == where and how == "discarded":  # as some extension modules do
        try:
            interrupt()
        except BaseException:
            pass
    elif name == where and how == "finalizer":
        Finalized()
    elif name == where:
        interrupt()

class Finder:
    find_spec = lambda name, *rest: reached(name)

sys.meta_path.insert(0, Finder)
sys.addaudithook(lambda event, of: event == "open" and reached(os.path.basename(str(of[0]))))
"""


@pytest.mark.parametrize(
    ("words", "where", "how", "times"),
    [
        (["config"], "cookbook_npu.cli", "", 1),
        (RUN, "papermill", "", 2),
        (PLAN, LAZY, "discarded", 1),
        (["recipes"], "qwen3_4b_colocate.ipynb", "finalizer", 1),
        *(
            pytest.param(*case, marks=pytest.mark.lane("runs"))
            for case in [
                (["config"], "cookbook_npu.cli", "finalizer", 2),
                (["config"], "typer", "", 1),
                (PLAN, "pydantic", "", 2),
                (PLAN, LAZY, "finalizer", 1),
                (PLAN, LAZY, "", 2),
                (RUN, "cookbook_npu.runs.kernel", "", 1),
                (RUN, "ipykernel", "discarded", 1),
            ]
        ),
    ],
)
def test_ctrl_c_before_the_work_ends_with_130_and_says_nothing(
    tmp_path, words, where, how, times
):
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    (tmp_path / "here").mkdir()
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    env = os.environ | {"PYTHONPATH": path, "INTERRUPT": json.dumps([where, how, times])}
    begin = [sys.executable, "-m", "cookbook_npu", *words]
    done = subprocess.run(begin, cwd=tmp_path / "here", env=env, capture_output=True)
    assert (done.returncode, done.stderr) == (130, b""), done.stdout
    assert not list((tmp_path / "here").iterdir())


def test_ctrl_c_stays_ignored_in_the_background():
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    code += "from cookbook_npu.__main__ import command\n"
    code += "try: command()\n"
    code += "finally: assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN"
    subprocess.run([sys.executable, "-c", code, "config"], check=True, capture_output=True)
