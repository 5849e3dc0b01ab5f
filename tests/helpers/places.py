"""Where things lie, for tests and for what their processes run."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
PACKAGE = ROOT / "cookbook_npu"
HELPERS = TESTS / "helpers"
FIXTURES = TESTS / "fixtures"
