"""The rows that experts made of a token, added up for that token: a gather and a sum, without scatter and atomics.

Order    per token from +0 in fp32, its rows by rising expert id; one rounding to the type of the rows at the end
Level    layout: neither the number of rows nor where the experts live enters, only the token's own rows
Shapes   x [R, H], rows [T, W] (a token's rows, -1 for none) -> [T, H]
Error    a token with k rows: |error| <= (k - 1) * 2**-24 * sum |rows| in fp32, plus the last rounding
Source   replaces ``unpermute`` of Megatron 0.19.2: ``scatter_add_``, or ``index_add_`` in the rows' own type

Worked example: rows of x 1, 2, 4, 8, and ``rows`` [[0, 3], [2, -1]]: 1 + 8 = 9, and 4.
"""

from __future__ import annotations

from typing import Any

import torch


def gather_sum(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The reference, in plain torch. fp64 rows are added in fp64. A token without rows gets zeros."""
    tokens, most = rows.shape
    total = x.new_zeros((tokens, x.shape[1]), dtype=torch.promote_types(x.dtype, torch.float32))
    if not x.shape[0]:
        return total.to(x.dtype)
    whole = bool((rows >= 0).all())
    for number in range(most):
        row = rows[:, number]
        part = x.index_select(0, row if whole else row.clamp(min=0))
        total.add_(part if whole else part.masked_fill_((row < 0).unsqueeze(1), 0.0))
    return total.to(x.dtype)


def take_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Row ``index[i]`` of x at place i, zeros for -1. Shapes: x [T, ...], index [R] -> [R, ...]."""
    if not index.numel() or bool((index >= 0).all()):
        return x.index_select(0, index)
    if not x.shape[0]:
        return x.new_zeros((index.numel(), *x.shape[1:]))
    taken = x.index_select(0, index.clamp(min=0))
    return taken.masked_fill_((index < 0).view(-1, *[1] * (x.dim() - 1)), 0)


class Combine(torch.autograd.Function):
    """``Combine.apply(x, token, rows)``: ``gather_sum``; the backward takes ``token[r]``'s gradient for row r."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, token: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(token)
        return gather_sum(x, rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (token,) = ctx.saved_tensors
        return take_rows(grads[0], token), None, None
