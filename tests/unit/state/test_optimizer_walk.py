"""Optimizers as named quantities: what the next step depends on has a name and its exact value."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer.grad_scaler import DynamicGradScaler

from megatron_det import devices
from megatron_det.state import closure, optimizer


@pytest.fixture
def scaler():
    standin = None if torch.cuda.is_available() else devices.install()
    yield DynamicGradScaler(
        initial_scale=64.0, min_scale=1.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=3, hysteresis=2
    )
    if standin is not None:
        standin.undo()


def items(scaler):
    group = {"params": [], "lr": 0.1, "weight_decay": 0.0}
    one = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[group], state={}), grad_scaler=scaler)
    return dict(closure.option_items("state", one, None))


def test_a_loss_scale_about_to_grow_is_another_state(scaler):
    """The scale itself is still equal; the run would differ two steps later."""
    before = items(scaler)
    scaler.update(False)
    after = items(scaler)
    assert [name for name in before if before[name] != after[name]] == ["state/grad_scaler/optimizer1/growth_tracker"]
    scaler.update(True)
    assert (
        items(scaler)["state/grad_scaler/optimizer1/hysteresis_tracker"]
        != before["state/grad_scaler/optimizer1/hysteresis_tracker"]
    )


def test_a_mixed_precision_optimizer_is_named_by_the_model():
    model = torch.nn.Linear(3, 2).bfloat16()
    mains = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    inner = torch.optim.AdamW(mains, lr=0.1)
    for main in mains:
        main.grad = torch.ones_like(main)
    inner.step()
    one = SimpleNamespace(optimizer=inner, float16_groups=[list(model.parameters())], fp32_from_float16_groups=[mains])
    found = [(kind, name) for kind, name, _ in optimizer.tensors(one, [model])]
    kinds = ("main", "exp_avg", "exp_avg_sq", "step")
    assert found == [(kind, name) for name in ("weight", "bias") for kind in kinds]
    chained = SimpleNamespace(chained_optimizers=[one])
    assert [(k, n) for k, n, _ in optimizer.tensors(chained, [model])] == found


def test_a_stub_and_no_optimizer_have_nothing():
    assert list(optimizer.tensors(SimpleNamespace(is_stub_optimizer=True), [])) == []
    assert list(optimizer.tensors(None, [])) == []
