"""The checks of the simulated NPU, on the real torch_npu: what passes on both lanes, the simulator does
as the real one does.
"""

import re

import pytest
from places import HELPERS

JOBS = HELPERS / "simulator_jobs"

# Where the lanes differ. A check listed here must fail on the real torch_npu, so the list cannot go stale.
DIFFERENT = {
    "check_foreach_takes_whole_lists": "counts calls of the simulator's own extension",
    "check_memory_returns": "torch_npu pads each block by 32 bytes before it rounds to 512",
    "check_generators": "the real generator is Philox: a seed gives other numbers than on the CPU",
    "check_fork_is_refused": "torch_npu notices forks of multiprocessing, not a bare os.fork()",
}
LEFT_OUT = {
    "check_threads": "about one run in ten ends in torch_npu: 'Uninitialized default NPU stream', or a "
    "double free, when several threads of one process use several devices; nobody here does that, and "
    "whether a real NPU shows it is not known",
}


def checks(job):
    names = re.findall(r"^def (check_\w+)", (JOBS / f"{job}.py").read_text(), re.M)
    marks = {
        name: pytest.mark.xfail(strict=True, reason=reason)
        for name, reason in DIFFERENT.items()
    }
    marks |= {name: pytest.mark.skip(reason=reason) for name, reason in LEFT_OUT.items()}
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


@pytest.fixture(scope="module")
def operators(lane):
    return lane("operators", kwargs=dict(left_out=list(LEFT_OUT)))[0]


@pytest.fixture(scope="module")
def collectives(lane):
    return lane("simulator_jobs.collectives:everything", ranks=2)


@pytest.mark.parametrize("name", checks("operators"))
def test_operators(operators, name):
    assert operators[name] == ""


@pytest.mark.parametrize("name", checks("collectives"))
def test_collectives(collectives, name):
    assert [rank[name] for rank in collectives] == ["", ""]
