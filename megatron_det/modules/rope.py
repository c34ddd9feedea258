"""RoPE of multi-latent attention: what is served, and what is refused.

Replaces  nothing by itself. Without ``--apply-rope-fusion`` Megatron's own path is used: elementwise, and the shared
          key's gradient is a plain sum over heads (level run)
Refuses   the fused kernel: it picks by timing (``triton.autotune`` over BLOCK_H of 1 … 128) how many heads it adds at
          once, and its cache is not saved with a run
Offers    ``query`` and ``key_value`` with the signatures of the fused functions, the heads added in one written-down
          order: a patch of ``multi_latent_attention`` can bind them
Level     placement for ``query`` and ``key_value``
Source    ``megatron.core.fusions.fused_mla_yarn_rope_apply``, 0.19.2 (signatures and the formula)
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import multi_latent_attention

from megatron_det.errors import Refused
from megatron_det.kernels.rope import TurnKeyValue, TurnQuery


def check(config: Any) -> None:
    """Raises: Refused when MLA would use the fused kernel that is tuned by timing."""
    if not (config.multi_latent_attention and config.apply_rope_fusion):
        return
    if multi_latent_attention.fused_apply_mla_rope_for_kv is key_value:
        return
    raise Refused.of(
        "DET-MLA-ROPE",
        "--apply-rope-fusion with --multi-latent-attention",
        found="rotary_bwd_kv_kernel, tuned by timing over BLOCK_H = 1 … 128",
        needed="a kernel with one block",
        why="Two runs may add the heads in groups of different size, and round otherwise.",
        do="--no-rope-fusion.",
    )


def _plain(cu_seqlens: Any, cp_size: int, interleaved: bool) -> None:
    if cu_seqlens is None and cp_size == 1 and not interleaved:
        return
    raise Refused.of(
        "DET-MLA-ROPE",
        "MLA rope",
        found=f"packed={cu_seqlens is not None}, context parallel size {cp_size}, interleaved={interleaved}",
        needed="unpacked sequences without context parallelism",
        why="Only this case has a written-down order.",
        do="--no-rope-fusion.",
    )


def query(
    t: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    qk_head_dim: int,
    emb_dim: int,
    cu_seqlens_q: Any = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
) -> torch.Tensor:
    """Shapes: t [s, b, heads, qk_head_dim + emb_dim] -> the same, the last emb_dim turned. Raises: Refused."""
    _plain(cu_seqlens_q, cp_size, rotary_interleaved)
    result: Any = TurnQuery.apply(t, cos, sin, emb_dim)
    return result


def key_value(
    kv: torch.Tensor,
    k_pos_emb: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    emb_dim: int,
    k_dim: int,
    v_dim: int,
    cu_seqlens_kv: Any = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes: kv [s, b, heads, k + v], k_pos_emb [s, b, 1, emb] -> key [s, b, heads, k + emb], value [s, b, heads, v].

    Raises: Refused.
    """
    _plain(cu_seqlens_kv, cp_size, rotary_interleaved)
    result: Any = TurnKeyValue.apply(kv, k_pos_emb, cos, sin, k_dim)
    return result
