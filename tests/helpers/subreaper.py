"""`python subreaper.py COMMAND ...`: runs a command and inherits whatever it leaves behind, as
`systemd --user` and `tini -s` do. Prints the command's process id first and "ended CODE" when it has
ended; ends itself when nothing is left.
"""

import ctypes
import os
import subprocess
import sys

PR_SET_CHILD_SUBREAPER = 36


def main():
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    command = subprocess.Popen(sys.argv[1:], stderr=subprocess.STDOUT)
    print(command.pid, flush=True)
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            return
        if pid == command.pid:
            print("ended", os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
