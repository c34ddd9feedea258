"""Saves at every step of a short run, resumes in a fresh process from each, and compares all later steps bit for bit.

    results = resume_every_step(["torchrun", "--nproc-per-node", "2", "pretrain_gpt.py", ...], 4, Path("proof"))
    assert all(not result.differences for result in results)

The oracle is the process that went on. Compared: everything in the ledger (data ids and tensors, RNG streams, learning
rate, parameters, main parameters, moments, losses, gradient norm), and the receipts of checkpoints saved at one step.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_det.errors import FormatError
from megatron_det.formats import receipt
from megatron_det.formats.ledger import RunLedger, read_run

FLAGS = ("--det", "--det-device", "cpu")


@dataclass
class Resumed:
    """One resumed run: where it started, which steps were compared, and what differed (nothing: bit for bit)."""

    start: int
    steps: list[int] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


def resume_every_step(
    command: Sequence[str],
    steps: int,
    out: Path,
    *,
    flags: Sequence[str] = FLAGS,
    starts: Sequence[int] | None = None,
    chain: bool = False,
    timeout: float = 600,
) -> list[Resumed]:
    """``starts``: the steps to resume from (all but the last when None). ``chain``: each resumed run makes one step,
    saves, and the next one resumes from *its* checkpoint (A -> B -> C).

    Raises: FormatError (DET-ARM) when a run does not end well.
    """
    out = Path(out).absolute()
    ends = ("--exit-interval", str(steps))
    save = ("--save", str(out / "straight"), "--save-interval", "1")
    run(out, "straight", [*command, *flags, *save, *ends], timeout)
    oracle = read_run(out / "straight-ledger")
    results, source = [], out / "straight"
    for start in starts if starts is not None else range(1, steps):
        name = f"from-{start}"
        last = start + 1 if chain else steps
        again = ("--save", str(out / name), "--save-interval", "1") if chain else ()
        until = ("--exit-interval", str(last))
        run(out, name, [*command, *flags, "--load", str(view(out, source, start)), *again, *until], timeout)
        result = Resumed(start, list(range(start + 1, last + 1)))
        result.differences = differences(oracle, read_run(out / f"{name}-ledger"), result.steps)
        if chain:
            result.differences += receipts(out / "straight", out / name, last)
            source = out / name
        results.append(result)
    return results


def run(out: Path, name: str, command: Sequence[str], timeout: float) -> None:
    """One fresh run with a ledger and a log beside it."""
    out.mkdir(parents=True, exist_ok=True)
    log = out / f"{name}.log"
    words = [*command, "--det-ledger", str(out / f"{name}-ledger")]
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    with log.open("wb") as output:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, timeout=timeout, check=False,
            env=kept,
        )  # fmt: skip
    if done.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if "megatron-det: rank" in line]
        raise FormatError.of(
            "DET-ARM", f"run {name}", found=f"exit code {done.returncode} {' '.join(lines[:1])}",
            needed="a run that ends well", why="A run that failed proves nothing.", do=f"read {log}.",
        )  # fmt: skip


def view(out: Path, source: Path, iteration: int) -> Path:
    """A directory whose newest checkpoint is that of ``iteration`` (see ``verify``: why not ``--ckpt-step``)."""
    checkpoint = f"iter_{iteration:07d}"
    folder = out / f"view-{iteration}"
    folder.mkdir(exist_ok=True)
    (folder / checkpoint).symlink_to(source / checkpoint, target_is_directory=True)
    (folder / receipt.TRACKER).write_text(str(iteration))
    return folder


def differences(oracle: RunLedger, found: RunLedger, steps: Sequence[int]) -> list[str]:
    """What the ledgers of two runs do not agree on, in the order in which it happened; a step that is missing too."""
    told = []
    for step in steps:
        for rank, ledger in oracle.ranks.items():
            a, b = ledger.steps.get(step), found.ranks[rank].steps.get(step) if rank in found.ranks else None
            if a is None or b is None:
                told.append(f"step {step}, rank {rank}: not recorded")
                continue
            one, other = dict(a), dict(b)
            told += [f"step {step}, rank {rank}: {n}" for n in {**one, **other} if one.get(n) != other.get(n)]
    return told


def receipts(one: Path, other: Path, iteration: int) -> list[str]:
    """Entries on which the receipts of two checkpoints of one step do not agree."""
    name = f"iter_{iteration:07d}"
    pairs = zip(receipt.read_all(one / name)[1], receipt.read_all(other / name)[1], strict=True)
    return [f"receipt {iteration}, rank {m.rank}: {m.name}" for a, b in pairs for m in receipt.compare(a, b)]
