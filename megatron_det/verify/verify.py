"""``megatron-det verify``: runs the arms one after another, compares each as soon as it is done, gives the verdict."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_det.errors import EXIT_DIFFERS, EXIT_REFUSED, DetError, FormatError
from megatron_det.formats import manifest as manifests
from megatron_det.formats.ledger import RunLedger, read_run
from megatron_det.verify import arms as a
from megatron_det.verify import process
from megatron_det.verify.command import Launch, Schedule, checkpoint_folder
from megatron_det.verify.compare import MEANING, compare, headline

SCHEMA = 1
MARK = ".megatron-det-verify"
STATE_BROKEN = "DET-CKPT-STATE"


@dataclass
class Job:
    """One call of verify. ``progress(arm, iteration, seconds)`` is called while an arm runs."""

    launch: Launch
    out: Path
    steps: Schedule
    runs: int
    extra: tuple[str, ...]
    chaos: dict[str, str]
    timeout: float
    fail_fast: bool
    progress: Callable[[a.Arm, int, float], None]
    finished: Callable[[a.Arm], None]
    vary: tuple[tuple[str, ...], ...] = ()
    arms: list[a.Arm] = field(default_factory=list)
    error: DetError | None = None
    lines: list[str] = field(default_factory=list)


def prepare_output(out: Path, overwrite: bool) -> None:
    """Makes OUT, or empties one that verify made. Raises: FormatError; anything else is never deleted."""
    try:
        if out.exists() and any(out.iterdir()):
            if not (overwrite and (out / MARK).exists()):
                do = "add --overwrite" if (out / MARK).exists() else "choose an empty or new directory"
                raise FormatError.of(
                    "DET-OUT", f"--out {out}", found="a directory that is not empty", needed="an empty one",
                    why="Runs of two calls would mix.", do=do + ".",
                )  # fmt: skip
            for child in out.iterdir():
                shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
        out.mkdir(parents=True, exist_ok=True)
        (out / MARK).write_text("made by megatron-det verify\n")
    except OSError as error:
        raise FormatError.of(
            "DET-OUT", f"--out {out}", found=str(error), needed="a directory that can be written",
            why="Logs, ledgers and checkpoints go there.", do="choose another --out.",
        ) from error  # fmt: skip


def run(job: Job) -> int:
    """Runs all arms. Returns the exit code; ``verify.json`` says the same."""
    job.arms = a.plan(job.out, job.steps, job.runs, job.vary)
    ledgers: dict[str, RunLedger] = {}
    try:
        for arm in job.arms:
            _run_arm(job, arm)
            if arm.broken is None:
                ledgers[arm.name] = _complete(job, arm)
                _judge(arm, ledgers)
            job.finished(arm)
            if arm.result in (a.DIFFERS,) and (job.fail_fast or arm.broken):
                break
    except DetError as error:
        job.error = error
    except KeyboardInterrupt:
        manifests.write_json(job.out / "verify.json", verdict(job, EXIT_REFUSED))
        raise
    settle_reference(job.arms)
    code = exit_code(job)
    manifests.write_json(job.out / "verify.json", verdict(job, code))
    return code


def _run_arm(job: Job, arm: a.Arm) -> None:
    folder = a.folder(job.out, arm.name)
    folder.mkdir()
    flags = ["--det", "--det-ledger", str(a.ledger(job.out, arm.name)), *arm.flags, *job.extra]
    if arm.name in job.chaos:
        flags += ["--det-chaos", job.chaos[arm.name]]
    command = job.launch.with_flags(*flags)
    (folder / "command.json").write_text(json.dumps(command) + "\n")
    arm.result = a.FAILED
    log = folder / "log.txt"
    newest = a.ledger(job.out, arm.name) / "rank-00000.jsonl"
    arm.exit_code, arm.seconds = process.run(
        command, log, job.timeout, lambda seconds: job.progress(arm, arm.first - 1 + _recorded(newest), seconds)
    )
    if arm.exit_code != 0:
        _explain_failure(job, arm, log)


def _recorded(path: Path) -> int:
    """How many iterations a growing ledger holds, for the progress line."""
    try:
        with path.open("rb") as file:
            return sum(line.startswith(b'{"kind":"step"') for line in file)
    except OSError:
        return 0


def _explain_failure(job: Job, arm: a.Arm, log: Path) -> None:
    """A state that is not what was saved is a difference; everything else means that the arm could not run."""
    findings = _refusals(a.ledger(job.out, arm.name))
    for rank, finding in findings:
        if finding["code"] == STATE_BROKEN:
            arm.broken = {**finding, "rank": rank}
            arm.result = a.DIFFERS
            return
    job.lines = process.tail(log)
    if findings:
        rank, finding = findings[0]
        raise FormatError.of(
            finding["code"], f"arm {arm.name}, rank {rank}: {finding['what']}", found=finding["found"],
            needed=finding["needed"], why=finding["why"], do=finding["do"],
        )  # fmt: skip
    raise FormatError.of(
        "DET-ARM", f"arm {arm.name}", found=f"exit code {arm.exit_code}: {process.cause(job.lines)}",
        needed="a run that ends well", why="An arm that failed proves nothing.", do=f"read {log}.",
    )  # fmt: skip


def _refusals(directory: Path) -> list[tuple[int, dict[str, str]]]:
    """(rank, finding) of every rank that refused. Raises: FormatError for a record that cannot be read."""
    found = []
    for path in sorted(directory.glob("rank-*.refusal.json")):
        try:
            record = json.loads(path.read_text())
            found += [(record["rank"], finding) for finding in record["findings"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FormatError.of(
                "DET-REFUSAL-DAMAGED", str(path), found=f"{type(error).__name__}: {error}",
                needed="the findings of a refused run", why="Why the arm refused is not known.",
                do="read log.txt of the arm.",
            ) from error  # fmt: skip
    return found


def _complete(job: Job, arm: a.Arm) -> RunLedger:
    """The arm's ledger, with every iteration that it must have. Raises: FormatError."""
    directory = a.ledger(job.out, arm.name)
    if not directory.is_dir():
        raise FormatError.of(
            "DET-NOT-ACTIVE", f"arm {arm.name}", found="no ledger although the run ended well",
            needed="the ledger of an active run", why="--det never became active, so nothing was promised.",
            do="install megatron-det where the script runs; if autoload is off: python -m megatron_det.run SCRIPT",
        )  # fmt: skip
    ledger = read_run(directory)
    needed = list(range(arm.first, job.steps.iterations + 1))
    missing = sorted(set(needed) - set(ledger.iterations()))
    if missing:
        raise FormatError.of(
            "DET-ARM-SHORT", f"arm {arm.name}", found=f"no iteration {missing[0]}", needed=f"{needed[0]}..{needed[-1]}",
            why="What was not recorded cannot be compared.", do="check --iters against the script's own limits.",
        )  # fmt: skip
    if arm.name == "continued":
        _show_checkpoint(job)
    arm.ranks, arm.iterations = ledger.world_size, (ledger.iterations()[0], ledger.iterations()[-1])
    return ledger


