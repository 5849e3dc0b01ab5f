"""Machines as somebody reported them: tables of npu-smi, version files and variables of public issues."""

import json
from pathlib import Path

from places import FIXTURES

from cookbook_npu.npu.stack.machine import Machine, read_machine
from cookbook_npu.npu.stack.stacks import Package

RECORDED = {
    p.stem: json.loads(p.read_text())
    for p in sorted((FIXTURES / "machines").glob("*.json"))
}


def recorded(name: str, folder: Path) -> Machine:
    "The machine record of a report"
    one = RECORDED[name]
    for path, text in one["files"].items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)

    def run(argv):
        if argv[0] == "npu-smi":
            return one.get("npu_smi_code", 0), "\n".join(one["npu_smi"]) + "\n"
        size = one.get("df", {}).get(argv[-1])
        return (
            (0, f" 1B-blocks Avail\n{size[0]} {size[1]}\n")
            if size
            else (1, "df: no such folder")
        )

    packages = {
        n: Package(**v) if isinstance(v, dict) else Package(*v.split(" @ "))
        for n, v in one["packages"].items()
    }
    return read_machine(
        folder, run, one["env"], packages, arch=one["arch"], python=one["python"]
    )
