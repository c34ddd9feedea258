"""The arms of ``verify``: which runs are made, what each adds to the command, and what it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_det.verify.command import Schedule
from megatron_det.verify.compare import Comparison

IDENTICAL = "identical"
DIFFERS = "differs"
MUST_DIFFER = "differs, as it must"
NOT_RUN = "not run"
REFERENCE = "reference"
FAILED = "could not run"
CONTROL_EQUAL = "identical, though it must differ"


@dataclass
class Arm:
    """One run. ``against`` is the arm that it is compared with from iteration ``first`` on."""

    name: str
    flags: tuple[str, ...]
    against: str | None
    first: int
    must_differ: bool = False
    portable: bool = False
    result: str = NOT_RUN
    seconds: float = 0.0
    exit_code: int | None = None
    ranks: int = 0
    iterations: tuple[int, int] | None = None
    comparison: Comparison | None = None
    broken: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "flags": list(self.flags),
            "result": self.result,
            "against": self.against,
            "iterations": list(self.iterations) if self.iterations else None,
            "ranks": self.ranks,
            "seconds": round(self.seconds, 2),
            "exit_code": self.exit_code,
            "comparison": self.comparison.as_dict() if self.comparison else None,
        }


def folder(out: Path, name: str) -> Path:
    return out / name


def ledger(out: Path, name: str) -> Path:
    return out / name / "ledger"


def resume_from(out: Path) -> Path:
    """A view of the checkpoint directory whose newest checkpoint is that of the resume step."""
    return out / "resume-from"


def plan(out: Path, steps: Schedule, runs: int, vary: Sequence[tuple[str, ...]] = ()) -> list[Arm]:
    """The arms in the order in which they run. The checkpoint that ``continued`` takes serves ``resumed`` and ``cold``.

    ``vary``: flags of further runs from scratch whose bits must be the same at level ``placement``.
    """
    checkpoint = str(out / "checkpoint")
    end = ("--exit-interval", str(steps.iterations))
    load = ("--load", str(resume_from(out)), *end)
    repeats = [chr(ord("a") + number) for number in range(runs)]
    after = steps.resume_at + 1
    return [
        *(Arm(name, end, repeats[0] if name != repeats[0] else None, 1) for name in repeats),
        Arm("continued", ("--save", checkpoint, "--save-interval", str(steps.resume_at), *end), repeats[0], 1),
        Arm("resumed", load, "continued", after),
        Arm("cold", (*load, "--no-load-optim", "--no-load-rng"), "continued", after, must_differ=True),
        *(
            Arm(f"vary-{number}", (*end, *flags), repeats[0], 1, portable=True)
            for number, flags in enumerate(vary, start=1)
        ),
    ]
