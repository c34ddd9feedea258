"""The only writer of ``os.environ``: a table of variables, what they must be, why, and when a library reads them.

A value that the user set is kept when it is acceptable; one that is not becomes a finding of the preflight. Variables
that are read when the interpreter or a library starts cannot be set late: the process is started again, once, with
the same command line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

from megatron_det.errors import Finding

STARTED = "MEGATRON_DET_STARTED"


@dataclass(frozen=True)
class Variable:
    """``default`` is set when the user set nothing. ``at_start``: read when the interpreter or a library starts."""

    name: str
    default: str
    accepted: Callable[[str], bool]
    needed: str
    why: str
    at_start: bool = False
    stand_in_only: bool = False


def one_of(*values: str) -> Callable[[str], bool]:
    return lambda value: value in values


def whole_number(value: str) -> bool:
    return value.isdigit() and int(value) > 0


def fixed_seed(value: str) -> bool:
    return value.isdigit()


def triton_directory() -> str:
    return os.path.join(os.path.expanduser("~"), ".triton", "cache")


def table() -> tuple[Variable, ...]:
    return (
        Variable(
            "PYTHONHASHSEED", "0", fixed_seed, "a number", "Sets of strings are walked in hash order.", at_start=True
        ),
        Variable(
            "OMP_NUM_THREADS", "1", whole_number, "a fixed number",
            "CPU sums are split by the number of threads.", at_start=True,
        ),
        Variable(
            "TORCHDYNAMO_DISABLE", "1", one_of("1"), "1",
            "Which kernels torch.compile makes depends on the shapes seen so far; a resumed run has seen others.",
        ),
        Variable(
            "TRITON_CACHE_DIR", triton_directory(), bool, "a directory", "Autotuned choices live there.",
        ),
        Variable(
            "CUDA_DEVICE_MAX_CONNECTIONS", "1", one_of("1"), "1",
            "Megatron demands it with tensor and context parallelism.", stand_in_only=True,
        ),
    )  # fmt: skip


def wanted(stand_in: bool) -> list[Variable]:
    return [variable for variable in table() if stand_in or not variable.stand_in_only]


def prepare(environment: MutableMapping[str, str], stand_in: bool) -> list[str]:
    """Sets what is unset. Returns the names of variables that were set too late for this process."""
    late = []
    for variable in wanted(stand_in):
        if variable.name not in environment:
            environment[variable.name] = variable.default
            if variable.at_start:
                late.append(variable.name)
    return late


def findings(environment: MutableMapping[str, str], stand_in: bool, late: list[str]) -> list[Finding]:
    """Values that the user set and that cannot be vouched for, and variables that this process missed."""
    found = []
    for variable in wanted(stand_in):
        value = environment.get(variable.name)
        if value is None or not variable.accepted(value):
            shown = "unset" if value is None else repr(value)
            do = f"export {variable.name}={variable.default}"
            found.append(Finding("DET-ENV", variable.name, shown, variable.needed, variable.why, do))
        elif variable.name in late:
            do = f"export {variable.name}={variable.default} before starting"
            found.append(Finding("DET-ENV-LATE", variable.name, "set too late", variable.needed, variable.why, do))
    return found


def start_again(environment: MutableMapping[str, str]) -> None:
    """Replaces this process by the same command with the environment as it is now. Returns only when it may not:
    started again already, or the command line cannot be repeated (standard input, interactive)."""
    command = sys.orig_argv
    if environment.get(STARTED) == "1" or len(command) < 2 or command[-1] == "-" or hasattr(sys, "ps1"):
        return
    if not sys.argv or sys.argv[0] in ("", "-"):
        return
    environment[STARTED] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *command[1:]], dict(environment))


def place(environment: MutableMapping[str, str], placement: str) -> list[Finding]:
    """Gives this process the rank that the placement names; LOCAL_RANK, and with it the device, stays."""
    rank, size = environment.get("RANK", "0"), environment.get("WORLD_SIZE", "1")
    words = placement.split(",")
    if sorted(words) != sorted(str(r) for r in range(int(size))):
        return [
            Finding(
                "DET-PLACEMENT", "--det-placement", placement, f"each of 0 to {int(size) - 1} once",
                "Every rank is somewhere.", "write one number per process, with commas.",
            )
        ]  # fmt: skip
    environment["RANK"] = words[int(rank)]
    return []
