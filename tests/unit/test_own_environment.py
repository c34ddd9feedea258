"""One test's environment never reaches the next: in-process Megatron builds write ``NVTE_*_ATTN``."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

GUARD = Path(__file__).parents[1] / "conftest.py"
LEAK = """
import os

def test_builds_a_model():
    os.environ["NVTE_FLASH_ATTN"] = "1"
    os.environ.pop("DET_TEST_KEPT")

def test_starts_a_run():
    assert "NVTE_FLASH_ATTN" not in os.environ
    assert os.environ["DET_TEST_KEPT"] == "yes"
"""


@pytest.mark.parametrize(("guard", "passed"), [(True, 2), (False, 1)])
def test_what_a_test_sets_is_gone_for_the_next(pytester: pytest.Pytester, monkeypatch, guard, passed):
    """With our guard both tests pass; without it, the second sees what the first left."""
    monkeypatch.setenv("DET_TEST_KEPT", "yes")
    monkeypatch.delenv("NVTE_FLASH_ATTN", raising=False)
    if guard:
        pytester.makeconftest(GUARD.read_text())
    pytester.makepyfile(LEAK)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=passed, failed=2 - passed)
