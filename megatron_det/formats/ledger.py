"""The ledger: per rank one append-only JSON-lines file of exact values. Schema 1, described in docs/architecture.md.

Each line is one JSON object whose last key ``crc`` is the CRC-32 of the line's text without it. A line is written
with one ``write`` and is readable after ``kill -9``. A torn last line is reported, not fatal.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_det.errors import FormatError

SCHEMA = 1
FILE = re.compile(r"rank-(\d{5})\.jsonl")
Items = Sequence[tuple[str, dict[str, Any]]]


def rank_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.jsonl"


def problem(code: str, path: Path, found: str, needed: str, why: str, do: str) -> FormatError:
    return FormatError.of(code, str(path), found=found, needed=needed, why=why, do=do)


def sealed(record: dict[str, Any]) -> str:
    """The record as one line with its checksum."""
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=True)
    return f'{text[:-1]},"crc":"{zlib.crc32(text.encode()):08x}"}}\n'


def unsealed(line: str) -> dict[str, Any] | None:
    """The record of a line, or None when the line is damaged."""
    body, mark, tail = line.rstrip("\n").rpartition(',"crc":"')
    text = body + "}"
    if not mark or not line.endswith("\n") or tail[8:] != '"}' or f"{zlib.crc32(text.encode()):08x}" != tail[:8]:
        return None
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


class LedgerWriter:
    """Appends lines to the ledger of one rank of one run.

    Raises: FormatError when the directory cannot be written, or the file exists (it belongs to another run).
    A write that fails later (disk full) raises FormatError too: a run that promised a ledger stops.
    """

    def __init__(
        self, directory: Path, rank: int, world_size: int, run_id: str, start_iteration: int = 0, sync: bool = False
    ) -> None:
        self.path = rank_path(Path(directory), rank)
        self.sync = sync
        header = {"kind": "header", "schema": SCHEMA, "run_id": run_id, "rank": rank, "world_size": world_size}
        header["start_iteration"] = start_iteration
        self._create(sealed(header))
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)

    def _create(self, first_line: str) -> None:
        """The file appears with its header or not at all; one that exists is never touched."""
        try:
            self._make_directory()
            name = self.path.with_name(f".new-{self.path.name}-{os.getpid()}")
            name.write_text(first_line)
            try:
                os.link(name, self.path)
            finally:
                name.unlink()
        except FileExistsError as error:
            raise problem(
                "DET-LEDGER-FOREIGN", self.path, "a ledger of another run", "a directory without ledgers",
                "Two runs in one file could not be told apart.", "choose a new --det-ledger directory.",
            ) from error  # fmt: skip
        except OSError as error:
            raise problem(
                "DET-LEDGER-WRITE", self.path, str(error), "a directory that can be written",
                "Every iteration is recorded there.", "choose another --det-ledger directory.",
            ) from error  # fmt: skip

    def _make_directory(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:  # a file of that name: not the same as a ledger of another run
            raise NotADirectoryError(error.errno, "not a directory", str(self.path.parent)) from error

    def _write(self, record: dict[str, Any]) -> None:
        data = sealed(record).encode()
        try:
            written = os.write(self._file, data)
            if written != len(data):
                raise OSError(f"only {written} of {len(data)} bytes written")
            if self.sync:
                os.fsync(self._file)
        except OSError as error:
            raise problem(
                "DET-LEDGER-WRITE", self.path, str(error), "room for one line per iteration",
                "A run that promised a ledger must not go on without it.", "free space, then resume.",
            ) from error  # fmt: skip

    def step(self, iteration: int, consumed_samples: int, items: Items) -> None:
        record = {"kind": "step", "iteration": iteration, "consumed_samples": consumed_samples}
        self._write({**record, "q": [list(item) for item in items]})

    def evaluation(self, iteration: int, items: Items) -> None:
        self._write({"kind": "eval", "iteration": iteration, "q": [list(item) for item in items]})

    def end(self, iteration: int, how: str) -> None:
        self._write({"kind": "end", "iteration": iteration, "exit": how})

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@dataclass
class RankLedger:
    """What one rank recorded. ``torn`` describes an incomplete last line."""

    path: Path
    run_id: str
    rank: int
    world_size: int
    start_iteration: int
    steps: dict[int, list[tuple[str, dict[str, Any]]]] = field(default_factory=dict)
    consumed: dict[int, int] = field(default_factory=dict)
    evaluations: list[tuple[int, list[tuple[str, dict[str, Any]]]]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    torn: str | None = None


def read_rank(path: Path) -> RankLedger:
    """Reads one file. Raises: FormatError (DET-LEDGER-MISSING, -FOREIGN, -SCHEMA, -DAMAGED)."""
    path = Path(path)
    try:
        with path.open(encoding="ascii", newline="\n") as file:
            lines = file.readlines()
    except FileNotFoundError as error:
        raise problem(
            "DET-LEDGER-MISSING", path, "no such file", "a ledger", "There is nothing to compare.",
            "record the run with --det --det-ledger DIR.",
        ) from error  # fmt: skip
    except (OSError, UnicodeDecodeError) as error:
        raise _foreign(path, str(error)) from error
    header = unsealed(lines[0]) if lines else None
    ledger = _from_header(path, header)
    for number, line in enumerate(lines[1:], start=2):
        record = unsealed(line)
        if record is None and not line.endswith("\n"):
            ledger.torn = f"line {number} is incomplete ({len(line)} bytes)"
        elif record is None:
            raise _damaged(path, f"line {number} does not match its checksum")
        else:
            _take(ledger, record, number)
    return ledger


def _foreign(path: Path, found: str) -> FormatError:
    return problem(
        "DET-LEDGER-FOREIGN", path, found, "a megatron-det ledger", "Its numbers would mean something else.",
        "name the directory that --det-ledger wrote.",
    )  # fmt: skip


def _damaged(path: Path, found: str) -> FormatError:
    return problem(
        "DET-LEDGER-DAMAGED", path, found, "whole lines up to the last one", "A damaged record cannot be vouched for.",
        "restore the file, or record the run again.",
    )  # fmt: skip


def _from_header(path: Path, header: dict[str, Any] | None) -> RankLedger:
    if header is None or header.get("kind") != "header":
        raise _foreign(path, "no ledger header in the first line")
    if header.get("schema") != SCHEMA:
        raise problem(
            "DET-LEDGER-SCHEMA", path, f"schema {header.get('schema')}", f"schema {SCHEMA}",
            "Fields may mean something else.", "read it with the megatron-det version that wrote it.",
        )  # fmt: skip
    named = FILE.fullmatch(path.name)
    if named and int(named.group(1)) != header.get("rank"):
        raise _foreign(path, f"the ledger of rank {header.get('rank')} under the name of another rank")
    try:
        return RankLedger(path, header["run_id"], header["rank"], header["world_size"], header["start_iteration"])
    except KeyError as error:
        raise _foreign(path, f"a header without {error}") from error


def _take(ledger: RankLedger, record: dict[str, Any], number: int) -> None:
    try:
        kind, iteration = record["kind"], record["iteration"]
        if kind == "step":
            if ledger.steps and iteration <= max(ledger.steps):
                raise _damaged(ledger.path, f"line {number} repeats iteration {iteration}")
            ledger.steps[iteration] = [(name, value) for name, value in record["q"]]
            ledger.consumed[iteration] = record["consumed_samples"]
        elif kind == "eval":
            ledger.evaluations.append((iteration, [(name, value) for name, value in record["q"]]))
        elif kind == "end":
            ledger.end = record
        else:
            raise _damaged(ledger.path, f"line {number} is of unknown kind {kind!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(ledger.path, f"line {number}: {type(error).__name__} {error}") from error


@dataclass
class RunLedger:
    """All ranks of one run."""

    directory: Path
    ranks: dict[int, RankLedger]

    @property
    def world_size(self) -> int:
        return next(iter(self.ranks.values())).world_size

    def iterations(self) -> list[int]:
        """Iterations that every rank recorded, ascending."""
        common = set.intersection(*(set(ledger.steps) for ledger in self.ranks.values()))
        return sorted(common)

    def torn(self) -> Iterator[str]:
        for ledger in self.ranks.values():
            if ledger.torn:
                yield f"rank {ledger.rank}: {ledger.torn}"


def read_run(directory: Path) -> RunLedger:
    """Reads the files of all ranks. Raises: FormatError; missing ranks and files of several runs are named."""
    directory = Path(directory)
    paths = sorted(p for p in directory.glob("rank-*.jsonl") if FILE.fullmatch(p.name)) if directory.is_dir() else []
    if not paths:
        raise problem(
            "DET-LEDGER-MISSING", directory, "no rank-*.jsonl", "a directory that --det-ledger wrote",
            "There is nothing to compare.", "record the run with --det --det-ledger DIR.",
        )  # fmt: skip
    ranks = {ledger.rank: ledger for ledger in map(read_rank, paths)}
    worlds = {ledger.world_size for ledger in ranks.values()}
    runs = {ledger.run_id for ledger in ranks.values()}
    if len(worlds) > 1 or len(runs) > 1:
        raise _foreign(directory, f"files of {len(runs)} runs with world sizes {sorted(worlds)}")
    world = worlds.pop()
    beyond = sorted(set(ranks) - set(range(world)))
    if beyond:
        raise _foreign(directory, f"rank {beyond[0]} in a run with world size {world}")
    missing = sorted(set(range(world)) - set(ranks))
    if missing:
        raise problem(
            "DET-LEDGER-MISSING", directory, f"no ledger of rank {', '.join(map(str, missing))}", "one file per rank",
            "A difference may be on the rank that is missing.", "copy all files of the run.",
        )  # fmt: skip
    _refuse_gaps(ranks)
    return RunLedger(directory, ranks)


def _refuse_gaps(ranks: dict[int, RankLedger]) -> None:
    """Ranks of a killed run may end at different iterations; one that lacks what others have in between is damaged."""
    recorded = set().union(*(ledger.steps for ledger in ranks.values()))
    for ledger in ranks.values():
        inside = {i for i in recorded if ledger.steps and min(ledger.steps) <= i <= max(ledger.steps)}
        gaps = sorted(inside - set(ledger.steps))
        if gaps:
            raise _damaged(ledger.path, f"no iteration {gaps[0]}, which other ranks recorded")
