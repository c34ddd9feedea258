"""What the patches of one run share: options, the ledger's recorder, and what was found on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_det.contract.options import Options


@dataclass
class Run:
    """One activated run in one process. Made by ``activation.apply``, handed to every patch.

    ``before_first_forward`` holds callables that run once, in order, just before the first ``train_step``
    (after iterators, warm-ups and evaluation have done their drawing); ``before_step`` those that run before
    every step (a fault injector, the check of the switches). Both get ``(iteration, model, optimizer, scheduler)``
    with Megatron's 1-based iteration.
    """

    options: Options
    rank: int
    world_size: int
    recorder: Any = None
    manifest: dict[str, Any] = field(default_factory=dict)
    before_first_forward: list[Callable[..., None]] = field(default_factory=list)
    before_step: list[Callable[..., None]] = field(default_factory=list)
