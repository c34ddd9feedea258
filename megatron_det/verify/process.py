"""Runs one launch command in fresh processes, with a log, a time limit, and a way to end exactly what was started."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from megatron_det.errors import FormatError

POLL = 0.25
GRACE = 15.0


def run(command: list[str], log: Path, timeout: float, tick: Callable[[float], None]) -> tuple[int, float]:
    """(exit code, seconds). ``tick`` is called several times a second with the seconds so far.

    Raises: FormatError (DET-START) when the command cannot be started, (DET-TIMEOUT) when it takes too long.
    """
    start = time.monotonic()
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise FormatError.of(
                "DET-START", command[0], found=str(error), needed="a command that can be started",
                why="Every arm is a fresh process.", do="check the words after --.",
            ) from error  # fmt: skip
        family: set[psutil.Process] = set()
        try:
            while not ended(process):
                family.update(descendants(process))
                if time.monotonic() - start > timeout:
                    raise FormatError.of(
                        "DET-TIMEOUT", "arm", found=f"no end after {timeout:.0f} s", needed="an end",
                        why="A hanging arm proves nothing.", do=f"raise --timeout; its log is {log}.",
                    )  # fmt: skip
                tick(time.monotonic() - start)
                time.sleep(POLL)
        finally:
            end_tree(process, family)
    return process.returncode, time.monotonic() - start


def ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it ended. It is not reaped yet, so that its id, and with it its group, stays ours until ``end_tree``."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def descendants(process: subprocess.Popen[bytes]) -> set[psutil.Process]:
    """All that it started and what is left in its process group (psutil tells a process from a later owner of its id).

    Workers of torchrun have sessions of their own, so the group alone is not enough; a child whose parent is gone is
    nobody's descendant, so the tree alone is not either.
    """
    found = set(psutil.Process(process.pid).children(recursive=True))
    for one in psutil.process_iter():
        try:
            if one.pid != process.pid and os.getpgid(one.pid) == process.pid:
                found.add(one)
        except ProcessLookupError:
            continue
    return found


def end_tree(process: subprocess.Popen[bytes], family: set[psutil.Process]) -> None:
    """Ends, by id, the process and all that it started, also when it is gone itself; kills what stays. Reaps it."""
    members = [*(family | descendants(process)), psutil.Process(process.pid)]
    for signal in ("terminate", "kill"):
        for member in members:
            try:
                getattr(member, signal)()
            except psutil.NoSuchProcess:
                continue
        _, members = psutil.wait_procs([m for m in members if m.pid != process.pid], timeout=GRACE)
        if not members:
            break
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


LAUNCHER = "torch/distributed/elastic"
ERROR = re.compile(r"^(\[rank\d+\]:\s*)?[\w.]*(Error|Exception|error):")


def tail(log: Path, lines: int = 12) -> list[str]:
    """The last lines that the script wrote: what torchrun says after a failure is about torchrun."""
    text = log.read_text(errors="replace") if log.exists() else ""
    written = [line for line in text.splitlines() if line.strip()]
    ends = next((number for number, line in enumerate(written) if LAUNCHER in line), len(written))
    return (written[:ends] or written)[-lines:]


def cause(lines: list[str]) -> str:
    """The line that says what went wrong: the last one that looks like an error, else the last."""
    found = [line for line in lines if ERROR.match(line.strip())]
    return (found or lines or ["no output"])[-1].strip()
