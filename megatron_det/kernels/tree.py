"""Sums in an order that is written down: the same additions on every device, whatever threads and load do.

Only ``+`` of whole tensors is used, so each addition is one IEEE operation of one element with another. ``torch.sum``
is not: its order belongs to the implementation (vector width; for a single output also the number of threads).

==============  =====================================================================================================
function        order
==============  =====================================================================================================
``last_dim``    n items, p = smallest power of two >= n: item i takes item i + p/2 (if there is one), then i + p/4, …
``first_dim``   rows in blocks of ``BLOCK``; inside a block as ``last_dim``; then ``pairs`` of neighbouring blocks
``pairs``       item 2i takes item 2i + 1, an item without a neighbour stays; again until one is left
==============  =====================================================================================================

``first_dim`` continues over contiguous shares: where ranks hold a power of two of whole blocks each, ``pairs`` of their
sums is the sum of one rank that holds all.

Level   placement (no thread count, device or launch shape enters; the number of items does)
Error   at most ceil(log2 n) roundings lie on any path: |error| <= ceil(log2 n) * u * sum |x|, u = 2**-24 in fp32

Worked example: ``last_dim`` of [1, 2, 3, 4, 5], p = 8: (1 + 5), 2, 3, 4 -> (6 + 3), (2 + 4) -> 9 + 6 = 15.
"""

from __future__ import annotations

import math

import torch

BLOCK = 64


def half(n: int) -> int:
    """The largest power of two below n (n > 1)."""
    return 1 << ((n - 1).bit_length() - 1)


def last_dim(x: torch.Tensor) -> torch.Tensor:
    """Shapes: x [..., n] -> [..., 1]. ``x`` is left as it is. n = 0 gives 0."""
    n = x.shape[-1]
    if n < 2:
        return x if n else x.new_zeros((*x.shape[:-1], 1))
    width = half(n)
    if n == 2 * width:
        x = x[..., :width] + x[..., width:]
    else:
        high, x = x[..., width:], x[..., :width].clone()
        x[..., : n - width].add_(high)
    while width > 1:
        width //= 2
        x[..., :width].add_(x[..., width : 2 * width])
    return x[..., :1]


def first_dim(x: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """Shapes: x [n, ...], contiguous -> [...]. ``x`` is left as it is. n = 0 gives 0. ``block``: a power of two."""
    full = x.shape[0] // block * block
    flat = x.view(x.shape[0], math.prod(x.shape[1:]))
    parts = [_within(flat[:full].view(-1, block, flat.shape[1]))] if full else []
    if x.shape[0] > full:
        parts.append(_within(flat[full:].unsqueeze(0)))
    if not parts:
        return x.new_zeros(x.shape[1:])
    return pairs(torch.cat(parts) if len(parts) > 1 else parts[0]).view(x.shape[1:])


def _within(blocks: torch.Tensor) -> torch.Tensor:
    """Shapes: [blocks, n, H] -> [blocks, H], along n as ``last_dim``."""
    n = blocks.shape[1]
    if n < 2:
        return blocks[:, 0]
    width = half(n)
    if n == 2 * width:
        blocks = blocks[:, :width] + blocks[:, width:]
    else:
        high, blocks = blocks[:, width:], blocks[:, :width].clone()
        blocks[:, : n - width].add_(high)
    while width > 1:
        width //= 2
        blocks[:, :width].add_(blocks[:, width : 2 * width])
    return blocks[:, 0]


def pairs(x: torch.Tensor) -> torch.Tensor:
    """Shapes: x [n, ...], n > 0 -> [...]. ``x`` is left as it is."""
    while x.shape[0] > 1:
        n = x.shape[0]
        both = x[0 : n - 1 : 2] + x[1:n:2]
        x = torch.cat([both, x[n - 1 :]]) if n % 2 else both
    return x[0]
