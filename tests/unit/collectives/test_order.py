"""The two orders as data, and the ordered sum against its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_det.collectives import ordered_sum as sums
from megatron_det.collectives.order import ORDERS, blocks, plan


def test_plans_as_written_in_the_docstring():
    assert plan(4, "linear") == ((0, 1), (0, 2), (0, 3))
    assert plan(4, "tree") == ((0, 1), (2, 3), (0, 2))
    assert plan(5, "tree") == ((0, 1), (2, 3), (0, 2), (0, 4))
    assert plan(1, "tree") == ()
    with pytest.raises(ValueError, match="orders"):
        plan(3, "ring")


@given(st.integers(1, 40), st.sampled_from(ORDERS))
def test_every_rank_is_added_exactly_once(ranks, order):
    assert sorted(other for _, other in plan(ranks, order)) == list(range(1, ranks))


@given(st.integers(1, 6), st.sampled_from([2, 4, 8]))
def test_the_tree_over_all_ranks_contains_the_tree_of_every_node(nodes, per_node):
    """Hierarchical (first inside each node, then over nodes) equals flat, bit for bit."""
    generator = torch.Generator().manual_seed(nodes)
    shards = [torch.randn(64, generator=generator) * 10 ** (i % 5) for i in range(nodes * per_node)]
    inner = [sums.reference(shards[n * per_node : (n + 1) * per_node], "tree") for n in range(nodes)]
    whole, flat = sums.reference(inner, "tree"), sums.reference(shards, "tree")
    assert torch.equal(whole.view(torch.int32), flat.view(torch.int32))


def random_shards(ranks, size, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([10.0 ** (i % 4) for i in range(ranks)])
    return [(torch.randn(size, generator=generator) * scale[i]).to(dtype) for i in range(ranks)]


REDUCTIONS = [sums.SUM, sums.AVG, sums.MAX, sums.MIN, sums.Reduction("PREMUL_SUM", 0.3)]


@given(
    st.integers(1, 9),
    st.integers(0, 50),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2]),
    st.sampled_from(ORDERS),
    st.sampled_from(REDUCTIONS),
    st.sets(st.integers(0, 8)),
)
def test_equals_the_reference_whatever_the_chunks(ranks, size, dtype, order, reduction, scratch):
    shards = random_shards(ranks, size, dtype)
    expected = sums.reference(shards, order, reduction)
    owned = frozenset(rank for rank in scratch if rank < ranks)
    for chunk in (3, 1 << 16):
        old, sums.CHUNK = sums.CHUNK, chunk
        given_shards = [s.clone() for s in shards]
        try:
            out = sums.ordered_sum(given_shards, torch.empty(size, dtype=dtype), order, reduction, owned)
        finally:
            sums.CHUNK = old
        assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
        for rank in set(range(ranks)) - owned:
            assert torch.equal(given_shards[rank].view(torch.uint8), shards[rank].view(torch.uint8)), (
                "not ours to change"
            )


def test_which_zero_wins_does_not_follow_the_position():
    """torch.maximum keeps the first of +0 and -0 in a vector's lanes and the second in the tail: the control."""
    plus, minus = torch.zeros(35), -torch.zeros(35)
    stock = torch.maximum(plus, minus).view(torch.int32)
    assert stock.unique().numel() == 2, "torch.maximum depends on the position (if not any more, keys can go)"
    for shards in ([plus, minus], [minus, plus]):
        out = sums.ordered_sum(shards, torch.empty(35), "tree", sums.MAX)
        assert out.view(torch.int32).eq(0).all(), "+0 wins everywhere"
        out = sums.ordered_sum(shards, torch.empty(35), "tree", sums.MIN)
        assert out.view(torch.int32).eq(-(2**31)).all(), "-0 wins everywhere"


def test_a_nan_wins():
    shards = [torch.tensor([1.0, float("nan"), -float("inf")]), torch.tensor([float("nan"), 2.0, float("inf")])]
    for reduction in (sums.MAX, sums.MIN):
        out = sums.ordered_sum(shards, torch.empty(3), "tree", reduction)
        assert out[:2].isnan().all() and out[2].isinf()


def test_blocks_of_nodes():
    assert blocks(list("aabb")) == 2 and blocks(list("aaaabbbbcccc")) == 4
    for nodes in ("abab", "aaab", "aaabbb", "abcd", "aaaa", "aabbaa", ""):
        assert blocks(list(nodes)) is None, nodes


def test_one_rounding_and_wide_accumulation():
    """256 + 1 + 1 in bf16: added narrow it stays 256; in fp32 with one rounding it is 258."""
    shards = [torch.tensor([x], dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0)]
    assert float(sums.reference(shards, "linear")) == 258.0
    assert float(shards[0] + shards[1] + shards[2]) == 256.0, "the control"


def test_the_orders_differ():
    shards = random_shards(4, 1000, torch.float32)
    assert not torch.equal(sums.reference(shards, "linear"), sums.reference(shards, "tree"))
