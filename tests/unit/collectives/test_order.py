"""The two orders as data, and the ordered sum against its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_det.collectives import ordered_sum as sums
from megatron_det.collectives.order import ORDERS, plan


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
    assert torch.equal(sums.reference(inner, "tree"), sums.reference(shards, "tree"))


def random_shards(ranks, size, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([10.0 ** (i % 4) for i in range(ranks)])
    return [(torch.randn(size, generator=generator) * scale[i]).to(dtype) for i in range(ranks)]


@given(
    st.integers(1, 9),
    st.integers(0, 50),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.sampled_from(ORDERS),
    st.booleans(),
)
def test_equals_the_reference_whatever_the_chunks(ranks, size, dtype, order, average):
    shards = random_shards(ranks, size, dtype)
    expected = sums.reference(shards, order, average)
    for chunk in (3, 1 << 16):
        old, sums.CHUNK = sums.CHUNK, chunk
        try:
            out = sums.ordered_sum([s.clone() for s in shards], torch.empty(size, dtype=dtype), order,
                                   ranks if average else None)  # fmt: skip
        finally:
            sums.CHUNK = old
        assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))


def test_one_rounding_and_wide_accumulation():
    """256 + 1 + 1 in bf16: added narrow it stays 256; in fp32 with one rounding it is 258."""
    shards = [torch.tensor([x], dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0)]
    assert float(sums.reference(shards, "linear")) == 258.0
    assert float(shards[0] + shards[1] + shards[2]) == 256.0, "the control"


def test_the_orders_differ():
    shards = random_shards(4, 1000, torch.float32)
    assert not torch.equal(sums.reference(shards, "linear"), sums.reference(shards, "tree"))
