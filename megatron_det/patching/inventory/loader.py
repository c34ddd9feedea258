"""A micro-batch depends on its place in the run and on nothing else: not on when a loader started, nor on its workers.

Replaces      torch's ``_BaseDataLoaderIter.__init__`` and ``_MapDatasetFetcher.fetch``; ``GPTDataset.__getitem__`` and
              ``megatron.training.training.evaluate_and_print_results``
Why           * starting a loader draws a base seed from torch's CPU stream, at a moment that differs after a resume
                (``cyclic`` starts in the middle of the first step): streams and worker seeds moved with it
              * a worker's streams advance with every sample it served, and no checkpoint knows of them. So all streams
                that a data set can reach, its private generators too, start anew for every micro-batch, from the run's
                seed and the micro-batch's place
              * ``GPTDataset`` (0.19.2 and main of 2026-08) caches the loss mask of the first sample that it served and
                then masks that sample's padding in it: later masks depend on which sample came first
              * ``--full-validation`` without ``--multiple-validation-sets`` makes a tensor of a bare number and indexes
                it: "'int' object is not subscriptable"; a list of one is what that code expects
Reaches       Megatron's own samplers; workers that are forked
Leaves alone  loaders of other samplers (their own state is a piece of the receipt); what a data set without randomness
              gives; the streams of the training process
Drop when     upstream seeds workers by sample, clones the mask, and makes ``eval_iters`` a list
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from megatron.training import get_args

from megatron_det.patching.engine import Patch
from megatron_det.state import generators

OWN = "_megatron_det_generators"


class Picked(list[int]):
    """A sampler's list of indices that knows its place: (sampler, samples in all, samples before it)."""

    def __init__(self, indices: Iterable[int] = (), place: tuple[str, int, int] | None = None) -> None:
        super().__init__(indices)
        self.place = place

    def seed(self, run_seed: int) -> int:
        """64 bits from the run's seed, the place and the indices: the same wherever and whenever it is asked."""
        text = repr((run_seed, self.place, [int(index) for index in self]))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def start_anew(seed: int, private: list[Any]) -> None:
    """All streams that a data set can draw from on the host, from one number."""
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    torch.default_generator.manual_seed(seed)
    for number, generator in enumerate(private, start=1):
        generators.seed(generator, (seed + number) & (2**64 - 1))


@contextmanager
def untouched() -> Iterator[None]:
    """The host's streams of the training process come out as they went in."""
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.set_rng_state(state[2])


def _fetch(original: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
    def fetch(self: Any, possibly_batched_index: Any) -> Any:
        if not isinstance(possibly_batched_index, Picked):
            return original(self, possibly_batched_index)
        ran()
        if not hasattr(self, OWN):
            setattr(self, OWN, [one for _, one in generators.find(self.dataset)])
        seed = possibly_batched_index.seed(int(get_args().seed))
        if torch.utils.data.get_worker_info() is not None:
            start_anew(seed, getattr(self, OWN))
            return original(self, possibly_batched_index)
        with untouched():
            start_anew(seed, getattr(self, OWN))
            return original(self, possibly_batched_index)

    return fetch


def _start(original: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
    def __init__(self: Any, loader: Any) -> None:
        ran()
        state = torch.get_rng_state()
        try:
            original(self, loader)
        finally:
            torch.set_rng_state(state)
        if "Megatron" in type(getattr(loader, "batch_sampler", None)).__name__:
            self._base_seed = int(get_args().seed)  # what worker_init_fn may draw from; samples are seeded by place

    return __init__


def _item(original: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
    def __getitem__(self: Any, idx: Any) -> Any:
        cached_before = self.masks_and_position_ids_are_cached
        sample = original(self, idx)
        if self.masks_and_position_ids_are_cached and not cached_before:
            ran()
            self.cached_loss_mask = torch.ones_like(self.cached_loss_mask)  # cacheable: no mask but padding's
        return sample

    return __getitem__


def _evaluate(original: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
    def evaluate_and_print_results(*args: Any, **kwargs: Any) -> Any:
        now = get_args()
        if now.full_validation and not now.multiple_validation_sets and isinstance(now.eval_iters, int):
            ran()
            now.eval_iters = [now.eval_iters]  # it comes back as a number
        return original(*args, **kwargs)

    return evaluate_and_print_results


def loader_patches() -> list[Patch]:
    loader, fetcher = "torch.utils.data.dataloader:_BaseDataLoaderIter", "torch.utils.data._utils.fetch"
    dataset = "megatron.core.datasets.gpt_dataset:GPTDataset.__getitem__"
    evaluate = "megatron.training.training:evaluate_and_print_results"
    return [
        Patch("dataloader-base-seed", f"{loader}.__init__", _start, "when a loader starts must not move any stream"),
        Patch("dataloader-fetch", f"{fetcher}:_MapDatasetFetcher.fetch", _fetch, "a sample's draws follow its place"),
        Patch("gpt-dataset-mask", dataset, _item, "a loss mask must not depend on which sample was served first"),
        Patch("full-validation", evaluate, _evaluate, "--full-validation alone crashes in megatron-core 0.19.2"),
    ]
