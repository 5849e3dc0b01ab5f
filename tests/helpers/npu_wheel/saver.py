"""torch_memory_saver of sgl-kernel-npu, its C++ included, on the real torch_npu: how it is built, and what
runs in its processes.
"""

import os
import shutil
from pathlib import Path

from cookbook_npu.npu.simulator import toolchain
from npu_wheel import build, cann


def build_saver(checkout: Path, site: Path) -> Path:
    "Compile the libraries of both modes beside the package, as its setup.py does; returns `site`"
    made, _ = build.build()
    shutil.copytree(checkout / "python" / "torch_memory_saver", site / "torch_memory_saver")
    sources = sorted((checkout / "csrc").glob("*.cpp"))
    headers = [f"-isystem{folder}" for folder in cann.header_folders(build.site())]
    for mode in ("preload", "torch"):
        library = site / f"torch_memory_saver_hook_mode_{mode}.abi3.so"
        options = ["-O1", "-std=c++17", "-fPIC", "-shared", *headers]
        options += ["-DTMS_BACKEND_ASCEND=1", f"-DTMS_HOOK_MODE_{mode.upper()}=1"]
        link = [f"-L{made / 'lib'}", "-lascendcl", "-ldl", "-o", str(library)]
        command = [toolchain.find_compiler(), *options, *map(str, sources), *link]
        cann.run(command, f"compiling the memory saver, mode {mode}")
    return site


def sleeps(rank, world_size, hf_path, checks):
    """(mode, what a trainer learns that sleeps by copies, and by the saver; MiB that the saver freed)

    `checks`: a folder whose sitecustomize puts CPU kernels under torch_npu in the process that tries a pause.
    """
    from plan_jobs.measure import config_of
    from process_group_jobs import train_steps

    from cookbook_npu.npu.shims import memory_saver

    os.environ["PYTHONPATH"] = os.pathsep.join([checks, os.environ["PYTHONPATH"]])
    saving = {"parallel.tensor": 1, "placement.sleep": "torch_memory_saver"}
    copied, *_ = train_steps(
        rank, world_size, config_of({"parallel.tensor": 1}, 1), hf_path
    )
    paused, asleep, _ = train_steps(rank, world_size, config_of(saving, 1), hf_path)
    freed = asleep["memory/free_after_sleep"] - asleep["memory/free_before_sleep"]
    return memory_saver.saver_mode().hook, copied, paused, freed >> 20
