"""Attention and MLA rope: named kernels, proofs that can fail, masks, groups, dropout, recompute."""

from __future__ import annotations

import math

import pytest
import torch
from dense_support import bits, config, gradients, megatron, replays
from megatron.core.transformer.enums import AttnBackend, AttnMaskType

from megatron_det.errors import GuaranteeBroken, Refused
from megatron_det.kernels.rope import turn, turn_back
from megatron_det.modules import attention, rope
from megatron_det.modules.attention import DetAttention

S, B, HEADS, GROUPS, D = 48, 2, 4, 2, 8
U = 2.0**-24


@pytest.fixture(scope="module")
def world():
    with megatron():
        yield


def built(dropout: float = 0.0, backend: AttnBackend = AttnBackend.auto, **more) -> DetAttention:
    words = {key: more.pop(key) for key in ("k_channels", "v_channels") if key in more}
    conf = config(attention_backend=backend, attention_dropout=dropout, **more)
    return DetAttention(conf, 1, AttnMaskType.causal, "self", **words)


def qkv(dtype: torch.dtype = torch.float32, s: int = S):
    draw = torch.Generator().manual_seed(7)
    shapes = ((s, B, HEADS, D), (s, B, GROUPS, D), (s, B, GROUPS, D))
    return tuple(torch.randn(shape, generator=draw).to(dtype) for shape in shapes)


def causal_mask(s: int = S) -> torch.Tensor:
    return torch.ones(B, 1, s, s, dtype=torch.bool).triu(1)


