"""Placement, permute, combine and the parts of an expert: shapes that are hard, bijections, bits, bounds, controls."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from dense_support import bits, gradients, replays
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_det.kernels import expert_linear
from megatron_det.kernels.combine import Combine, gather_sum
from megatron_det.kernels.permute import Permute, PermuteProbs, placement


def routed(tokens: int, experts: int, k: int, seed: int = 1) -> torch.Tensor:
    """Each token to k experts, bool [T, E]."""
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, scores.topk(k).indices, True)


def counts_map(counts: list[int], tokens: int) -> torch.Tensor:
    """Expert e has the first ``counts[e]`` tokens."""
    return torch.arange(tokens).unsqueeze(1) < torch.tensor(counts)


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9)).to(dtype)


def test_the_examples_of_the_docstrings():
    found = placement(torch.tensor([[False, True, True], [True, False, False]]))
    assert found.token.tolist() == [1, 0, 0] and found.rows.tolist() == [[1, 2], [0, -1]]
    x = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    assert gather_sum(x, torch.tensor([[0, 3], [2, -1]])).tolist() == [[9.0], [4.0]]


HARD = {
    "k = 1": routed(33, 4, 1),
    "k = 2": routed(33, 4, 2),
    "k = E": routed(9, 4, 4),
    "one expert takes everything": counts_map([0, 50, 0], 50),
    "0, 1, 127, 128, 129 tokens": counts_map([0, 1, 127, 128, 129], 130),
    "no tokens at all": torch.zeros(0, 3, dtype=torch.bool),
    "tokens without an expert": counts_map([0, 0], 5),
    "uneven": torch.rand(40, 6, generator=torch.Generator().manual_seed(2)) < 0.3,
}


@pytest.mark.parametrize("name", HARD)
def test_placement_is_a_bijection_of_the_routing(name):
    """Expert by expert and token by token, as a plain loop gives it."""
    routing = HARD[name]
    found = placement(routing)
    wanted = [(e, t) for e in range(routing.shape[1]) for t in range(routing.shape[0]) if routing[t, e]]
    assert found.token.tolist() == [t for _, t in wanted]
    assert found.source.tolist() == [t * routing.shape[1] + e for e, t in wanted]
    place = torch.full(routing.shape, -1)
    for number, (e, t) in enumerate(wanted):
        place[t, e] = number
    assert torch.equal(found.place, place)
    for t in range(routing.shape[0]):
        mine = [row for row in found.rows[t].tolist() if row >= 0]
        assert mine == [row for row in place[t].tolist() if row >= 0]


def test_capacity_pads_every_expert():
    routing = counts_map([0, 1, 3], 4)
    found = placement(routing, capacity=3)
    assert found.token.tolist() == [-1, -1, -1, 0, -1, -1, 0, 1, 2]
    assert found.rows.tolist() == [[3, 6], [7, -1], [8, -1], [-1, -1]]
    rows = Permute.apply(noise(4, 5), found.token, found.rows)
    assert not rows[:3].any() and not rows[4:6].any() and rows[3].any()
    with pytest.raises(ValueError, match="3 tokens, more than its capacity of 2"):
        placement(routing, capacity=2)


def test_a_map_that_is_not_a_set_is_refused():
    """A token to the same expert twice: a map of counts could say so, one of bool cannot."""
    twice = torch.tensor([[2, 0], [1, 1]])
    with pytest.raises(ValueError, match="bool"):
        placement(twice)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", HARD)
def test_there_and_back(name, dtype):
    """Rows move without a change; the sum and both gradients are the loop's, addition by addition."""
    routing = HARD[name]
    tokens, found = routing.shape[0], placement(routing)
    x = noise(tokens, 6, dtype=dtype).requires_grad_()
    rows = Permute.apply(x, found.token, found.rows)
    assert bits(rows) == bits(x[found.token])
    y = noise(len(found.token), 6, dtype=dtype).requires_grad_()
    out = Combine.apply(y, found.token, found.rows)
    wide = torch.promote_types(dtype, torch.float32)
    wanted = torch.zeros(tokens, 6, dtype=wide)
    for t in range(tokens):
        for row in found.rows[t].tolist():
            if row >= 0:
                wanted[t] += y.detach()[row].to(wide)
    assert bits(out) == bits(wanted.to(dtype))
    g = noise(len(found.token), 6, dtype=dtype)
    rows.backward(g)
    assert bits(x.grad) == bits(gather_sum(g, found.rows))
    h = noise(tokens, 6, dtype=dtype)
    out.backward(h)
    assert bits(y.grad) == bits(h[found.token])


def test_probabilities_go_and_come_back():
    routing = HARD["uneven"]
    found = placement(routing)
    probs = torch.rand(routing.shape, generator=torch.Generator().manual_seed(4)).requires_grad_()
    rows = PermuteProbs.apply(probs, found.source, found.place)
    assert bits(rows) == bits(probs.T[routing.T])
    g = noise(len(rows))
    rows.backward(g)
    wanted = torch.zeros_like(probs).T.contiguous()
    wanted[routing.T] = g
    assert bits(probs.grad) == bits(wanted.T)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 20), st.integers(1, 6), st.integers(0, 1000), st.integers(0, 3))
