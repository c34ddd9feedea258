"""What each micro-batch really was: digests of its tensors and the sample ids that the sampler gave.

Replaces      ``RerunDataIterator.__next__``, the samplers' ``__iter__``; torch's ``_BaseDataLoaderIter.__init__``
Why           values are taken where the training loop gets them, after workers and prefetching; a sampler's lists come
              back in the order in which it gave them, so a queue per sampler pairs ids with batches
Reaches       training iterators during ``train_step`` (single dataloader type; others: digests without ids)
Leaves alone  what is yielded, replay by the rerun state machine (a replayed batch is not recorded twice), validation
Drop when     upstream yields sample ids with its batches
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_det.formats import scalars
from megatron_det.kernels.fingerprint import value
from megatron_det.patching.engine import Patch

SAMPLERS = ("MegatronPretrainingSampler", "MegatronPretrainingRandomSampler")
QUEUE = "_megatron_det_yielded"


class DataTap:
    """Collects what the training iterators yield while a step runs."""

    def __init__(self) -> None:
        self.items: list[tuple[str, dict[str, Any]]] = []
        self._prefixes: dict[int, str] = {}
        self._counts: dict[int, int] = {}

    def start(self, data_iterator: Any) -> None:
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        several = len(iterators) > 1
        self.items = []
        self._counts = {}
        self._prefixes = {id(it): f"vp{n}/" if several else "" for n, it in enumerate(iterators) if it is not None}

    def stop(self) -> list[tuple[str, dict[str, Any]]]:
        self._prefixes = {}
        return self.items

    def take(self, iterator: Any, batch: Any, ids: list[int] | None) -> None:
        if id(iterator) not in self._prefixes:
            return
        number = self._counts.get(id(iterator), 0)
        self._counts[id(iterator)] = number + 1
        name = f"data/{self._prefixes[id(iterator)]}mb{number}"
        if ids is not None:
            self.items.append((f"{name}/sample_ids", scalars.of_python(ids)))
        if isinstance(batch, dict):
            for key in sorted(batch):
                if isinstance(batch[key], torch.Tensor):
                    self.items.append((f"{name}/{key}", value(batch[key])))


def _next(tap: DataTap) -> Callable[..., Any]:
    def make(original: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
        def __next__(self: Any) -> Any:
            replaying = self.replaying
            batch = original(self)
            queue = getattr(getattr(self.iterable, "_index_sampler", None), QUEUE, None)
            ids = queue.popleft() if queue and not replaying else None
            if not replaying:
                ran()
                tap.take(self, batch, ids)
            return batch

        return __next__

    return make


def _iterate(original: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
    def __iter__(self: Any) -> Iterator[list[int]]:
        ran()
        queue: deque[list[int]] = deque()
        setattr(self, QUEUE, queue)
        for indices in original(self):
            queue.append([int(i) for i in indices])
            yield indices

    return __iter__


def _still(original: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
    def __init__(self: Any, loader: Any) -> None:
        ran()
        state = torch.get_rng_state()
        try:
            original(self, loader)
        finally:
            torch.set_rng_state(state)

    return __init__


def loader_patches() -> list[Patch]:
    """Starting a data loader draws a base seed from torch's CPU stream. When that happens depends on the loader and on
    whether the run was resumed (``cyclic`` starts in the middle of the first step), so it must not move the stream."""
    why = "when a loader starts must not move the CPU random stream: a resumed run starts it at another moment"
    return [Patch("dataloader-base-seed", "torch.utils.data.dataloader:_BaseDataLoaderIter.__init__", _still, why)]


def patches(tap: DataTap) -> list[Patch]:
    why = "the ledger records the data that a step used"
    target = "megatron.core.rerun_state_machine:RerunDataIterator.__next__"
    tapped = Patch("data-iterator-next", target, _next(tap), why)
    module = "megatron.training.datasets.data_samplers"
    return [tapped] + [
        Patch(f"sampler-{name}", f"{module}:{name}.__iter__", _iterate, why, stack=True) for name in SAMPLERS
    ]