def _show_checkpoint(job: Job) -> None:
    """Makes the directory that the resumed arms load: the checkpoint at the resume step and a tracker that names it.

    Not ``--ckpt-step``: in the ``torch`` format megatron-core 0.19.2 then loads the distributed optimizer of the
    *newest* checkpoint into the model of the one that was asked for.
    """
    checkpoint = checkpoint_folder(job.out, job.steps.resume_at)
    if not checkpoint.is_dir():
        raise FormatError.of(
            "DET-CKPT-MISSING", f"checkpoint at iteration {job.steps.resume_at}", found="none was saved",
            needed="one to resume from", why="The resumed arm starts there.", do="does the script save checkpoints?",
        )  # fmt: skip
    view = a.resume_from(job.out)
    view.mkdir()
    (view / checkpoint.name).symlink_to(checkpoint, target_is_directory=True)
    (view / "latest_checkpointed_iteration.txt").write_text(str(job.steps.resume_at))


def _judge(arm: a.Arm, ledgers: dict[str, RunLedger]) -> None:
    if arm.against is None:
        arm.result = a.REFERENCE
        return
    arm.comparison = compare(
        ledgers[arm.against], ledgers[arm.name], first=arm.first, with_manifests=not arm.must_differ,
        portable=arm.portable,
    )  # fmt: skip
    same = arm.comparison.identical
    if arm.must_differ:
        arm.result = a.CONTROL_EQUAL if same else a.MUST_DIFFER
    else:
        arm.result = a.IDENTICAL if same else a.DIFFERS


def settle_reference(arms: list[a.Arm]) -> None:
    """The first arm is what others were compared with: it is identical when at least one of them is."""
    equal = any(arm.against == arms[0].name and arm.result == a.IDENTICAL for arm in arms)
    if arms[0].result == a.REFERENCE and equal:
        arms[0].result = a.IDENTICAL


def exit_code(job: Job) -> int:
    results = {arm.result for arm in job.arms}
    if a.DIFFERS in results:
        return EXIT_DIFFERS
    if job.error is not None or results & {a.CONTROL_EQUAL, a.FAILED, a.NOT_RUN}:
        return EXIT_REFUSED
    return 0


def first_difference(job: Job) -> dict[str, Any] | None:
    """The headline over all arms, in the order in which they ran."""
    for arm in job.arms:
        if arm.result != a.DIFFERS:
            continue
        where = {"arm": arm.name, "against": arm.against}
        if arm.broken is not None:
            name = arm.broken["what"].split(", ")[-1].split(" ")[0]
            found = {"a": arm.broken["needed"], "b": arm.broken["found"], "note": arm.broken["why"], "ulp": None}
            cause = "state differs"
            return {**where, "iteration": arm.first, "rank": arm.broken["rank"], "quantity": name, "cause": cause,
                    "meaning": MEANING[cause], "all_quantities": [name], **found}  # fmt: skip
        assert arm.comparison is not None
        return {**where, **(headline(arm.comparison) or {})}
    return None


def verdict(job: Job, code: int) -> dict[str, Any]:
    words = {0: "identical", EXIT_DIFFERS: "differs", EXIT_REFUSED: "could not run"}
    notices = dict.fromkeys(n for arm in job.arms if arm.comparison for n in arm.comparison.notices)
    return {
        "schema": SCHEMA,
        "verdict": words[code],
        "exit_code": code,
        "iterations": job.steps.iterations,
        "resume_at": job.steps.resume_at,
        "command": list(job.launch.words),
        "removed": list(job.launch.removed),
        "arms": [arm.as_dict() for arm in job.arms],
        "first_difference": first_difference(job),
        "notices": list(notices),
        "error": job.error.finding.as_dict() if job.error is not None else None,
    }
