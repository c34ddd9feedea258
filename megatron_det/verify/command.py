"""Reads and rewrites a launch command: adds what an arm needs, takes away what would disturb it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_det.errors import FormatError
from megatron_det.formats.argfile import expand_argument_files

# The user's own value would make arms write into each other, or load something else. Flag -> number of values.
REPLACED = {
    "--save": 1,
    "--load": 1,
    "--save-interval": 1,
    "--exit-interval": 1,
    "--ckpt-step": 1,
    "--det-ledger": 1,
    "--det-chaos": 1,
    "--no-load-rng": 0,
    "--no-load-optim": 0,
    "--async-save": 0,
    "--save-retain-interval": 1,
    "--finetune": 0,
}


@dataclass(frozen=True)
class Launch:
    """The user's command without what verify sets itself. ``removed`` is said to the user."""

    words: tuple[str, ...]
    removed: tuple[str, ...]

    def value(self, flag: str) -> str | None:
        """The last value of ``--flag VALUE`` or ``--flag=VALUE``."""
        found = None
        for number, word in enumerate(self.words):
            if word == flag and number + 1 < len(self.words):
                found = self.words[number + 1]
            elif word.startswith(flag + "="):
                found = word.partition("=")[2]
        return found

    def with_flags(self, *flags: str) -> list[str]:
        """The command with flags at its end, where a script's arguments are."""
        switches = {word for word in self.words if word.startswith("--")}
        return [*self.words, *(flag for flag in flags if not (flag == "--det" and flag in switches))]


def read(words: Sequence[str]) -> Launch:
    """Raises: FormatError when there is no command or an argument file cannot be read."""
    if not words:
        raise FormatError.of(
            "DET-NO-COMMAND", "launch command", found="nothing after --", needed="the command that starts training",
            why="verify starts it in fresh processes.",
            do="megatron-det verify -- torchrun --nproc-per-node 2 pretrain_gpt.py ...",
        )  # fmt: skip
    kept: list[str] = []
    removed: list[str] = []
    rest = expand_argument_files(words)
    while rest:
        word = rest.pop(0)
        flag, equals, _ = word.partition("=")
        if flag not in REPLACED:
            kept.append(word)
            continue
        values = [] if equals else [rest.pop(0) for _ in range(min(REPLACED[flag], len(rest)))]
        removed.append(" ".join([word, *values]))
    return Launch(tuple(kept), tuple(removed))


@dataclass(frozen=True)
class Schedule:
    """How far arms run (``iterations``) and where the checkpoint is taken (``resume_at``)."""

    iterations: int
    resume_at: int


def schedule(launch: Launch, iterations: int | None, resume_at: int | None) -> Schedule:
    """Defaults: all of a short run (--train-iters up to 20), else twice the resume step; the middle for the resume.

    ``--train-iters`` itself is never changed: it decides the order of the data and the learning rates.
    Raises: FormatError when the resume step is not inside the run.
    """
    text = launch.value("--train-iters") or ""
    total = int(text) if text.isdigit() else None
    if iterations is None:
        short = total is not None and total <= 20
        iterations = total if short and total is not None else 2 * (resume_at or 5)
    resume_at = resume_at if resume_at is not None else iterations // 2
    if not 0 < resume_at < iterations or (total is not None and iterations > total):
        raise FormatError.of(
            "DET-RESUME-STEP", "--resume-at and --iters",
            found=f"resume at {resume_at} of {iterations} iterations (--train-iters {text or 'not given'})",
            needed="0 < resume step < iterations <= --train-iters",
            why="The resumed run must have steps to compare.", do="change --resume-at or --iters.",
        )  # fmt: skip
    return Schedule(iterations, resume_at)


def chaos_by_arm(texts: Sequence[str], arms: Sequence[str]) -> dict[str, str]:
    """``ARM:SPEC`` texts by arm. Raises: FormatError for an arm that is not run."""
    chosen = {}
    for text in texts:
        arm, _, spec = text.partition(":")
        if arm not in arms or not spec:
            raise FormatError.of(
                "DET-CHAOS", f"--chaos {text}", found=f"arm {arm!r}",
                needed="ARM:SPEC with an arm of " + ", ".join(arms),
                why="A fault that is not injected tests nothing.", do="name an arm that runs.",
            )  # fmt: skip
        chosen[arm] = spec
    return chosen


def checkpoint_folder(out: Path, iteration: int) -> Path:
    return out / "checkpoint" / f"iter_{iteration:07d}"
