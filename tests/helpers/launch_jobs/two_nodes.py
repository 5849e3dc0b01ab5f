"""Two nodes of simulated NPUs on one machine, for the stories beside this file"""

import os
import subprocess
import sys
import time
from contextlib import ExitStack

from cookbook_npu.cluster import launch
from cookbook_npu.cluster.launch import Node, end_process
from cookbook_npu.cluster.ray_cluster import (
    ensure_token,
    remove_session_folder,
    session_folder,
)
from cookbook_npu.npu.device import free_port


def start(words, folder, up, attempts=3):
    "A node that is up; Ray ends its own start after 30 s, which a busy machine exceeds: it is tried again"
    for _ in range(attempts):
        with open(folder / "ray.log", "ab") as log:
            process = subprocess.Popen(
                words, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + 400
        while process.poll() is None and time.monotonic() < deadline:
            if up():
                return process
            time.sleep(0.3)
        end_process(process)
    raise AssertionError(
        f"a node did not come up in {attempts} attempts: {' '.join(words[3:])}"
    )


def alive():
    "Ids of the nodes that Ray counts"
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def gone(before):
    "The node that Ray no longer counts"
    deadline = time.monotonic() + 400
    while not before - alive() and time.monotonic() < deadline:
        time.sleep(0.2)
    return (before - alive()).pop()


def join_node(head, folder):
    "Start a second node and wait until the cluster has it"
    before = alive()
    return start(
        launch.ray_worker_command(head, head.devices), folder, lambda: alive() - before
    )


def begin(head, folder, running):
    "Start two nodes and attach to them"
    import ray

    running.append(
        start(
            launch.ray_head_command(head, folder),
            folder,
            (folder / "ray_current_cluster").is_file,
        )
    )
    ray.init(address=launch.host_port(head.host, head.port), log_to_driver=False)
    running.append(join_node(head, folder))


def lose_node(running):
    "Kill the node that was started last; its id"
    process = running.pop()
    before = alive()
    end_process(process, grace=1)
    return gone(before)


def on_two_nodes(story, devices: int):
    "Prepare this process, and undo everything that the story starts"
    os.environ |= launch.RAY_ENV  # before Ray is imported: it reads its authentication then
    import ray

    # Ray admits no second node on the loopback interface
    host = ray.util.get_node_ip_address()
    os.environ |= launch.address_env(host)
    ensure_token()
    folder = session_folder()
    running = []

    def end_all():
        for process in reversed(running):
            end_process(process)

    with ExitStack() as undo:
        undo.callback(remove_session_folder, folder)
        undo.callback(end_all)
        # first: Ray ends a driver that outlives its cluster, and its last output is lost
        undo.callback(ray.shutdown)
        try:
            return story(Node(host, devices, free_port()), folder, running)
        except BaseException:
            print((folder / "ray.log").read_text()[-3000:], file=sys.stderr, flush=True)
            raise
