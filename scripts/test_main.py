"""Runs the checks one after another, shows their output, and ends in a table.

Examples:
    scripts/test                 everything
    scripts/test --fast          without the tests that train through Megatron's pretrain()
    scripts/test -k ledger       pytest arguments are passed on
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Step:
    name: str
    command: list[str]


def steps(arguments: list[str]) -> list[Step]:
    fast = "--fast" in arguments
    passed_on = [a for a in arguments if a != "--fast"]
    marker = ["-m", "not training"] if fast else []
    return [
        Step("style (ruff)", ["ruff", "check", "."]),
        Step("types (mypy)", ["mypy"]),
        Step("rooms (import-linter)", ["lint-imports"]),
        Step("tests (pytest)", [sys.executable, "-m", "pytest", "-q", "--durations=15", *marker, *passed_on]),
    ]


def main(arguments: list[str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return 0
    rows: list[tuple[str, str, float]] = []
    failed = False
    for step in steps(arguments):
        print(f"== {step.name}", flush=True)
        start = time.monotonic()
        code = subprocess.run(step.command, stdin=subprocess.DEVNULL, check=False).returncode
        failed = failed or code != 0
        rows.append((step.name, "passed" if code == 0 else f"FAILED (exit {code})", time.monotonic() - start))
    table = Table("step", "result", "seconds")
    for name, result, seconds in rows:
        table.add_row(name, result, f"{seconds:.1f}")
    Console(width=80).print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
