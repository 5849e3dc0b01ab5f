"""What several test files share."""

from pathlib import Path

import pytest
from whole_runs import configure, run


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> Path:
    "The folder of a small run that nobody disturbed"
    root = tmp_path_factory.mktemp("undisturbed")
    run(configure(root, "run"))
    return root / "run"