def arbitrary_mask() -> torch.Tensor:
    """Two documents, and one row that sees nothing."""
    mask = causal_mask()
    mask[0, 0, S // 2 :, : S // 2] = True
    mask[1, 0, 5] = True
    return mask


CASES = {
    "flash": ({}, None),
    "flash, mask given": ({}, causal_mask()),
    "unfused as asked": ({"backend": AttnBackend.unfused}, None),
    "arbitrary mask": ({}, arbitrary_mask()),
    "dropout": ({"dropout": 0.3}, None),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fifty_replays_with_and_without_recompute(world, case, dtype):
    from megatron.core import tensor_parallel

    options, mask = CASES[case]
    module = built(**options)

    def run(recompute: bool = False) -> bytes:
        tensor_parallel.model_parallel_cuda_manual_seed(3, force_reset_rng=True)

        def forward(q, k, v):
            return module(q, k, v, mask)

        def again(q, k, v):  # Megatron's own checkpoint: it puts the RNG streams back
            return tensor_parallel.checkpoint(forward, False, q, k, v)

        return bits(*gradients(again if recompute else forward, *qkv(dtype)))

    seen = replays(run)
    assert len(seen) == 1
    assert {run(recompute=True)} == seen
    assert set(module.runs) == {"flash" if case.startswith("flash") else "unfused"}


def exact(q, k, v, mask):
    """Attention in fp64 with Megatron's meaning of a mask."""
    q, k, v = (x.double().permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) / math.sqrt(D)).masked_fill(mask, -10000.0)
    return (scores.softmax(-1) @ v).permute(2, 0, 1, 3).reshape(q.shape[2], q.shape[0], -1)


@pytest.mark.parametrize("case", ["flash", "flash, mask given", "unfused as asked", "arbitrary mask"])
def test_close_to_fp64(world, case):
    """fp32: a score is off by at most (D + 2) u |q||k| / sqrt(D), which moves a probability by twice that share."""
    options, mask = CASES[case]
    leaves = qkv()
    out, *grads = gradients(lambda *x: built(**options)(*x, mask), *leaves)
    reference, *right = gradients(
        lambda *x: exact(*x, causal_mask() if mask is None else mask), *(x.double() for x in leaves)
    )
    q, k, v = leaves
    score = (D + 2) * U * q.norm(dim=-1).max() * k.norm(dim=-1).max() / math.sqrt(D)
    share = 2 * score + (S + 8) * U
    assert (out.double() - reference).abs().max() <= share * v.abs().max()
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    through = share * 4 * S * weights.abs().max() * HEADS * max(x.abs().max() for x in leaves) ** 2
    assert max((a.double() - b).abs().max() for a, b in zip(grads, right, strict=True)) <= through


def test_the_path_follows_from_shapes_and_settings(world):
    q, k, v = (torch.zeros(B, HEADS, S, D),) * 3
    assert attention.capable(q, k, v, 0.0, True)
    assert not attention.capable(q, k, v, 0.1, True), "the CPU's flash kernel has no dropout"
    assert not attention.capable(q, k, torch.zeros(B, HEADS, S, 4), 0.0, True)
    assert not attention.capable(q.double(), k.double(), v.double(), 0.0, True)
    assert not attention.capable(q, k[:, :, :9], v[:, :, :9], 0.0, True)
    assert not built(softmax_type="off-by-one").plain
    assert not built(window_size=(4, 0)).plain
    module = built(dropout=0.3).eval()
    module(*qkv(), None)
    assert module.runs == {"flash": 1}, "no dropout in evaluation"


def test_a_mask_is_looked_at_again_when_it_was_changed():
    mask = causal_mask()
    assert attention.is_causal(mask) and attention.is_causal(mask)
    mask[0, 0, 3, 1] = True
    assert not attention.is_causal(mask)


def test_only_the_named_kernel_is_used():
    """What flash cannot serve raises; torch does not choose another kernel behind our back."""
    q, k, v = (torch.randn(B, HEADS, S, D) for _ in range(3))
    attention.flash(q, k, v, 0.0, 1.0, True)
    with pytest.raises(RuntimeError, match="kernel"):
        attention.flash(q, k, v, 0.5, 1.0, True)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_kernel_that_wanders_fails_its_proof(monkeypatch, where):
    """The injected fault: one bit now and then, in the output or in one gradient."""
    calls = []
    honest = attention.flash

    class Flip(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return flipped(x) if where == "forward" else x.clone()

        @staticmethod
        def backward(ctx, grad):
            return flipped(grad) if where == "backward" else grad

    def flipped(x):
        calls.append(1)
        words = x.contiguous().view(torch.int32).clone()
        words.view(-1)[3] ^= len(calls) == 2
        return words.view(torch.float32)

    monkeypatch.setattr(attention, "flash", lambda *args: Flip.apply(honest(*args)))
    shape = (1, 2, 16, 8)
    with pytest.raises(GuaranteeBroken, match="DET-ATTENTION-PROOF"):
        attention.prove.__wrapped__(torch.device("cpu"), torch.float32, shape, shape, True)
    monkeypatch.setattr(attention, "flash", honest)
    attention.prove.__wrapped__(torch.device("cpu"), torch.float32, shape, shape, True)


def test_mla_widths(world):
    """Control: Megatron's local attention does not know the words with which MLA builds it."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    q, k = (torch.randn(S, B, HEADS, 12) for _ in range(2))
    module = built(k_channels=12, v_channels=6, num_query_groups=HEADS)
    assert module(q, k, torch.randn(S, B, HEADS, 6), None).shape == (S, B, HEADS * 6)
    assert module.runs == {"unfused": 1}
    with pytest.raises(TypeError, match="k_channels"):
        DotProductAttention(config(), 1, AttnMaskType.causal, "self", k_channels=12, v_channels=6)


def angles(rows: int, emb: int, dtype: torch.dtype = torch.float32):
    half = torch.outer(torch.arange(rows), 1.0 / 100 ** (torch.arange(emb // 2) / emb))
    full = torch.cat((half, half), -1)[:, None, None, :]
    return full.cos().to(dtype), full.sin().to(dtype)


def test_a_quarter_turn():
    cos, sin = torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 1, 2)
    assert turn(torch.tensor([[[[1.0, 0.0]]]]), cos, sin).flatten().tolist() == [0.0, 1.0]
    x = torch.randn(5, 1, 2, 6)
    back = turn_back(turn(x, *angles(5, 6)), *angles(5, 6))
    assert (back - x).abs().max() < 8 * U * x.abs().max(), "a turn back undoes a turn"


@pytest.mark.parametrize("heads", [1, 4, 70])
def test_mla_rope_replays_and_agrees_with_autograd(world, heads):
    """Against Megatron's unfused path in fp64; the shared key's gradient is a sum over heads."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    s, b, k_dim, v_dim, emb = 9, 2, 6, 5, 8
    draw = torch.Generator().manual_seed(1)
    kv = torch.randn(s, b, heads, k_dim + v_dim, generator=draw)
    shared = torch.randn(s, b, 1, emb, generator=draw)
    q = torch.randn(s, b, heads, k_dim + emb, generator=draw)
    freqs = torch.outer(torch.arange(s), 1.0 / 100 ** (torch.arange(emb // 2) / emb)).double()
    freqs = torch.cat((freqs, freqs), -1)[:, None, None, :]

    def ours(kv, shared, q):
        cos, sin = freqs.cos().float(), freqs.sin().float()
        key, value = rope.key_value(kv, shared, cos, sin, emb, k_dim, v_dim)
        return torch.cat((key, value, rope.query(q, cos, sin, k_dim, emb)), -1)

    def theirs(kv, shared, q):
        def turned(x):
            return _apply_rotary_pos_emb_bshd(x, freqs, mla_rotary_interleaved=True)

        key = torch.cat((kv[..., :k_dim], turned(shared).expand(-1, -1, heads, -1)), -1)
        return torch.cat((key, kv[..., k_dim:], q[..., :k_dim], turned(q[..., k_dim:])), -1)

    seen = replays(lambda: bits(*gradients(ours, kv, shared, q)))
    assert seen == {bits(*gradients(ours, kv, shared, q, recompute=True))}
    found = gradients(ours, kv, shared, q)
    right = gradients(theirs, kv.double(), shared.double(), q.double())
    deep = math.ceil(math.log2(max(heads, 2))) + 6
    for a, e in zip(found, right, strict=True):
        assert (a.double() - e).abs().max() <= deep * U * heads * 16


def test_the_fused_mla_rope_is_refused(monkeypatch):
    conf = config()
    rope.check(conf)
    monkeypatch.setattr(conf, "apply_rope_fusion", True)
    rope.check(conf)
    monkeypatch.setattr(conf, "multi_latent_attention", True)
    with pytest.raises(Refused, match="BLOCK_H") as error:
        rope.check(conf)
    assert "--no-rope-fusion" in str(error.value)
    monkeypatch.setattr(rope.multi_latent_attention, "fused_apply_mla_rope_for_kv", rope.key_value)
    rope.check(conf)
    with pytest.raises(Refused, match="packed"):
        rope.query(torch.zeros(2, 2, 4), *angles(2, 2), 2, 2, cu_seqlens_q=torch.tensor([0, 2]))
