"""`python tests/helpers/stack_packages.py STACK` prints a folder for PYTHONPATH with the transformers of a
910B stack, and what depends on its version. The folder lies in the user's cache; everything else comes
from this environment, Megatron and mcore-bridge too: their versions are those of the stacks already.
"""

import subprocess
import sys
from pathlib import Path

from cookbook_npu.npu.simulator.toolchain import cache_root

PACKAGES = {
    "vllm-ascend-0.23.0": (
        "transformers==5.5.4",
        "tokenizers>=0.22,<=0.23.0",
        "huggingface-hub>=1.5,<2",
    ),
    "vllm-ascend-0.18.0": (
        "transformers==4.57.6",
        "tokenizers>=0.22,<0.23",
        "huggingface-hub<1",
        "datasets==4.4.1",  # the newest with that hub
    ),
}


def folder(stack: str) -> Path:
    "The packages of a stack, installed once"
    place = cache_root() / "stacks" / stack
    if not (place / "done").is_file():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        subprocess.run([*pip, "--target", str(place), *PACKAGES[stack]], check=True)
        (place / "done").touch()
    return place


if __name__ == "__main__":
    print(folder(sys.argv[1]))
