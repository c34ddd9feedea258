"""Runs one launch command in fresh processes, with a log, a time limit, and a way to end exactly what was started."""

from __future__ import annotations

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
        try:
            while process.poll() is None:
                if time.monotonic() - start > timeout:
                    raise FormatError.of(
                        "DET-TIMEOUT", "arm", found=f"no end after {timeout:.0f} s", needed="an end",
                        why="A hanging arm proves nothing.", do=f"raise --timeout; its log is {log}.",
                    )  # fmt: skip
                tick(time.monotonic() - start)
                time.sleep(POLL)
        finally:
            end_tree(process)
    return process.returncode, time.monotonic() - start


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and all that it started (workers have sessions of their own), by id; kills what stays."""
    if process.poll() is not None:
        return
    parent = psutil.Process(process.pid)
    family = [*parent.children(recursive=True), parent]
    for signal in ("terminate", "kill"):
        for member in family:
            try:
                getattr(member, signal)()
            except psutil.NoSuchProcess:
                continue
        _, family = psutil.wait_procs(family, timeout=GRACE)
        if not family:
            break
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
