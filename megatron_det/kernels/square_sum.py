"""The sum of squares of many tensors, exact in any order: the gradient norm does not move with the borders of shards.

A distributed optimizer cuts gradients where its buckets end, so a norm that is added up shard by shard changes its bits
with ``--ddp-bucket-size``, with the number of shards, and with overlap. Integers do not: each square is cut into three
limbs of ``BITS`` bits below the largest square there is, and limbs are added as 64-bit integers.

Order    none needed: integer addition is associative
Level    placement (and independent of how the elements are split over ranks)
Error    below n * 2**-66 of the largest square for n elements (n < 2**40), plus the fp64 rounding of the last step
Shapes   any; fp32, fp16 and bf16 (a square is exact in fp64)
Memory   about 40 * CHUNK bytes

Worked example: 3.0 and 4.0. The largest is 4 = 0.5 * 2**3, so squares are taken of 3/8 and 4/8: 9/64 + 16/64 = 25/64,
times 2**6 is 25.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

BITS = 22
LIMBS = 3
CHUNK = 1 << 20
Reduce = Callable[[torch.Tensor], None]


def largest(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The bits of the largest magnitude, as int64: non-negative floats order as their bits do, and a NaN is above."""
    found = torch.zeros(1, dtype=torch.int32, device=device)
    for tensor in tensors:
        if tensor.numel():
            found = torch.maximum(found, tensor.detach().float().abs().contiguous().view(torch.int32).max())
    return found.long()


def limbs(tensors: Iterable[torch.Tensor], exponent: torch.Tensor) -> torch.Tensor:
    """The sums of the limbs of ``(x * 2**-exponent) ** 2``: int64 [LIMBS]."""
    sums = torch.zeros(LIMBS, dtype=torch.int64, device=exponent.device)
    scale = torch.ldexp(torch.ones(1, dtype=torch.float64, device=exponent.device), -exponent)
    for tensor in tensors:
        for part in tensor.detach().reshape(-1).split(CHUNK):
            rest = (part.double() * scale).square_()
            for limb in range(LIMBS):
                rest = rest.mul_(2.0**BITS)
                whole = rest.floor()
                sums[limb] += whole.long().sum()
                rest -= whole
    return sums


def square_sum(
    tensors: list[torch.Tensor],
    device: torch.device,
    reduce_max: Reduce = lambda _: None,
    reduce_sum: Reduce = lambda _: None,
) -> torch.Tensor:
    """The sum of squares over all ranks: fp64 [1]. inf or NaN when an element is; no host synchronisation.

    ``reduce_max`` and ``reduce_sum`` combine an int64 tensor over the ranks, in place; ranks without tensors call too.
    """
    top = largest(tensors, device)
    reduce_max(top)
    value = top.int().view(torch.float32).double()
    finite = value.isfinite()
    exponent = torch.frexp(torch.where(finite, value, torch.ones_like(value))).exponent
    sums = limbs(tensors, exponent)
    reduce_sum(sums)
    weights = [2.0 ** (-BITS * (limb + 1)) for limb in range(LIMBS)]
    total = sums[2:].double() * weights[2] + sums[1:2].double() * weights[1] + sums[:1].double() * weights[0]
    return torch.where(finite, torch.ldexp(total, 2 * exponent), value.square())


def reference(values: Iterable[float]) -> float:
    """The same in Python's exact arithmetic, rounded once."""
    return math.fsum(value * value for value in values)
