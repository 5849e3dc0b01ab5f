"""Unmodified slime, written for GPUs, reserves NPUs: run with slime's checkout on PYTHONPATH.

slime imports its rollout engine (sglang) and trackers along with its placement groups. They are not installed
and not used here, so stub modules take their names, whose attributes are empty classes: any real use fails.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
import types
from argparse import Namespace
from pathlib import Path

MADE_UP = ("sglang", "sglang_router", "wandb", "omegaconf", "qwen_vl_utils", "memray")


class MadeUp(types.ModuleType):
    "A module in which every name is an empty class"

    __path__: list[str] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    "Finds the made-up modules"

    def find_spec(self, name, path, target=None):
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True)
            if name.partition(".")[0] in MADE_UP
            else None
        )

    def create_module(self, spec):
        return MadeUp(spec.name)

    def exec_module(self, module):
        "Nothing to run"


def hook():
    "What every process does before it imports slime; also the setup hook of Ray's workers"
    from cookbook_npu.npu.shims.ray import install_adapter

    sys.meta_path.append(Finder())
    install_adapter()


def where():
    "What a train actor of slime finds out about its device"
    from slime.ray.train_actor import get_local_gpu_id

    return get_local_gpu_id()


def main(devices: int) -> dict:
    "Create slime's placement groups on `devices` NPUs that exist as a resource only"
    hook()
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    from slime.ray.placement_group import create_placement_groups
    from slime.ray.utils import NOSET_VISIBLE_DEVICES_ENV_VARS_LIST

    from cookbook_npu.cluster.ray_cluster import LOOPBACK, init_options

    os.environ[LOOPBACK] = "0"
    with tempfile.TemporaryDirectory(prefix="cbn-", dir="/tmp") as folder:
        options = init_options(devices, "NPU", True, Path(folder))
        ray.init(
            **options, runtime_env={"worker_process_setup_hook": "slime_placement.hook"}
        )
        half = devices // 2
        args = Namespace(
            debug_train_only=False,
            debug_rollout_only=False,
            colocate=False,
            use_critic=False,
            actor_num_nodes=1,
            actor_num_gpus_per_node=half,
            rollout_num_gpus=devices - half,
        )
        groups = create_placement_groups(args)
        noset = {"env_vars": {name: "1" for name in NOSET_VISIBLE_DEVICES_ENV_VARS_LIST}}
        group, bundles, _ = groups["actor"]
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundles[half]
        )
        local = ray.remote(num_gpus=0.4, runtime_env=noset)(where).options(
            scheduling_strategy=strategy
        )
        seen = ray.get(local.remote(), timeout=60)
        ray.shutdown()
        return {
            "actor": groups["actor"][2],
            "rollout": groups["rollout"][2],
            "local": seen,
            "at": half,
        }


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(int(sys.argv[1]))))
