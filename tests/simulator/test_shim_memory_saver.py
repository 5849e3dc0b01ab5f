"""The shims of the memory saver on a stub of its NPU build, with and without them."""

from pathlib import Path

import pytest
from proof import prove, run_check
from simulated_saver import write_saver_package


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    "A folder with the package of the simulated memory saver"
    folder = tmp_path_factory.mktemp("site-packages")
    write_saver_package(folder)
    return folder


@pytest.fixture(scope="module")
def use(root) -> str:
    "Code that imports it"
    return f"""
    import sys
    sys.path.insert(0, {str(root)!r})
    import torch
    from cookbook_npu.npu.shims import memory_saver
    from torch_memory_saver import torch_memory_saver as saver
    torch.npu.set_device(0)
    def free():
        return torch.npu.mem_get_info()[0] >> 20
"""


def test_disable_empties_cache(use):
    prove(
        "memory_saver.disable_empties_cache",
        use
        + """
    assert registry.apply("memory_saver.disable_empties_cache").state == "applied"
    def update_weights():
        with saver.region("training"), saver.disable():
            bucket = torch.zeros(16 << 18, device="npu")
            seen = free()
            del bucket
        return seen
    def check():
        before = free()
        assert update_weights() == before - 16
        return free() == before
    """,
        "check() returned False",
        bootstrap="simulator",
    )


def test_margin(use):
    prove(
        "memory_saver.margin",
        use
        + """
    assert registry.apply("memory_saver.margin").state == "applied"
    def check():
        assert getattr(saver, "memory_margin_bytes", 0) == 0
        try:
            saver.memory_margin_bytes = 2 << 30
        except Exception as error:
            return "has no effect" in str(error)
        return False
    """,
        "check() returned False",
        bootstrap="simulator",
    )


def test_without_the_package_neither_is_needed():
    run_check(
        """
        def check():
            from cookbook_npu.npu.shims import memory_saver
            names = ("memory_saver.disable_empties_cache", "memory_saver.margin")
            seen = {(s.state, s.detail) for s in map(registry.apply, names)}
            return seen == {("not needed", "torch_memory_saver is not installed")}
        """,
        bootstrap=None,
    )
