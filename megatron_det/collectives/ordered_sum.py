"""The local reduction of N shards in a fixed order: fp32 accumulation for narrow types, one rounding at the end.

Order   ``order.plan``; per element, independent of size, chunking and what lies beside it
Level   placement
Memory  N * CHUNK elements of the accumulator (the shards are not changed, but for those named in ``scratch``)

=============  ===========================================================================
reduction      meaning for shards x0 … xN-1, all in the accumulator's type
=============  ===========================================================================
SUM            the ordered sum
AVG            the ordered sum divided by N, once, before the one rounding
PREMUL_SUM     each shard times the factor (rounded to the accumulator), then the ordered sum
MAX, MIN       on integer keys: -0 < +0, a NaN wins (as the type's default NaN). torch.maximum is not enough: of +0 and
               -0 it keeps the first in a vector's lanes and the second in its tail, so the bits follow the position
=============  ===========================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_det.collectives.order import plan

CHUNK = 1 << 18  # elements: the fastest of 2**13 to 2**24, measured on a CPU with four shards
NARROW = {torch.float16, torch.bfloat16} | {
    getattr(torch, name) for name in dir(torch) if name.startswith("float8_e") and name != "float8_e8m0fnu"
}


@dataclass(frozen=True)
class Reduction:
    """What is done to the shards. ``factor`` belongs to PREMUL_SUM: a number, or a tensor of one element."""

    name: str
    factor: float | torch.Tensor | None = None

    @property
    def combine(self) -> Callable[..., torch.Tensor]:
        return {"MAX": torch.maximum, "MIN": torch.minimum}.get(self.name, torch.add)

    @property
    def by_key(self) -> bool:
        return self.name in ("MAX", "MIN")

    def label(self) -> str:
        return self.name if self.factor is None else f"{self.name}({float(self.factor)!r})"


SUM, AVG, MAX, MIN = (Reduction(name) for name in ("SUM", "AVG", "MAX", "MIN"))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type in which shards of this type are added."""
    return torch.float32 if dtype in NARROW else dtype


KEYS = {torch.float32: torch.int32, torch.float64: torch.int64}


def to_key(x: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """Integers in the order of the values of ``x`` (fp32 or fp64); a NaN is the one that wins."""
    kind = KEYS[x.dtype]
    limits = torch.iinfo(kind)
    bits = x.contiguous().view(kind)
    key = torch.where(bits < 0, bits ^ limits.max, bits)
    return key.masked_fill_(x.isnan(), limits.max if reduction.name == "MAX" else limits.min)


def from_key(key: torch.Tensor, dtype: torch.dtype, reduction: Reduction) -> torch.Tensor:
    limits = torch.iinfo(key.dtype)
    nan = key == (limits.max if reduction.name == "MAX" else limits.min)
    bits = torch.where(key < 0, key ^ limits.max, key)
    return bits.view(dtype).masked_fill_(nan, float("nan"))


def ordered_sum(
    shards: Sequence[torch.Tensor],
    out: torch.Tensor,
    order: str = "tree",
    reduction: Reduction = SUM,
    scratch: frozenset[int] = frozenset(),
    wide: torch.dtype | None = None,
) -> torch.Tensor:
    """Writes the reduction of the shards to ``out`` and returns it.

    Shapes   shards[r] [n], out [n]: flat, contiguous; shards of one dtype; ``out`` may be one of the shards
    scratch  positions of shards that may be overwritten; it saves a copy
    wide     another accumulator than ``accumulator(dtype)``
    """
    dtype = shards[0].dtype
    wide = wide or accumulator(dtype)
    for low in range(0, out.numel(), CHUNK):
        target = out[low : low + CHUNK]
        parts, ours = [shard[low : low + CHUNK] for shard in shards], set(scratch)
        if wide != dtype:
            parts, ours = [part.to(wide) for part in parts], set(range(len(parts)))
        if reduction.factor is not None:
            parts, ours = [part * reduction.factor for part in parts], set(range(len(parts)))
        if reduction.by_key:
            parts, ours = [to_key(part, reduction) for part in parts], set(range(len(parts)))
        straight = wide == out.dtype and not reduction.by_key
        total = _combine(parts, order, reduction, ours, target if straight else None)
        if reduction.by_key:
            total = from_key(total, wide, reduction)
        if reduction.name == "AVG":
            total = total / len(shards)
        if total is not target:
            target.copy_(total)
    return out


def _combine(
    parts: list[torch.Tensor], order: str, reduction: Reduction, ours: set[int], target: torch.Tensor | None
) -> torch.Tensor:
    """Carries out the plan; the last step writes to ``target``, others only over parts that are ``ours``."""
    steps = plan(len(parts), order)
    for number, (into, other) in enumerate(steps):
        last = number == len(steps) - 1
        place = target if last and target is not None else parts[into] if into in ours else None
        parts[into] = reduction.combine(parts[into], parts[other], out=place)
        ours.add(into)
    return parts[0]


def reference(
    shards: Sequence[torch.Tensor], order: str, reduction: Reduction = SUM, wide: torch.dtype | None = None
) -> torch.Tensor:
    """The documented result, in one piece and without overwriting: what every plan must give, bit for bit."""
    wide = wide or accumulator(shards[0].dtype)
    parts = [shard.to(wide) for shard in shards]
    if reduction.factor is not None:
        parts = [part * reduction.factor for part in parts]
    if reduction.by_key:
        parts = [to_key(part, reduction) for part in parts]
    for into, other in plan(len(parts), order):
        parts[into] = reduction.combine(parts[into], parts[other])
    if reduction.by_key:
        parts[0] = from_key(parts[0], wide, reduction)
    total = parts[0] / len(shards) if reduction.name == "AVG" else parts[0]
    return total.to(shards[0].dtype)
