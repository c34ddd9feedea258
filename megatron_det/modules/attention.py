"""Attention between query, key and value: torch's flash kernel where its backward has one order, else Megatron's path.

Replaces  ``DotProductAttention`` (local); it stays the fallback, and its constructor is used as it is
Why       which kernel ``scaled_dot_product_attention`` takes is torch's choice, and its memory-efficient backward adds
          with atomics. Here the kernel is named, and proved on the first tensors of each shape before it is used
Level     run: the order inside the kernels is the vendor's
Source    ``megatron.core.transformer.dot_product_attention``, 0.19.2

=================================  ================  =================================================================
case                               path              why
=================================  ================  =================================================================
a mask that is not causal          unfused           Megatron's rows without any key are an average; flash has no masks
dropout on CPU                     unfused           the CPU's flash kernel has none
window, other softmax, unequal     unfused           not in the kernel
widths of key and value (MLA)
--attention-backend unfused/local  unfused           as asked
CUDA without deterministic mode    unfused           the flash backward reads that switch
else                               flash             dq in one pass per block, no atomics
=================================  ================  =================================================================

The path follows from shapes and settings only, never from a measurement: two runs take the same one. A flash kernel
that fails its proof stops the run. The proof is made without dropout.
"""

from __future__ import annotations

import functools
from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_det.errors import GuaranteeBroken

REPLAYS = 3
_causal: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def is_causal(mask: torch.Tensor) -> bool:
    """Whether a Megatron mask [b or 1, 1, sq, sk] (true: hidden) hides just the future. Looked at once per tensor."""
    known = _causal.get(mask)
    if known is None or known[0] != mask._version:
        future = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu_(1)
        known = (mask._version, bool((mask == future).all()))
        _causal[mask] = known
    return known[1]


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, scale: float, causal: bool) -> Any:
    """Shapes: [b, heads, s, d]. Only the flash kernel; Raises: RuntimeError where it cannot serve."""
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=causal, scale=scale
        )


def capable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, causal: bool) -> bool:
    """Whether the flash kernel serves this, with a backward in one order. From shapes, types and switches only."""
    if v.shape[-1] != q.shape[-1] or (causal and q.shape[2] != k.shape[2]):
        return False
    if q.device.type == "cpu":
        return not dropout and q.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if not torch.are_deterministic_algorithms_enabled():
        return False
    params = torch.backends.cuda.SDPAParams(q, k, v, None, dropout, causal, False)
    return torch.backends.cuda.can_use_flash_attention(params)


@functools.cache
def prove(
    device: torch.device, dtype: torch.dtype, q_shape: tuple[int, ...], k_shape: tuple[int, ...], causal: bool
) -> None:
    """Forward and backward on one set of tensors, repeated among fresh garbage, with and without autograd.

    Once per shape and process. Draws from a generator of its own. Raises: GuaranteeBroken when a bit differs.
    """
    draw = torch.Generator(device).manual_seed(20240229)
    shapes = (q_shape, k_shape, k_shape, q_shape)
    q, k, v, grad = (torch.randn(shape, generator=draw, device=device).to(dtype) for shape in shapes)
    scale = q.shape[-1] ** -0.5
    seen: set[bytes] = set()
    for replay in range(REPLAYS):
        garbage = [torch.full((q.numel() + 64 * replay,), float("nan"), dtype=dtype, device=device) for _ in range(3)]
        del garbage
        with torch.enable_grad():
            leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
            out = flash(leaves[0], leaves[1], leaves[2], 0.0, scale, causal)
            gradients = torch.autograd.grad(out, leaves, grad)
        with torch.no_grad():  # what recompute runs first
            again = flash(q, k, v, 0.0, scale, causal)
        seen.update(b"".join(_bytes(x) for x in (first, *gradients)) for first in (out, again))
    if len(seen) != 1:
        raise GuaranteeBroken.of(
            "DET-ATTENTION-PROOF",
            f"flash attention {tuple(q_shape)} {dtype} on {device}",
            found=f"{len(seen)} results in {REPLAYS} replays on the same tensors",
            needed="one",
            why="This kernel does not keep an order, whatever its documentation says.",
            do="--attention-backend unfused.",
        )


def _bytes(x: torch.Tensor) -> bytes:
    return x.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()


class DetAttention(DotProductAttention):
    """Shapes: query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads * d of value].

    Grouped queries: key and value are repeated as Megatron does; the sum over a group in the backward is torch's, one
    pass per element. Dropout draws from Megatron's tracker, as in its own path. ``runs`` counts forwards by path.
    """

    def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if v_channels is not None:  # MLA: Megatron's local attention does not know these words
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
        self.k_channels = k_channels
        self.runs: Counter[str] = Counter()
        wanted = self.config.attention_backend
        self.plain = (
            wanted not in (AttnBackend.unfused, AttnBackend.local)
            and self.config.softmax_type == "vanilla"
            and self.scale_mask_softmax.window_size is None
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Raises: AssertionError (Megatron's) for packed sequences and a bias; GuaranteeBroken from ``prove``."""
        if self.plain and attention_bias is None and packed_seq_params is None:
            causal = self._causal(attention_mask, query.shape[0])
            dropout = self.attention_dropout.p if self.training else 0.0
            if causal is not None:
                q, k, v = self._heads_first(query, key, value)
                if capable(q, k, v, dropout, causal):
                    return self._flash(q, k, v, dropout, causal)
        self.runs["unfused"] += 1
        result: torch.Tensor = super().forward(
            query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params
        )
        return result

    def _causal(self, mask: torch.Tensor | None, queries: int) -> bool | None:
        """True: causal; False: everything is seen; None: another mask. As Megatron: a mask that is given wins."""
        if mask is None:
            return self.attn_mask_type == AttnMaskType.causal and queries > 1
        return True if is_causal(mask) else None

    def _heads_first(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[s, b, heads or groups, d] -> [b, heads, s, d]."""
        heads = self.num_attention_heads_per_partition
        repeated = (x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2) for x in tensors)
        return tuple(x.permute(1, 2, 0, 3) for x in repeated)

    def _flash(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, causal: bool) -> torch.Tensor:
        prove(q.device, q.dtype, tuple(q.shape), tuple(k.shape), causal)
        self.runs["flash"] += 1
        tracked = dropout and not self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if tracked else nullcontext():
            out = flash(q, k, v, dropout, self.softmax_scale, causal)
        return out.permute(2, 0, 1, 3).reshape(out.shape[2], out.shape[0], -1)
