"""The adapter for programs that request GPUs, on a Ray cluster of twelve NPUs that are only a resource."""

import pytest
import ray
from proof import each, prove

from cookbook_npu.cluster.ray_cluster import LOOPBACK, init_options, session_folder
from cookbook_npu.npu.shims.ray import applied

pytestmark = pytest.mark.lane("devices")


@pytest.fixture(scope="module")
def start():
    "Code that joins the cluster as a driver with the adapter; each check is a driver of its own"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LOOPBACK, "0")
        with applied("ray.unused_services", "ray.node_start"):
            cluster = ray.init(**init_options(12, "NPU", True, session_folder()))
        yield f"""
    import logging, ray
    from cookbook_npu.npu.shims.ray import adapter_env, install_adapter
    install_adapter()
    options = dict(log_to_driver=False, logging_level=logging.ERROR)
    ray.init("{cluster.address_info["address"]}", **options, runtime_env=adapter_env())
"""
        ray.shutdown()


def test_get_gpu_ids(start):
    prove(
        "ray.get_gpu_ids",
        start.replace(", runtime_env=adapter_env()", "")
        + """
    def ids(adapt):
        from cookbook_npu.npu.shims import ray as adapter
        from cookbook_npu.npu.shims.registry import registry
        if adapt: registry.apply("ray.get_gpu_ids")
        return ray.get_gpu_ids()[0], ray.get_runtime_context().get_accelerator_ids()["GPU"]
    def check():
        adapt = registry["ray.get_gpu_ids"].is_applied
        task = ray.remote(resources={"NPU": 1}, max_retries=0, max_calls=1)(ids)
        return ray.get(task.remote(adapt), timeout=120) == (0, ["0"])
    """,
        "IndexError",
        bootstrap=None,
    )


# fmt: off
test_shim = each(
    # Actors run, each on its own device; without the shim they wait
    ("ray.num_gpus", "GetTimeoutError", """
    def check():
        @ray.remote(num_gpus=1, num_cpus=0)
        class Where:
            def ids(self): return ray.get_gpu_ids()
        actors = [Where.remote() for _ in range(2)] + [Where.options(num_gpus=0.5).remote()]
        limit = 120 if registry["ray.num_gpus"].is_applied else 2
        found = ray.get([a.ids.remote() for a in actors], timeout=limit)
        without = ray.remote(num_gpus=0)(lambda: ray.get_gpu_ids())
        assert ray.get(without.remote()) == []
        return sorted(found) == [[0], [1], [2]]
    """),
    ("ray.gpu_bundles", "check() returned False", """
    def check():
        from ray.util.placement_group import placement_group, remove_placement_group
        first = placement_group([{"GPU": 1, "CPU": 1}])
        second = ray.util.placement_group(bundles=[{"GPU": 1}]*2, strategy="PACK")
        limit = 120 if registry["ray.gpu_bundles"].is_applied else 1
        ready = [group.wait(limit) for group in (first, second)]
        for group in (first, second):
            remove_placement_group(group)
        return all(ready)
    """),
    ("requests for npus are unchanged", None, """
    def check():
        from cookbook_npu.npu.shims.ray import device_ids
        task = ray.remote(resources={"NPU": 12}, num_cpus=0)(lambda: device_ids())
        return ray.get(task.remote(), timeout=120) == list(range(12))
    """),
    bootstrap=None,
    fixture="start",
)
# fmt: on
