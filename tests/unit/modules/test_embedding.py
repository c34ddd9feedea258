"""Embeddings: gradients in token order, the same for every split of the table; Megatron's differ on two threads."""

from __future__ import annotations

import math

import pytest
import torch
from dense_support import bits, config, gradients, megatron, replays, threads
from hypothesis import given
from hypothesis import strategies as st

from megatron_det.errors import Refused
from megatron_det.kernels.segment_sum import Lookup, segment_sum
from megatron_det.modules.embedding import DetEmbedding, DetVocabParallelEmbedding, take_over

WORDS, WIDTH = 50, 24
U = 2.0**-24


def drawn(seed: int = 0):
    return torch.Generator().manual_seed(seed)


def skewed(*shape: int, words: int = WORDS) -> torch.Tensor:
    """Many tokens of few words, as in text."""
    return (torch.rand(*shape, generator=drawn(1)).pow(3) * words).long()


def in_order(ids: torch.Tensor, grads: torch.Tensor, size: int) -> torch.Tensor:
    """The definition, in Python: the rows of each word as neighbouring pairs."""
    out = torch.zeros(size, grads.shape[1])
    for word in range(size):
        row = [g.float() for i, g in zip(ids.tolist(), grads, strict=True) if i == word]
        while len(row) > 1:
            row = [row[k] + row[k + 1] if k + 1 < len(row) else row[k] for k in range(0, len(row), 2)]
        if row:
            out[word] = row[0]
    return out


def test_ordered_pairs_of_the_docstring():
    out = segment_sum(torch.tensor([7, 2, 7, 7]), torch.tensor([[1.0], [10], [2], [4]]), 8)
    assert out.squeeze(1).tolist() == [0, 0, 10, 0, 0, 0, 0, 7]
    late = segment_sum(torch.tensor([0, 0, 0]), torch.tensor([[1.0], [1.0], [2.0**24]]), 1)
    assert late.item() == 2.0**24 + 2, "token order: the ones first"


@given(n=st.integers(0, 90), words=st.integers(1, 20), seed=st.integers(0, 3))
def test_bits_are_those_of_the_definition(n, words, seed):
    ids = torch.randint(-2, words + 2, (n,), generator=drawn(seed))
    grads = torch.randn(n, 3, generator=drawn(seed)).to(torch.bfloat16 if seed % 2 else torch.float32)
    assert bits(segment_sum(ids, grads, words)) == bits(in_order(ids, grads, words).to(grads.dtype))


@given(cut=st.integers(0, WORDS))
def test_a_split_table_gives_the_same_bits(cut):
    ids, grads = skewed(200), torch.randn(200, WIDTH, generator=drawn())
    shares = [segment_sum(ids, grads, cut), segment_sum(ids - cut, grads, WORDS - cut)]
    assert bits(torch.cat(shares)) == bits(segment_sum(ids, grads, WORDS))


def test_close_to_fp64():
    ids, grads = skewed(3000), torch.randn(3000, WIDTH, generator=drawn())
    exact = torch.zeros(WORDS, WIDTH, dtype=torch.float64).index_add_(0, ids, grads.double())
    size = torch.zeros(WORDS, WIDTH, dtype=torch.float64).index_add_(0, ids, grads.double().abs())
    deep = math.ceil(math.log2(int(torch.bincount(ids).max())))
    assert ((segment_sum(ids, grads, WORDS).double() - exact).abs() <= deep * U * size).all()


def test_a_share_gives_zeros_and_a_whole_table_refuses():
    table = torch.ones(4, 2)
    assert Lookup.apply(table, torch.tensor([3, 4, -1]), True).tolist() == [[1, 1], [0, 0], [0, 0]]
    with pytest.raises(IndexError):
        Lookup.apply(table, torch.tensor([4]), False)


@pytest.fixture(scope="module")
def world():
    with megatron():
        yield


def modules(dtype: torch.dtype = torch.float32, deterministic: bool = False):
    """Megatron's embedding and ours with the same table."""
    from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

    made = []
    for kind in (VocabParallelEmbedding, DetVocabParallelEmbedding):
        torch.manual_seed(0)
        conf = config(deterministic_mode=deterministic)
        made.append(kind(WORDS, WIDTH, init_method=torch.nn.init.normal_, config=conf).to(dtype))
    return made


def all_bits(module, ids, recompute: bool = False) -> bytes:
    module.weight.grad = None
    out, *_ = gradients(lambda _, ids: module(ids), torch.ones(1), ids, recompute=recompute)
    return bits(out, module.weight.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fifty_replays_with_and_without_recompute(world, dtype):
    theirs, ours = modules(dtype)
    ids = skewed(2, 300)
    seen = replays(lambda: all_bits(ours, ids))
    assert len(seen) == 1
    assert {all_bits(ours, ids, recompute=True)} == seen
    with threads(1):
        assert {all_bits(ours, ids)} == seen
    assert bits(theirs(ids)) == bits(ours(ids)), "the forward is the same lookup"


def test_megatrons_gradient_differs_on_two_threads(world):
    """The control: deterministic_mode without torch's own switch, which can be set apart."""
    theirs, ours = modules(deterministic=True)
    ids = skewed(8, 1024)
    seen, of_ours = set(), set()
    with threads(2):
        for _ in range(200):
            seen.add(all_bits(theirs, ids))
            of_ours.add(all_bits(ours, ids))
            if len(seen) > 1:
                break
    assert len(seen) > 1, "index_put_(accumulate=True) gave one result in 200 trials"
    assert len(of_ours) == 1


def test_taking_over_keeps_the_table(world):
    theirs, _ = modules()
    table = theirs.weight
    assert take_over(theirs) and isinstance(theirs, DetVocabParallelEmbedding) and theirs.weight is table
    assert not take_over(theirs), "once"
    positions = torch.nn.Embedding(9, 4)
    assert take_over(positions) and isinstance(positions, DetEmbedding)
    positions(torch.tensor([[1, 1, 2]])).sum().backward()
    assert positions.weight.grad[:3, 0].tolist() == [0, 2, 1] and positions.runs == {"lookup": 1}
    with pytest.raises(Refused, match="max_norm"):
        take_over(torch.nn.Embedding(9, 4, max_norm=1.0))
    with pytest.raises(Refused, match="padding_idx"):
        take_over(torch.nn.Embedding(9, 4, padding_idx=0))
