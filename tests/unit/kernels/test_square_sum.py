"""The sum of squares: the same bits however the elements are cut and ordered, and right."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_det.kernels import square_sum as sq

CPU = torch.device("cpu")


def norm_bits(tensors):
    return sq.square_sum(tensors, CPU).view(torch.int64).item()


def values(seed, size, spread):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator) * 10.0 ** torch.randint(
        -spread, spread + 1, (size,), generator=generator
    )


@given(st.integers(0, 999), st.integers(1, 400), st.integers(0, 9), st.lists(st.integers(0, 400), max_size=5))
def test_cuts_and_order_do_not_matter(seed, size, spread, cuts):
    x = values(seed, size, spread)
    borders = sorted({0, size, *(cut for cut in cuts if cut < size)})
    parts = [x[low:high] for low, high in pairwise(borders)]
    assert norm_bits([x]) == norm_bits(parts[::-1]) == norm_bits([x.flip(0)])


@given(st.integers(0, 999), st.integers(1, 400), st.integers(0, 9))
def test_right_within_the_bound(seed, size, spread):
    x = values(seed, size, spread)
    got, exact = sq.square_sum([x], CPU).item(), sq.reference(x.double().tolist())
    assert abs(got - exact) <= size * 2.0**-66 * 4 * x.abs().max().double().item() ** 2 + 2.0**-51 * exact


def test_stock_norm_follows_the_cuts():
    """The control: added in fp32, shard by shard, the same gradients give another norm."""
    x = values(1, 4000, 3)

    def stock(parts):
        return sum((part.norm() ** 2 for part in parts), torch.zeros(())).view(torch.int32).item()

    assert len({stock(x.split(size)) for size in (4000, 700, 333, 100)}) > 1
    assert len({norm_bits(list(x.split(size))) for size in (4000, 700, 333, 100)}) == 1


def test_worked_example_and_edges():
    assert sq.square_sum([torch.tensor([3.0, 4.0])], CPU).item() == 25.0
    assert sq.square_sum([], CPU).item() == 0.0
    assert sq.square_sum([torch.zeros(3), torch.empty(0)], CPU).item() == 0.0
    assert sq.square_sum([torch.tensor([1e-30, 2e-38])], CPU).item() == pytest.approx(1e-60, rel=1e-6)
    assert math.isinf(sq.square_sum([torch.tensor([1.0, -float("inf")])], CPU).item())
    assert math.isnan(sq.square_sum([torch.tensor([float("nan"), float("inf")])], CPU).item())
    assert sq.square_sum([torch.tensor([3.0], dtype=torch.bfloat16)], CPU).item() == 9.0
