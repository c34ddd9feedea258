"""Recording mode: a list of every collective of this process, for catalogues, tests and the tracer."""

from __future__ import annotations

import atexit
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

SKIP = {"torch", "megatron_det", "contextlib"}


@dataclass(frozen=True)
class Call:
    """One collective as it was issued.

    group      c10d's name of the group, and its description where it has one
    ranks      members of the group
    operation  ``all_reduce``, ``reduce_scatter`` …
    reduction  ``SUM`` …, or ``-`` where nothing is added
    dtype      of the first tensor
    elements   of all tensors
    ordered    whether the sum is made here, in rank order (else it is exact, or moves bytes only)
    site       module and function that made the call, outside torch and this package
    """

    group: str
    ranks: int
    operation: str
    reduction: str
    dtype: str
    elements: int
    ordered: bool
    site: str

    def row(self) -> dict[str, Any]:
        return asdict(self)


_listeners: list[Any] = []
_count = 0
_summed = 0


def record(
    group: str, ranks: int, operation: str, reduction: str, tensors: list[torch.Tensor], ordered: bool = False
) -> None:
    """Counts the call; writes it down while somebody records."""
    global _count, _summed
    _count += 1
    _summed += ordered
    if not _listeners:
        return
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else "-"
    call = Call(group, ranks, operation, reduction, dtype, sum(t.numel() for t in tensors), ordered, _site())
    for rows in _listeners:
        rows.append(call)


def _site() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "?")
        if module.partition(".")[0] not in SKIP:
            return f"{module}:{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "torch (C++)"


def count() -> int:
    """How many collectives went through the backend in this process: proof that it is the one in use."""
    return _count


def summed() -> int:
    """How many of them were summed here, in rank order."""
    return _summed


class Tally:
    """Counts calls by where they come from, so that a long run stays small. ``append`` makes it a listener."""

    def __init__(self) -> None:
        self.rows: Counter[tuple[str, ...]] = Counter()

    def append(self, call: Call) -> None:
        group = call.group.partition(" ")[2] or "default"
        how = "rank order" if call.ordered else "exact" if call.reduction != "-" else "moves"
        self.rows[call.site, group, call.operation, call.reduction, call.dtype, how] += 1

    def as_list(self) -> list[dict[str, Any]]:
        names = ("site", "group", "operation", "reduction", "dtype", "how")
        return [{**dict(zip(names, row, strict=True)), "calls": calls} for row, calls in sorted(self.rows.items())]


def write_at_exit(path: Path) -> None:
    """Records until the process ends, then writes the tally."""
    tally = Tally()
    _listeners.append(tally)

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(tally.as_list(), indent=1) + "\n")

    atexit.register(write)


@contextmanager
def recording() -> Iterator[list[Call]]:
    """Collects all collectives inside."""
    rows: list[Call] = []
    _listeners.append(rows)
    try:
        yield rows
    finally:
        _listeners.remove(rows)
