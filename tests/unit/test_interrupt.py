"""Ctrl-C before a command has begun its work: exit code 130 and not a word."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

RUN = ["run", "qwen3_4b_colocate", "-p", "num_steps", "1"]


@pytest.mark.parametrize("words", [["config"], ["plan", RUN[1]], RUN], ids=lambda w: w[0])
@pytest.mark.parametrize(("seconds", "times"), [(0.1, 1), (0.3, 2), (0.6, 1), (1.0, 2)])
def test_ctrl_c_during_imports_ends_with_130_and_says_nothing(
    tmp_path, words, seconds, times
):
    "At moments of processor time, which a busy machine does not shift; 0.05 s are Python's own start"
    begin = [sys.executable, "-m", "cookbook_npu", *words]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        begin, cwd=tmp_path, start_new_session=True, stdout=pipe, stderr=pipe
    )
    program = psutil.Process(process.pid)
    while sum(program.cpu_times()[:2]) < seconds and process.poll() is None:
        time.sleep(0.005)
    if process.poll() is not None:  # a fast machine had finished by then
        out, err = process.communicate()
        assert process.returncode == 0 and seconds >= 0.6, (out, err)
        return
    for _ in range(times):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.02)
    out, err = process.communicate(timeout=60)
    # -2: while Python ends; a shell shows 130
    assert process.returncode in (130, -signal.SIGINT), (out, err)
    assert err == b"" and not list(tmp_path.iterdir())


def test_ctrl_c_stays_ignored_in_the_background():
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    code += "from cookbook_npu.__main__ import command\n"
    code += "try: command()\n"
    code += "finally: assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN"
    subprocess.run([sys.executable, "-c", code, "config"], check=True, capture_output=True)
