"""The replaced Megatron symbols, one file each. ``patches(run)`` is the whole plan of one run, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_det.contract.levels import strength
from megatron_det.patching.engine import Patch
from megatron_det.patching.inventory.run import Run


def patches(run: Run) -> list[Patch]:
    """All patches of a run. At level ``observe`` only those that record: the control arm is stock Megatron."""
    from megatron_det.patching.inventory import (
        checkpoint,
        collectives,
        data,
        distrib_optimizer,
        pretrain,
        scheduler,
        train_step,
    )

    tap = data.DataTap()
    plan = [*data.patches(tap), *train_step.patches(run, tap), *pretrain.patches(run)]
    if run.options.level != "observe":
        plan += [*checkpoint.patches(run), *data.loader_patches()]
        plan += [*distrib_optimizer.patches(), *scheduler.patches()]
    if strength(run.options.level) >= strength("placement"):
        plan += collectives.patches(run.options.order)
    return plan


def check_groups(level: str) -> Callable[..., None]:
    """A hook for before the first forward: at level placement all groups are on the det backend."""
    from megatron_det.patching.inventory import collectives

    def hook(*_: Any) -> None:
        if strength(level) >= strength("placement"):
            collectives.check_groups()

    return hook
