"""Settings for all tests."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# No deadline: machines are shared. Derandomised: CI must not fail on a case that nobody can see again.
settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Each test leaves the environment as it found it: a Megatron model that is built in this process writes
    ``NVTE_*_ATTN`` there, and a ``pretrain`` that a later test starts would inherit and refuse them."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)
