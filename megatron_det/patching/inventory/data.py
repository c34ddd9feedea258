"""What each micro-batch really was: digests of its tensors and the sample ids that the sampler gave.

Replaces      ``RerunDataIterator.__next__``, the samplers' ``__iter__``, ``cyclic_iter`` (a generator hides its loader)
Why           values are taken where the training loop gets them, after workers and prefetching; a sampler's lists come
              back in the order in which it gave them, so a queue per sampler pairs ids with batches
Reaches       training iterators during ``train_step`` (single and cyclic; external: digests without ids)
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
from megatron_det.patching.inventory.loader import Picked, loader_patches

SAMPLERS = (
    "MegatronPretrainingSampler", "MegatronPretrainingRandomSampler", "HybridCPMegatronPretrainingSampler",
    "MegatronFullValidationSampler",
)  # fmt: skip
QUEUE = "_megatron_det_yielded"

__all__ = ["DataTap", "loader_patches", "patches"]


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
        start = int(getattr(self, "consumed_samples", 0))
        for number, indices in enumerate(original(self)):
            queue.append([int(i) for i in indices])
            yield Picked(indices, (type(self).__name__, len(self), start + number * samples_per_batch(self)))

    return __iter__


def samples_per_batch(sampler: Any) -> int:
    """Samples that one list of the sampler stands for, over all data-parallel ranks."""
    size = getattr(sampler, "micro_batch_times_data_parallel_size", None) or sampler.data_parallel_size
    return int(size) * int(getattr(sampler, "num_micro_batches", 1))


class Cyclic:
    """``cyclic_iter`` as an object: the same batches, and it can be asked for the sampler behind them."""

    def __init__(self, original: Callable[..., Any], iterable: Any) -> None:
        self.original, self.iterable = original, iterable
        self.inner: Any = None

    @property
    def _index_sampler(self) -> Any:
        return getattr(self.inner, "_index_sampler", None)

    def __iter__(self) -> Cyclic:
        return self

    def __next__(self) -> Any:
        for _ in range(2):
            if self.inner is None:
                self.inner = iter(self.iterable)
            try:
                return next(self.inner)
            except StopIteration:
                self.inner = None
        return next(self.original(()))  # empty: Megatron's own error


def _cyclic(original: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
    def cyclic_iter(iterable: Any) -> Cyclic:
        ran()
        return Cyclic(original, iterable)

    return cyclic_iter


def patches(tap: DataTap) -> list[Patch]:
    why = "the ledger records the data that a step used"
    target = "megatron.core.rerun_state_machine:RerunDataIterator.__next__"
    tapped = Patch("data-iterator-next", target, _next(tap), why)
    module = "megatron.training.datasets.data_samplers"
    cyclic = Patch("data-cyclic", "megatron.training.training:cyclic_iter", _cyclic, why)
    return [tapped, cyclic] + [
        Patch(f"sampler-{name}", f"{module}:{name}.__iter__", _iterate, why, stack=True) for name in SAMPLERS
    ]
