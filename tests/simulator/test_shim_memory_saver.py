"""The memory saver on a simulated one: its check, a trainer's sleep, and its shims with and without them."""

import os
from pathlib import Path

import pytest
from proof import prove, run_check
from simulated_saver import write_saver_package

from cookbook_npu.config import override
from cookbook_npu.errors import ConfigError, ShimError
from cookbook_npu.npu.shims.memory_saver import saver_build, saver_mode, start_check
from cookbook_npu.plan.roles import role_environment
from cookbook_npu.recipes import qwen3_4b_colocate


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


def test_a_preloaded_saver_pauses_everything(root):
    "A stub of the preloaded saver: the library is an empty file, so LD_PRELOAD cannot be used"
    run_check(
        f"""
        import os, sys
        sys.path.insert(0, {str(root)!r})
        def check():
            from cookbook_npu.npu.device import accelerator
            from cookbook_npu.npu.shims.memory_saver import check_pause
            from torch_memory_saver.entrypoint import _TorchMemorySaverImpl
            class Preloaded(_TorchMemorySaverImpl):
                def pause(self, tag):
                    assert tag is None
                    super().pause(tag)
            saver = Preloaded()
            with saver.region("all", True):
                return check_pause(saver, accelerator(), "preload", mib=8) == 8 << 20
        """,
        bootstrap="simulator",
    )


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


@pytest.fixture
def installed(root, monkeypatch):
    "The package can be imported, here and in processes"
    monkeypatch.syspath_prepend(root)
    path = os.pathsep.join([str(root), os.environ["PYTHONPATH"]])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("COOKBOOK_NPU_SIMULATE", "1")


def test_the_check_of_a_pause(installed, root):
    assert saver_build(root / "torch_memory_saver") == "npu"
    assert saver_mode({}, root / "torch_memory_saver").hook == "region"
    assert start_check({}) == "region: a pause freed 64 MiB on the simulated NPU"


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("SIMULATED_SAVER", "frees nothing", r"pause\(\) freed 0 of 64 MiB"),
        ("SIMULATED_SAVER", "forgets", r"resume\(\) brought back other contents"),
        ("SIMULATED_SAVER", "exit", "ended with 1: "),
        (
            "PYTORCH_NPU_ALLOC_CONF",
            "expandable_segments:True",
            "expandable_segments:True and a memory saver",
        ),
    ],
)
def test_a_check_that_fails(installed, name, value, error):
    with pytest.raises(ShimError, match=error):
        start_check({name: value})


def test_only_the_trainer_gets_its_variables(installed):
    changes = {"placement.sleep": "torch_memory_saver"}
    config = override(qwen3_4b_colocate(scale="910b", model="m", prompt_data="p"), changes)
    assert role_environment(config, "trainer", {})["TMS_HOOK_MODE"] == "torch"
    assert role_environment(config, "rollout", {})["TMS_HOOK_MODE"] is None
    shell = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    with pytest.raises(ConfigError, match="but PYTORCH_NPU_ALLOC_CONF=expandable_segments"):
        role_environment(config, "trainer", shell)


def test_a_trainer_sleeps_by_it(use):
    "A tensor is paused and resumed; a saver whose pause frees nothing is an error"
    run_check(
        use
        + """
    import os
    from cookbook_npu.errors import DeviceError
    from cookbook_npu.npu.device import accelerator
    from cookbook_npu.train import offload
    from simulated_saver import TorchMemorySaver
    acc = accelerator()
    def built(saver):
        paused = offload.MemorySaverOffloader(acc, lambda: [w], lambda: [], saver, "region")
        with paused.allocating():
            w = torch.arange(2**20, device="npu", dtype=torch.int32)
        return paused, w
    def check():
        paused, w = built(TorchMemorySaver())
        held, nbytes = acc.memory_allocated(), w.nbytes
        assert paused.sleep() == nbytes
        assert held - acc.memory_allocated() == nbytes
        assert paused.wake() == nbytes
        assert torch.equal(w.cpu(), torch.arange(2**20))
        os.environ["SIMULATED_SAVER"] = "frees nothing"
        offload.PAUSE_SLACK = 0  # larger than this tensor
        lazy, w = built(TorchMemorySaver())
        try:
            lazy.sleep()
        except DeviceError as error:
            assert "freed 0 B, the trainer holds 4 MiB" in str(error), error
        return not lazy.asleep and int(w[-1]) == 2**20 - 1
    """,
        bootstrap="plain",
    )


def test_the_strategy_of_a_run_is_checked(use):
    run_check(
        use
        + """
    import os
    from cookbook_npu.errors import ConfigError
    from cookbook_npu.npu.device import accelerator
    from cookbook_npu.train import offload
    os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ["PYTHONPATH"]])
    def make():
        return offload.make_offloader("torch_memory_saver", accelerator(), list, list)
    def check():
        made = make()
        assert (type(made), made.tag) == (offload.MemorySaverOffloader, offload.SAVER_TAG)
        os.environ["SIMULATED_SAVER"] = "frees nothing"
        try:
            make()
        except ConfigError as error:
            return "pause() freed 0 of 64 MiB" in str(error)
    """,
        bootstrap="plain",
    )
