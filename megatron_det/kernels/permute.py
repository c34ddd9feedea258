"""Which row a token takes on its way to an expert, and the gathers that bring it there and its gradient back.

The place is a pure function of the routing: experts by rising id, and in an expert the tokens by rising number. With a
capacity every expert has that many rows; those that no token takes are zeros.

Order    the forward moves rows; the backward adds a token's rows as ``kernels/combine.py`` does
Level    layout
Shapes   routing_map [T, E] bool -> token [R], place [T, E], rows [T, W]; W is the largest number of rows of a token
Source   replaces ``permute`` of Megatron 0.19.2, which sorts the whole map and leaves the backward to ``index_add_``

Worked example: token 0 to experts 1 and 2, token 1 to expert 0: the rows are (expert 0: token 1), (expert 1: token 0),
(expert 2: token 0), so token = [1, 0, 0], rows = [[1, 2], [0, -1]].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_det.kernels.combine import gather_sum, take_rows


@dataclass(frozen=True)
class Placement:
    """``token``: whose row it is. ``place``: the row of (token, expert). ``rows``: a token's rows. -1: none."""

    token: torch.Tensor
    place: torch.Tensor
    rows: torch.Tensor
    source: torch.Tensor
    """[R]: where in a flat [T, E] the row comes from."""


def placement(routing_map: torch.Tensor, capacity: int | None = None) -> Placement:
    """Raises: ValueError for a map that is not bool, and when an expert has more tokens than ``capacity``."""
    if routing_map.dtype != torch.bool:
        raise ValueError(f"a routing map is bool (a token has an expert once or not), found {routing_map.dtype}")
    tokens, experts = routing_map.shape
    by_expert = routing_map.T.contiguous()
    pairs = by_expert.view(-1).nonzero().view(-1)  # rising: by expert, then by token
    expert, token = pairs // max(tokens, 1), pairs % max(tokens, 1)
    if capacity is None:
        number = torch.cumsum(by_expert.view(-1), 0) - 1
    else:
        counts = by_expert.sum(1)
        if bool((counts > capacity).any()):
            raise ValueError(f"an expert has {int(counts.max())} tokens, more than its capacity of {capacity}")
        first = torch.arange(experts, device=counts.device) * capacity
        number = (torch.cumsum(by_expert, 1) - 1 + first.unsqueeze(1)).view(-1)
    place = torch.where(by_expert, number.view(experts, tokens), -1).T.contiguous()
    source = token * experts + expert
    if capacity is not None:
        token, source = (_padded(values, counts, capacity) for values in (token, source))
    return Placement(token, place, _rows(routing_map, place), source)


def _padded(values: torch.Tensor, counts: torch.Tensor, capacity: int) -> torch.Tensor:
    """Runs of ``counts`` values each, every run filled up with -1 to ``capacity``. Shapes: [R'] -> [E * capacity]."""
    within = torch.arange(capacity, device=values.device)
    index = (torch.cumsum(counts, 0) - counts).unsqueeze(1) + within
    return take_rows(values + 1, torch.where(within < counts.unsqueeze(1), index, -1).view(-1)) - 1


def _rows(routing_map: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Each token's rows by rising expert. Shapes: [T, E] twice -> [T, W]."""
    counts = routing_map.sum(1)
    most = int(counts.max()) if counts.numel() else 0
    taken = place.view(-1).index_select(0, routing_map.reshape(-1).nonzero().view(-1))
    within = torch.arange(most, device=place.device)
    index = (torch.cumsum(counts, 0) - counts).unsqueeze(1) + within
    index = torch.where(within < counts.unsqueeze(1), index, -1)
    return (take_rows(taken + 1, index.reshape(-1)) - 1).view(index.shape)


class Permute(torch.autograd.Function):
    """``Permute.apply(x, token, rows)``: the rows of the tokens, zeros for -1. Shapes: x [T, H] -> [R, H]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, token: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return take_rows(x, token)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return gather_sum(grads[0], rows), None, None


class PermuteProbs(torch.autograd.Function):
    """``PermuteProbs.apply(probs, source, place)``: the probability of each row. Shapes: probs [T, E] -> [R].

    Both directions are gathers: (token, expert) has one row at most.
    """

    @staticmethod
    def forward(ctx: Any, probs: torch.Tensor, source: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(place)
        return take_rows(probs.reshape(-1), source)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return take_rows(grads[0], place.view(-1)).view(place.shape), None, None
