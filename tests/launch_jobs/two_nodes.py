"""Two nodes of four simulated NPUs on one machine: order of ranks, a killed node, and going on afterwards; prints JSON."""

import json
import os
import shutil
import subprocess
import time

from cookbook_npu.cluster.environment import free_port
from cookbook_npu.cluster.launch import RAY_ENV, Node, end, family_env, head_command, join, started_at, wait_for, worker_command
from cookbook_npu.cluster.roles import RoleGroup
from cookbook_npu.cluster.session import Cluster, ensure_token, session_folder
from cookbook_npu.errors import RoleError


class Teller:
    "Says where it is"

    def __init__(self, rank, world_size):
        self.rank = rank

    def where(self):
        import ray

        return self.rank, ray.get_runtime_context().get_node_id(), int(os.environ["ASCEND_RT_VISIBLE_DEVICES"])


def start(words, folder):
    log = open(folder / "ray.log", "ab")
    process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    return process, started_at(process.pid)


def main() -> dict:
    os.environ |= RAY_ENV  # before Ray is imported: it reads its authentication then
    import ray

    host = ray.util.get_node_ip_address()  # Ray admits no second node on the loopback interface
    os.environ |= family_env(host)
    ensure_token()
    folder, head = session_folder(), Node(host, 4, free_port())
    address = join(head.host, head.port)
    running = [start(head_command(head, folder), folder)]
    wait_for(head.host, head.port, running[0][0])
    try:
        running.append(start(worker_command(head, 4), folder))
        ray.init(address=address, log_to_driver=False)
        until = time.monotonic() + 60
        while ray.cluster_resources().get("NPU", 0) < 8 and time.monotonic() < until:
            time.sleep(0.3)
        found = {}
        with Cluster.start(8, "NPU", simulated=True, address=address, timeout=200) as cluster:
            found["slots"] = [(s.raylet, s.device) for s in cluster.slots]
            group = RoleGroup.create("teller", Teller, cluster, bundles=range(8), share=0.4, timeout=200)
            found["ranks"] = group.call("where")
            node, since = running.pop()
            end(node.pid, since, grace=1)
            try:
                group.call("where", timeout=200)
                found["failure"] = None
            except RoleError as e:
                found["failure"] = str(e)
        running.append(start(worker_command(head, 4), folder))
        until = time.monotonic() + 90
        while ray.available_resources().get("NPU", 0) < 8 and time.monotonic() < until:
            time.sleep(0.5)
        with Cluster.start(8, "NPU", simulated=True, address=address, timeout=200) as cluster:
            with RoleGroup.create("teller", Teller, cluster, bundles=range(8), share=0.4, timeout=200) as group:
                found["after"] = len(group.call("where"))
        ray.shutdown()
        return found
    finally:
        for process, since in reversed(running):
            end(process.pid, since)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    print("RESULT", json.dumps(main()))
