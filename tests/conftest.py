"""What several test files share."""

from pathlib import Path

import pytest
from whole_runs import configure, run

APART = ("test_notebooks", "test_launch", "test_resume", "test_faults")  # their tests are long and share little


def pytest_collection_modifyitems(items):
    "With several workers the tests of a file stay together: they share what it took long to make"
    for item in items:
        if item.path.stem not in APART:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> Path:
    "The folder of a small run that nobody disturbed"
    root = tmp_path_factory.mktemp("undisturbed")
    run(configure(root, "run"))
    return root / "run"
