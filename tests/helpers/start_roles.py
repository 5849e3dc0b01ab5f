"""Roles that say what they imported until they were ready (test_start.py)."""

import importlib
import os
import sys
from pathlib import Path

from cookbook_npu.npu.simulator.preload import is_fork


class Role:
    "Imports what a role of a run imports"

    def __init__(self, rank: int, world_size: int, modules: list[str]):
        self.rank = rank
        before = set(sys.modules)
        for name in modules:
            importlib.import_module(name)
        self.own_modules = sorted(set(sys.modules) - before)

    def process_info(self) -> dict[str, object]:
        "About this process"
        return {
            "own_modules": self.own_modules,
            "fork": is_fork(),
            "modules": sorted(sys.modules),
            "visible": os.environ.get("ASCEND_RT_VISIBLE_DEVICES"),
            "server": Path(f"/proc/{os.getppid()}/cmdline").read_text(),
            "threads": sys.modules["torch"].get_num_threads(),
        }

    def devices(self) -> int:
        "Simulated NPUs of this process"
        return sys.modules["torch"].npu.device_count()
