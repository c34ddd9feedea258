"""RoPE of multi-latent attention: the last part of each head is turned; the key's part is shared by all heads.

Megatron's fused kernel (``fused_mla_yarn_rope_apply``) picks by timing how many heads it adds at once in the backward
of the shared part, so two runs can round otherwise. Here the heads are added in one order.

Input pairs are interleaved (0, 1), (2, 3), …; the output has the first of all pairs, then the second of all pairs:
    left = x1 cos - x2 sin,  right = x2 cos + x1 sin     (x1, x2: even and odd places; cos, sin: [tokens, emb])

Order    the shared part's gradient, along the heads: ``tree.first_dim`` with blocks of HEADS = 64
Level    placement
Shapes   q [t, b, heads, plain + emb] or packed [t, heads, plain + emb]; cos, sin [>= t, 1, 1, emb], both halves equal
         in angle; kv [t, b, heads, k + v], shared [t, b, 1, emb] -> key [t, b, heads, k + emb], value [t, b, heads, v]
Memory   saves cos and sin only
Error    the turned parts: 2 roundings of fp32 and one to the type; the heads' sum: ceil(log2 heads) more

Worked example: x = [1, 0], cos = 0, sin = 1 (a quarter turn): left = 0, right = 1.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_det.kernels.tree import first_dim

HEADS = 64


def _angles(cos: torch.Tensor, sin: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """cos left, cos right, sin left, sin right: fp32, [t, 1, …, emb / 2], broadcast against x."""
    rows = x.shape[0]
    shape = (rows, *(1,) * (x.dim() - 2), -1)
    cos, sin = cos[:rows].reshape(shape).float(), sin[:rows].reshape(shape).float()
    return (*cos.chunk(2, -1), *sin.chunk(2, -1))


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Shapes: [t, …, emb] interleaved -> [t, …, emb] in halves, fp32."""
    cos1, cos2, sin1, sin2 = _angles(cos, sin, x)
    x1, x2 = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.cat((x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2), -1)


def turn_back(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The transpose of ``turn``: [t, …, emb] in halves -> interleaved, fp32."""
    cos1, cos2, sin1, sin2 = _angles(cos, sin, grad)
    left, right = (half.float() for half in grad.chunk(2, -1))
    pairs = torch.stack((left * cos1 + right * sin2, right * cos2 - left * sin1), -1)
    return pairs.flatten(-2)


class TurnQuery(torch.autograd.Function):
    """``TurnQuery.apply(q, cos, sin, emb)``: a new tensor; q stays (Megatron's kernel overwrites it)."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, emb: int) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.emb = emb
        return torch.cat((q[..., :-emb], turn(q[..., -emb:], cos, sin).to(q.dtype)), -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        (grad,) = grads
        back = turn_back(grad[..., -ctx.emb :], cos, sin).to(grad.dtype)
        return torch.cat((grad[..., : -ctx.emb], back), -1), None, None, None


class TurnKeyValue(torch.autograd.Function):
    """``TurnKeyValue.apply(kv, shared, cos, sin, k)`` -> key, value. The shared part goes to every head."""

    @staticmethod
    def forward(
        ctx: Any, kv: torch.Tensor, shared: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.k = k
        turned = turn(shared, cos, sin).to(kv.dtype)
        key = torch.cat((kv[..., :k], turned.expand(*kv.shape[:-1], -1)), -1)
        return key, kv[..., k:].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dkey, dvalue = grads
        over_heads = dkey[..., ctx.k :].float().movedim(-2, 0).contiguous()
        dshared = turn_back(first_dim(over_heads, HEADS).unsqueeze(-2), cos, sin).to(dkey.dtype)
        return torch.cat((dkey[..., : ctx.k], dvalue), -1), dshared, None, None, None
