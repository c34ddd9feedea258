"""Collects the exact values of one iteration and appends them to the ledger of this rank."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_det.formats.ledger import LedgerWriter


class Recorder:
    """``extend`` during an iteration, in causal order; ``commit`` writes one line. Raises: FormatError (disk full)."""

    def __init__(self, directory: Path, rank: int, world_size: int, run_id: str) -> None:
        self._writer = LedgerWriter(directory, rank, world_size, run_id)
        self._items: list[tuple[str, dict[str, Any]]] = []
        self.last_iteration = 0

    def extend(self, items: Iterable[tuple[str, dict[str, Any]]]) -> None:
        self._items.extend(items)

    def commit(self, iteration: int, consumed_samples: int) -> None:
        self._writer.step(iteration, consumed_samples, self._items)
        self.last_iteration = iteration
        self._items.clear()

    def evaluation(self, iteration: int, items: Iterable[tuple[str, dict[str, Any]]]) -> None:
        self._writer.evaluation(iteration, list(items))

    def end(self, how: str) -> None:
        self._writer.end(self.last_iteration, how)
        self._writer.close()
