"""Recording mode: a list of every collective of this process, for catalogues, tests and the tracer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class Call:
    """One collective as it was issued. ``group`` is c10d's name of the group, ``op`` the reduction or ``-``."""

    group: str
    ranks: int
    name: str
    op: str
    tensors: list[torch.Tensor]

    def row(self) -> tuple[str, int, str, str, str, int]:
        """group, ranks, operation, reduction, dtype, elements."""
        dtype = str(self.tensors[0].dtype).removeprefix("torch.") if self.tensors else "-"
        elements = sum(t.numel() for t in self.tensors)
        return self.group, self.ranks, self.name, self.op, dtype, elements


_listeners: list[list[tuple[str, int, str, str, str, int]]] = []
_count = 0


def record(call: Call) -> None:
    global _count
    _count += 1
    for rows in _listeners:
        rows.append(call.row())


def count() -> int:
    """How many collectives went through the backend in this process: proof that it is the one in use."""
    return _count


@contextmanager
def recording() -> Iterator[list[tuple[str, int, str, str, str, int]]]:
    """Collects the rows of all collectives inside."""
    rows: list[tuple[str, int, str, str, str, int]] = []
    _listeners.append(rows)
    try:
        yield rows
    finally:
        _listeners.remove(rows)
