"""A split run on one node of four simulated NPUs; a second node joins while it runs, and gets an engine.

`python two_nodes_grow.py CONFIG.json STEP`: the node joins after this step
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import run_driver
from two_nodes import join_node, on_two_nodes, start

from cookbook_npu.cluster import launch
from cookbook_npu.config import load_config
from cookbook_npu.train.session import session


def play(head, folder, running) -> dict:
    "The story; where its engines live, and whether there was room for one more before"
    config = load_config(Path(sys.argv[1]))
    command = launch.ray_head_command(head, folder)
    running.append(start(command, folder, (folder / "ray_current_cluster").is_file))
    os.environ["RAY_ADDRESS"] = launch.host_port(head.host, head.port)
    found = {}
    with session(config) as run:
        for row in run.steps():
            if row["step"] == int(sys.argv[2]):
                with contextlib.redirect_stdout(io.StringIO()) as said:
                    assert not run.set_num_engines(3)
                found["refused"] = said.getvalue()
                running.append(join_node(head, folder))
                run_driver.scale(run, 3)
        slots = run.state.workers.cluster.slots
        found["nodes"] = [slot.node_id for slot in slots]
    return found


if __name__ == "__main__":
    print("RESULT", json.dumps(on_two_nodes(play, 4)))
