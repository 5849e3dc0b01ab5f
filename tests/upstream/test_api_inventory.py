"""Every name of torch_npu that the package uses, and every name that the simulator offers, exists in the
real wheels: that of the tests' torch and those of the stacks.

Works on source text: nothing of the wheel is imported. tests/wheel asks the imported module for the same
names.
"""

from pathlib import Path

import pytest
import upstream_sources
from api_inventory import NAMES, OURS, SIMULATOR, exists, listed, simulated
from npu_wheel import build

from cookbook_npu.npu.stack.stacks import KNOWN_STACKS, RUNNABLE_STACKS

pytestmark = pytest.mark.lane("upstream")

# What the simulator offers and torch_npu has from 2.10 on; nothing here relies on them.
SINCE_2_10 = {
    "host_empty_cache",
    "host_memory_stats",
    "host_memory_stats_as_nested_dict",
    "reset_peak_host_memory_stats",
    "npu_apply_rotary_pos_emb",
}
RELEASES = (
    build.VERSION,
    *(KNOWN_STACKS[name].versions["torch_npu"] for name in RUNNABLE_STACKS),
)


@pytest.fixture(params=RELEASES, scope="module")
def release(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def root(release) -> Path:
    "The unpacked wheel of a release: of the tests' torch, or of a stack"
    if release != build.VERSION:
        return upstream_sources.wheel("torch-npu", release, ".py")
    if not build.have():
        pytest.skip(
            build.misfit()
            or "the torch_npu wheel is not in the cache: run `make test-npu-wheel`, which downloads it"
        )
    return build.site()


def test_the_inventory_sees_something(root):
    assert {"torch_npu.npu.memory_allocated", "torch_npu.contrib.transfer_to_npu"} <= set(
        NAMES
    )
    assert exists("torch_npu.npu.empty_cache", root)
    assert not exists("torch_npu.npu.OutOfMemoryError", root)


@pytest.mark.parametrize("name", NAMES)
def test_name_that_we_use(name, root):
    assert exists(name, root)


@pytest.mark.parametrize(
    "module, name",
    [(module, name) for module, names in simulated().items() for name in names],
)
def test_name_that_the_simulator_offers(module, name, release, root):
    old = tuple(map(int, release.split(".")[:2])) < (2, 10)
    assert exists(f"{module}.{name}", root) != (old and name in SINCE_2_10)


def test_nothing_relies_on_what_older_releases_lack():
    assert not {name.rsplit(".", 1)[-1] for name in NAMES} & SINCE_2_10


@pytest.mark.parametrize("name", OURS)
def test_exceptions_are_still_needed(name, root):
    assert name in listed(SIMULATOR / "runtime.py", "__all__")
    assert not exists(f"torch_npu.npu.{name}", root)
