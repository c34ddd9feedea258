"""The parts of an expert MLP over rows that are grouped by expert: linear layers, biases, scaling by probability.

``linear`` multiplies expert by expert, in plain torch: the matmuls of a loop over them, in one node of the graph.
A kernel for all experts at once takes its place where ``kernels/grouped_gemm`` has one.

Order    ``linear``: the vendor's inside one expert's matmul; experts never mix. ``biases``: a bias' gradient over its
         expert's rows as ``tree.first_dim``. ``scaled``: a probability's gradient along its row as ``tree.last_dim``
Level    ``linear`` run; the others placement
Shapes   x [R, K], counts [E] with sum R, weights E times [N, K] -> [R, N]; an expert without rows gets zeros
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_det.kernels import tree


def linear(x: torch.Tensor, counts: Sequence[int], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """x times each row's own expert's weight."""
    out: Any = _Linear.apply(x, tuple(counts), *weights)
    return out


def biases(counts: Sequence[int], each: Sequence[torch.Tensor]) -> torch.Tensor:
    """Each expert's bias, once per row. Shapes: E times [N] -> [R, N]."""
    out: Any = _Biases.apply(tuple(counts), *each)
    return out


def scaled(x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Row r of x times ``probs[r]``, rounded once to x's type. Shapes: x [R, N], probs [R] -> [R, N]."""
    out: Any = _Scaled.apply(x, probs)
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counts: tuple[int, ...], *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.counts = counts
        parts = [part @ weight.T for part, weight in zip(torch.split(x, counts), weights, strict=True)]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        g = torch.split(grads[0], ctx.counts)
        dx = torch.cat([part @ weight for part, weight in zip(g, weights, strict=True)])
        dw = [part.T @ rows for part, rows in zip(g, torch.split(x, ctx.counts), strict=True)]
        return dx, None, *dw


class _Biases(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, counts: tuple[int, ...], *each: torch.Tensor) -> torch.Tensor:
        ctx.counts = counts
        return torch.cat([bias.expand(count, -1) for count, bias in zip(counts, each, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        g = grads[0].contiguous()
        wide = torch.promote_types(g.dtype, torch.float32)
        return None, *(tree.first_dim(part.to(wide)).to(g.dtype) for part in torch.split(g, ctx.counts))


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, probs)
        return (x * probs.unsqueeze(1)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, probs = ctx.saved_tensors
        wide = torch.promote_types(torch.promote_types(x.dtype, probs.dtype), torch.float32)
        dx = (grads[0] * probs.unsqueeze(1)).to(x.dtype)
        dp = tree.last_dim(grads[0].to(wide) * x.to(wide)).squeeze(1).to(probs.dtype)
        return dx, dp