def test_a_tokens_sum_does_not_depend_on_the_others(tokens, experts, seed, extra):
    """Other tokens, before and after, move its rows; its value keeps its bits."""
    generator = torch.Generator().manual_seed(seed)
    routing = torch.rand(tokens, experts, generator=generator) < 0.5
    made = torch.randn(tokens, experts, 3, generator=generator)
    more = torch.cat([torch.ones(extra, experts, dtype=torch.bool), routing])
    made_more = torch.cat([torch.ones(extra, experts, 3), made])

    def combined(routing, made):
        found = placement(routing)
        return gather_sum(made.view(-1, 3)[found.source], found.rows)

    assert bits(combined(more, made_more)[extra:]) == bits(combined(routing, made))


def test_close_to_fp64_and_a_sum_in_bf16_is_not():
    """At most (k - 1) roundings in fp32 and one to bf16. Control: a rounding at each addition."""
    routing = routed(200, 8, 6)
    found = placement(routing)
    y = noise(len(found.token), 16, dtype=torch.bfloat16)
    exact, size = gather_sum(y.double(), found.rows), gather_sum(y.double().abs(), found.rows)
    bound = 5 * 2**-24 * size + 2**-8 * exact.abs()
    assert bool(((gather_sum(y, found.rows).double() - exact).abs() <= bound).all())
    rounded = torch.zeros(200, 16, dtype=torch.bfloat16)
    for row, token in enumerate(found.token.tolist()):
        rounded[token] += y[row]
    assert not bool(((rounded.double() - exact).abs() <= bound).all())


def test_fifty_replays_with_and_without_recompute():
    found = placement(HARD["0, 1, 127, 128, 129 tokens"])

    def forward(x, probs):
        rows = Permute.apply(x, found.token, found.rows)
        scaled = expert_linear.scaled(rows, PermuteProbs.apply(probs, found.source, found.place))
        return Combine.apply(scaled, found.token, found.rows)

    x, probs = noise(130, 24, dtype=torch.bfloat16), torch.rand(130, 5, generator=torch.Generator().manual_seed(6))
    seen = replays(lambda: bits(*gradients(forward, x, probs)))
    seen.add(bits(*gradients(forward, x, probs, recompute=True)))
    assert len(seen) == 1


COUNTS = [0, 1, 127, 128, 129]


def with_gradients(run, leaves, g):
    fresh = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    out = run(*fresh)
    return out.detach(), *torch.autograd.grad(out, fresh, g)


def test_expert_parts_against_autograd_and_fp64():
    """Matmuls as a loop has them, to the bit; biases and probabilities within the bound of their sums."""
    total = sum(COUNTS)
    weights = [noise(7, 12) + number for number in range(len(COUNTS))]
    each = [noise(7) * (number + 1) for number in range(len(COUNTS))]
    x, probs = noise(total, 12), torch.rand(total, generator=torch.Generator().manual_seed(3))

    def ours(x, probs, *rest):
        out = expert_linear.linear(x, COUNTS, rest[:5]) + expert_linear.biases(COUNTS, rest[5:])
        return expert_linear.scaled(out, probs)

    def theirs(x, probs, *rest):
        parts = [F.linear(rows, w, b) for rows, w, b in zip(torch.split(x, COUNTS), rest[:5], rest[5:], strict=True)]
        return torch.cat(parts) * probs.unsqueeze(1)

    leaves, g = (x, probs, *weights, *each), noise(total, 7)
    mine = with_gradients(ours, leaves, g)
    exact = with_gradients(theirs, [leaf.double() for leaf in leaves], g.double())
    size = with_gradients(
        theirs, [leaf.double().abs() for leaf in leaves], g.double().abs()
    )  # multilinear: sum |terms|
    for got, wanted, terms in zip(mine, exact, size, strict=True):
        assert bool(((got.double() - wanted).abs() <= 150 * 2**-24 * terms).all()), "129 rows, 12 columns, scaling"
    assert all(not got.any() for got in (mine[3], mine[8])), "an expert without rows gets zeros"


def test_expert_parts_replay():
    weights = [noise(7, 12) + number for number in range(len(COUNTS))]
    x, probs = noise(sum(COUNTS), 12), torch.rand(sum(COUNTS), generator=torch.Generator().manual_seed(3))

    def run(x, probs, *rest):
        return expert_linear.scaled(expert_linear.linear(x, COUNTS, rest), probs)

    seen = replays(lambda: bits(*gradients(run, x, probs, *weights)))
    seen.add(bits(*gradients(run, x, probs, *weights, recompute=True)))
    assert len(seen) == 1
