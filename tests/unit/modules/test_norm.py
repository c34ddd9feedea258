"""DetNorm: same bits under disturbance and on any number of threads, close to fp64, what Megatron's specs ask for."""

from __future__ import annotations

import math

import pytest
import torch
from dense_support import bits, config, gradients, replays, threads
from hypothesis import given
from hypothesis import strategies as st

from megatron_det.errors import Refused
from megatron_det.kernels.tree import BLOCK, first_dim, last_dim, pairs
from megatron_det.modules.norm import DetNorm, take_over_norm

KINDS = ["RMSNorm", "LayerNorm"]
U = 2.0**-24


def norm(kind: str, width: int, dtype: torch.dtype = torch.float32, **more) -> DetNorm:
    made = DetNorm(config(normalization=kind, **more), width, 1e-5)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.2)
    return made.to(dtype)


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * 3 + 0.5).to(dtype)


def all_bits(module: DetNorm, x: torch.Tensor, recompute: bool = False) -> bytes:
    module.zero_grad()
    out, dx = gradients(module, x, recompute=recompute)
    return bits(out, dx, *(p.grad for p in module.parameters()))


def test_the_example_of_the_tree():
    assert last_dim(torch.tensor([1.0, 2, 3, 4, 5])).item() == 15.0
    big = torch.tensor(
        [2.0**24, 1.0, 1.0, 0, 0]
    )  # p = 8: item 0 takes item 4, then 2, then 1: 1 + 1 is never added first
    assert last_dim(big).item() == 2.0**24
    assert pairs(torch.tensor([1.0, 1.0, 2.0**24])).item() == 2.0**24 + 2, "neighbours first"


@given(n=st.integers(0, 300), seed=st.integers(0, 5))
def test_sums_are_the_sum_and_continue_over_shares(n, seed):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))
    before = x.clone()
    exact = x.double().sum(0)
    bound = (math.ceil(math.log2(max(n, 2))) + 1) * U * x.double().abs().sum(0) + 1e-30
    assert ((first_dim(x).double() - exact).abs() <= bound).all()
    assert ((last_dim(x.t().contiguous()).squeeze(1).double() - exact).abs() <= bound).all()
    assert bits(x) == bits(before)
    both = rows(4 * BLOCK, 3)
    shares = torch.stack([first_dim(both[: 2 * BLOCK]), first_dim(both[2 * BLOCK :])])
    assert bits(pairs(shares)) == bits(first_dim(both))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fifty_replays_with_and_without_recompute(kind, dtype):
    module, x = norm(kind, 96, dtype), rows(70, 2, 96, dtype=dtype)
    seen = replays(lambda: all_bits(module, x))
    assert len(seen) == 1
    assert {all_bits(module, x, recompute=True)} == seen
    with threads(1):
        assert {all_bits(module, x)} == seen


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_others(kind):
    module, x = norm(kind, 40), rows(9, 40)
    assert bits(module(x)[3]) == bits(module(x[3:4])[0]) == bits(module(x[3].clone()))


def test_torchs_norm_follows_the_threads_and_ours_does_not():
    """The control: what Megatron's local spec builds, with the same weights."""
    ours = norm("LayerNorm", 128)
    theirs = torch.nn.LayerNorm(128, eps=1e-5)
    theirs.load_state_dict(ours.state_dict())
    x = rows(512, 2, 128)
    by_threads = []
    for count in (1, 2):
        with threads(count):
            by_threads.append((all_bits(theirs, x), all_bits(ours, x)))
    (theirs_1, ours_1), (theirs_2, ours_2) = by_threads
    assert theirs_1 != theirs_2
    assert ours_1 == ours_2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("centre", [False, True])
def test_close_to_fp64(kind, centre):
    """Forward: the statistics' tree, division, root, and four more roundings on the way; relative to what is added."""
    width = 200
    module, x = norm(kind, width, layernorm_zero_centered_gamma=centre), rows(70, width)
    module.zero_grad()
    y, dx = gradients(module, x)
    wide = x.double().requires_grad_()
    gamma = (module.weight.detach().double() + (1.0 if centre else 0.0)).requires_grad_()
    mean = wide.mean(-1, keepdim=True) if kind == "LayerNorm" else torch.zeros(70, 1, dtype=torch.float64)
    hat = (wide - mean) / ((wide - mean).square().mean(-1, keepdim=True) + 1e-5).sqrt()
    beta = module.bias.detach().double() if module.bias is not None else torch.zeros(width, dtype=torch.float64)
    exact = hat * gamma + beta
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).double()
    exact.backward(grad)
    steps = math.ceil(math.log2(width)) + 10
    scale = (hat.abs() + mean.abs() / wide.std(-1, keepdim=True)) * gamma.abs() + beta.abs()
    assert ((y.double() - exact).abs() <= steps * U * scale).all()
    largest = grad.abs().max() * gamma.abs().max() / wide.std(-1, keepdim=True)
    assert ((dx.double() - wide.grad).abs() <= 4 * steps * U * largest * (1 + hat.abs() * hat.abs().max())).all()
    paths = math.ceil(math.log2(70)) + 2 * steps
    assert ((module.weight.grad.double() - gamma.grad).abs() <= paths * U * (grad * (hat.abs() + 1)).abs().sum(0)).all()
    if module.bias is not None:
        assert ((module.bias.grad.double() - grad.sum(0)).abs() <= paths * U * grad.abs().sum(0)).all()


def test_what_megatron_asks_for():
    made = norm("LayerNorm", 8, sequence_parallel=True, tensor_model_parallel_size=2)
    assert all(p.sequence_parallel for p in made.parameters())
    assert not norm("RMSNorm", 8).weight.sequence_parallel
    zero = DetNorm(config(normalization="RMSNorm", layernorm_zero_centered_gamma=True), 8)
    x = rows(5, 8)
    assert bits(zero(x)) == bits(DetNorm(config(normalization="RMSNorm"), 8)(x)), "gamma 0 around zero is gamma 1"
    assert zero.runs == {"rms": 1}
    assert set(dict(made.named_parameters())) == {"weight", "bias"}
    nothing = rows(0, 8).requires_grad_()
    zero(nothing).sum().backward()
    assert nothing.grad.shape == (0, 8) and bits(zero.weight.grad) == bits(torch.zeros(8)), "a rank without tokens"
    with pytest.raises(Refused, match="DET-NORM"):
        DetNorm(config(normalization="L2Norm"), 8)


def test_megatrons_local_norm_cannot_do_it():
    """The control: sequence parallel, and gamma around zero."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    for more in ({"sequence_parallel": True, "tensor_model_parallel_size": 2}, {"layernorm_zero_centered_gamma": True}):
        with pytest.raises(AssertionError, match="not supported"):
            WrappedTorchNorm(config(**more), 8)
        DetNorm(config(**more), 8)


@pytest.mark.parametrize("kind", KINDS)
def test_taking_over_torchs_norm_keeps_its_weights(kind):
    theirs = getattr(torch.nn, kind)(16, eps=1e-4)
    weight = theirs.weight
    assert take_over_norm(theirs, config(normalization=kind))
    assert isinstance(theirs, DetNorm) and theirs.weight is weight and theirs.eps == 1e-4
    theirs(rows(3, 16)).sum().backward()
    assert weight.grad is not None and theirs.runs
    assert not take_over_norm(torch.nn.Linear(2, 2), config())
