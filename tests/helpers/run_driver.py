"""A run in a process of its own, for whole_runs.py: `python run_driver.py CONFIG.json` prints its
processes, then its steps.
"""

import json
import os
import sys


def spread(answer, label, metadata):
    "A reward that every answer of a group earns differently, so that every step moves the weights"
    return (sum(map(ord, answer)) % 97) / 97


def raylets():
    "Process ids of the raylet below this process"
    import psutil

    return [
        p.pid for p in psutil.Process().children(recursive=True) if p.name() == "raylet"
    ]


def main():
    from cookbook_npu.config import load_config
    from cookbook_npu.train.session import session

    with session(load_config(sys.argv[1])) as run:
        roles = {
            "trainer": run.state.trainer.pids,
            "engine": run.state.engines.groups[0].pids,
        }
        print(
            json.dumps(
                {
                    "driver": [os.getpid()],
                    "raylet": raylets(),
                    **roles,
                    "status": run.status(),
                }
            ),
            flush=True,
        )
        for row in run.steps():
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
