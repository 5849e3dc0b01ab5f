"""A split run over two nodes of two simulated NPUs, one of which is killed; then on with another.

The trainer is on one of them, the engines on the other: weights travel by a broadcast.

`python two_nodes_train.py ROOT SETTINGS`
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from two_nodes import begin, join_node, lose_node, on_two_nodes
from whole_runs import Driver, configure, run, wait_for

from cookbook_npu.cluster import launch
from cookbook_npu.cluster.ray_cluster import Cluster
from cookbook_npu.cluster.worker_group import RayWorkerGroup, WorkerHandle, death_error


class Teller:
    "Says where it is"

    def __init__(self, rank, world_size):
        self.rank = rank

    def where(self):
        import ray

        return (
            self.rank,
            ray.get_runtime_context().get_node_id(),
            int(os.environ["ASCEND_RT_VISIBLE_DEVICES"]),
        )


def places(address: str):
    "The devices of both nodes in order, and where the ranks of a group are"
    with Cluster.start(4, "NPU", simulated=True, address=address, timeout=200) as cluster:
        with RayWorkerGroup.create("teller", Teller, cluster, timeout=200) as group:
            return cluster.slots, group.call(Teller.where)


def play(head, folder, running) -> dict:
    "The story; the run folder is `run` below the root"
    root = Path(sys.argv[1])
    begin(head, folder, running)
    address = launch.host_port(head.host, head.port)
    slots, ranks = places(address)
    os.environ["RAY_ADDRESS"] = address
    split = json.loads(sys.argv[2])
    driver = Driver(configure(root, "run", **split, **{"faults.max_restarts": 0}))
    wait_for(lambda: any(line.startswith('{"step": 2,') for line in driver.lines), driver)
    killed = lose_node(running)
    code = driver.end()
    text = driver.text()
    rank = next(i for i, slot in enumerate(slots) if slot.node_id == killed)
    failure = death_error(WorkerHandle("teller", rank, 4, [slots[rank]], None), "where")
    running.append(join_node(head, folder))
    run(configure(root, "run", resume=True, **split))
    return {
        "slots": [(slot.node_id, slot.device) for slot in slots],
        "ranks": ranks,
        "killed": killed,
        "failure": str(failure),
        "code": code,
        "text": text,
    }


if __name__ == "__main__":
    print("RESULT", json.dumps(on_two_nodes(play, 2)))
