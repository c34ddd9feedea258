"""The tree of errors. Every refusal says what was found, what is needed, why, and what to do.

Exit codes: 1 a comparison found a difference; 2 the request cannot be served or was refused before
training; 3 a running job stopped because a guarantee broke.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Self

EXIT_DIFFERS = 1
EXIT_REFUSED = 2
EXIT_BROKEN = 3


@dataclass(frozen=True)
class Finding:
    """One problem, in the four parts every refusal carries.

    ``code`` is stable (``DET-...``) and is what troubleshooting and ``--det-allow`` refer to.
    """

    code: str
    what: str
    found: str
    needed: str
    why: str
    do: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)

    def one_line(self) -> str:
        return f"{self.code}: {self.what}: found {self.found}; needed {self.needed}. {self.why} Do: {self.do}"


class DetError(Exception):
    """Base of all errors that this package raises on purpose."""

    exit_code = EXIT_REFUSED

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.one_line())
        self.finding = finding

    @classmethod
    def of(cls, code: str, what: str, *, found: object, needed: str, why: str, do: str) -> Self:
        return cls(Finding(code, what, str(found), needed, why, do))


class Refused(DetError):
    """Before training: the run cannot be vouched for. Several findings may be carried at once."""

    def __init__(self, *findings: Finding) -> None:
        if not findings:
            raise ValueError("Refused needs at least one finding")
        super().__init__(findings[0])
        self.findings = findings


class FormatError(DetError):
    """A ledger, manifest, receipt or trace that is missing, foreign, of another schema, or damaged."""


class CheckpointError(DetError):
    """A checkpoint that is missing, incomplete or damaged."""


class PatchError(DetError):
    """A symbol cannot be replaced: its source is unknown, or somebody else replaced it."""


class GuaranteeBroken(DetError):
    """In the middle of a run: something that was promised does not hold any more."""

    exit_code = EXIT_BROKEN
