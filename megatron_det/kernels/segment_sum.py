"""Rows with the same id added up in the order in which they come: the backward of an embedding, without ``index_put``.

Rows are sorted by id (stable, so that equal ids keep their order). The rows of one id, numbered 0, 1, 2, … from the
first, are added as neighbouring pairs: 2i takes 2i + 1, then 4i takes 4i + 2, and so on. Each step writes to places
that no other addition of the step reads or writes, so threads may do them in any order.

Order    per id, only by the sequence of its own rows; neither other ids, nor their number, nor the table's size enters
Level    placement; also layout along the table: a table cut into shares gives each row the same bits
Shapes   ids [n] integer, rows [n, H] -> [size, H]; an id outside 0 … size - 1 is left out
Memory   n * H in fp32 beside the result
Error    an id with c rows: |error| <= ceil(log2 c) * 2**-24 * sum |rows|, plus one rounding to the result's type

Worked example: ids [7, 2, 7, 7], rows [1, 10, 2, 4]: id 7 has (1 + 2) + 4 = 7, id 2 has 10.
"""

from __future__ import annotations

from typing import Any

import torch


def segment_sum(ids: torch.Tensor, rows: torch.Tensor, size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The reference, in plain torch. ``dtype``: of the result; else that of ``rows``. fp64 rows are added in fp64."""
    out = torch.zeros((size, rows.shape[1]), dtype=dtype or rows.dtype, device=rows.device)
    known = (ids >= 0) & (ids < size)
    if not bool(known.all()):
        ids, rows = ids[known], rows[known]
    if not ids.numel():
        return out
    sorted_ids, order = torch.sort(ids, stable=True)
    kept, counts = torch.unique_consecutive(sorted_ids, return_counts=True)
    first = torch.cumsum(counts, 0) - counts
    total = rows.index_select(0, order).to(torch.promote_types(rows.dtype, torch.float32))
    for giver, step in _steps(torch.arange(ids.numel(), device=ids.device) - torch.repeat_interleave(first, counts)):
        taker = giver - step
        total.index_copy_(0, taker, total.index_select(0, taker).add_(total.index_select(0, giver)))
    return out.index_copy_(0, kept, total.index_select(0, first).to(out.dtype))


def _steps(number: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    """Who gives its row to whom, and when: number r gives to r - s in the step s = lowest set bit of r."""
    low = number & -number
    by_step, order = torch.sort(low, stable=True)
    steps, counts = torch.unique_consecutive(by_step, return_counts=True)
    parts = torch.split(order, counts.tolist())
    return [(part, step) for part, step in zip(parts, steps.tolist(), strict=True) if step]


class Lookup(torch.autograd.Function):
    """``Lookup.apply(table, ids, share)``: rows of the table; the backward is ``segment_sum``.

    ``share``: the table is a part of a longer one, and an id outside gives a row of zeros. Else it is an IndexError.
    Shapes: table [size, H], ids [...] -> [..., H].
    """

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, ids: torch.Tensor, share: bool) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.size, ctx.dtype = table.shape[0], table.dtype
        if not share:
            return torch.nn.functional.embedding(ids, table)
        outside = (ids < 0) | (ids >= table.shape[0])
        rows = torch.nn.functional.embedding(ids.masked_fill(outside, 0), table)
        return rows.masked_fill_(outside.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        rows = grads[0].reshape(ids.numel(), -1)
        return segment_sum(ids.reshape(-1), rows, ctx.size, ctx.dtype), None, None
