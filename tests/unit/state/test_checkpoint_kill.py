"""Runs ``checkpoint_kill_cases.py`` in a fresh process: its cases fork, and a fork of a test runner that has run other
tests (threads of OpenMP and gloo) can wait for a lock for ever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("checkpoint_kill_cases.py")


def test_checkpoint_kill_cases():
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)],
                          cwd=CASES.parents[3], stdin=subprocess.DEVNULL, text=True, capture_output=True, timeout=400,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
