"""The local sum of N shards in a fixed order: fp32 accumulation for 16-bit types, one rounding at the end.

Order   ``order.plan``; per element, independent of size, chunking and what lies beside it
Level   placement
Memory  in 32 and 64-bit types none beside the shards (they are overwritten); in 16-bit types N * 4 * CHUNK bytes
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_det.collectives.order import plan

CHUNK = 1 << 16  # elements: N chunks in fp32 stay in the cache
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type in which shards of this type are added."""
    return WIDE.get(dtype, dtype)


def ordered_sum(
    shards: Sequence[torch.Tensor], out: torch.Tensor, order: str = "linear", divide_by: int | None = None
) -> torch.Tensor:
    """Writes the sum of the shards (flat, equal size and dtype; they may be overwritten) to ``out``.

    ``divide_by``: an average divides the accumulated sum once, before the one rounding.
    """
    wide = accumulator(out.dtype)
    if wide == out.dtype:
        parts = list(shards)
        for into, other in plan(len(parts), order):
            parts[into].add_(parts[other])
        out.copy_(parts[0])
        return out.div_(divide_by) if divide_by else out
    for low in range(0, out.numel(), CHUNK):
        parts = [shard[low : low + CHUNK].to(wide) for shard in shards]
        for into, other in plan(len(parts), order):
            parts[into].add_(parts[other])
        total = parts[0].div_(divide_by) if divide_by else parts[0]
        out[low : low + CHUNK] = total
    return out


def reference(shards: Sequence[torch.Tensor], order: str, average: bool = False) -> torch.Tensor:
    """The documented result, without overwriting and without chunks: what every plan must give, bit for bit."""
    wide = accumulator(shards[0].dtype)
    parts = [shard.to(wide) for shard in shards]
    for into, other in plan(len(parts), order):
        parts[into] = parts[into] + parts[other]
    total = parts[0] / len(shards) if average else parts[0]
    return total.to(shards[0].dtype)
