"""RMSNorm and LayerNorm over the last dimension, forward and backward in a written-down order.

    rms    y = x * r * g               r = 1 / sqrt(mean(x^2) + eps)
    layer  y = (x - m) * r * g + b     m = mean(x), r = 1 / sqrt(mean((x - m)^2) + eps)

with g = gamma, or gamma + 1 where gamma is stored around zero. All in fp32, one rounding to the type of x at the end.

Order    sums along a row: ``tree.last_dim``; gamma's and beta's gradient, along the rows: ``tree.first_dim``
Level    placement; a row's result does not depend on the other rows, on threads, or on how many rows there are
Shapes   x [..., H], gamma [H], beta [H] or none -> y [..., H], type of x
Memory   saves x and one (layer: two) fp32 number per row; x hat is computed again in the backward
Error    per element, relative to |y|: rms at most (ceil(log2 H) / 2 + 8) * 2**-24 before the last rounding

Worked example: rms of [3, 4] with gamma 1 and eps 0: mean of squares 12.5, y = [3, 4] / 3.5355… = [0.8485…, 1.1313…].
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_det.kernels.tree import first_dim, last_dim


def _mean(x: torch.Tensor) -> torch.Tensor:
    """Shapes: [..., H] -> [..., 1]."""
    return last_dim(x) / x.shape[-1]


def _reciprocal_root(mean_square: torch.Tensor, eps: float) -> torch.Tensor:
    # Not rsqrt: CUDA has it as an approximation. sqrt and / are correctly rounded everywhere.
    return 1.0 / torch.sqrt(mean_square + eps)


def forward(
    x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, eps: float, centred: bool, zero_centred: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The reference. Shapes: x [..., H] -> y [..., H], r [..., 1], m [..., 1] or None. ``centred``: LayerNorm."""
    wide = x.float()
    mean = None
    if centred:
        mean = _mean(wide)
        wide = wide - mean
    root = _reciprocal_root(_mean(wide * wide), eps)
    y = (wide * root).mul_(_scale(gamma, zero_centred))
    if beta is not None:
        y.add_(beta.float())
    return y.to(x.dtype), root, mean


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    root: torch.Tensor,
    mean: torch.Tensor | None,
    zero_centred: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes: grad, x [..., H] -> dx [..., H] (type of x), dgamma [H] and dbeta [H] in fp32.

    dx = r * (dy * g - [mean(dy * g)] - x hat * mean(dy * g * x hat)); the term in brackets only when centred.
    """
    dy = grad.float()
    hat = (x.float() * root) if mean is None else (x.float() - mean).mul_(root)
    dgamma = first_dim((dy * hat).reshape(-1, x.shape[-1]))
    dbeta = first_dim(dy.reshape(-1, x.shape[-1])) if mean is not None else dgamma
    dhat = dy * _scale(gamma, zero_centred)
    along = _mean(dhat * hat)
    if mean is not None:
        dhat = dhat - _mean(dhat)
    dx = dhat.sub_(hat.mul_(along)).mul_(root)
    return dx.to(x.dtype), dgamma, dbeta


def _scale(gamma: torch.Tensor, zero_centred: bool) -> torch.Tensor:
    return gamma.float() + 1.0 if zero_centred else gamma.float()


class Norm(torch.autograd.Function):
    """``Norm.apply(x, gamma, beta, eps, centred, zero_centred)``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gamma: torch.Tensor,
        beta: torch.Tensor | None,
        eps: float,
        centred: bool,
        zero_centred: bool,
    ) -> torch.Tensor:
        y, root, mean = forward(x, gamma, beta, eps, centred, zero_centred)
        ctx.save_for_backward(x, gamma, root, *([] if mean is None else [mean]))
        ctx.zero_centred, ctx.beta = zero_centred, None if beta is None else beta.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gamma, root, *mean = ctx.saved_tensors
        dx, dgamma, dbeta = backward(grads[0], x, gamma, root, mean[0] if mean else None, ctx.zero_centred)
        beta = None if ctx.beta is None else dbeta.to(ctx.beta)
        return dx, dgamma.to(gamma.dtype), beta, None, None, None
