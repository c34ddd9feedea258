"""A small rank: a model with a router and a private generator, torch's Adam with state, a loss scaler, a loader."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from megatron_det.state import receipt
from megatron_det.state.piece import Here

LAYOUT = {"world_size": 2, "tensor": 1}
RANKS = 2


class Router(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(3, 4)
        self.noise = torch.Generator().manual_seed(5)  # a private generator
        self.register_buffer("expert_bias", torch.zeros(4))
        self.register_buffer("local_tokens_per_expert", torch.zeros(4), persistent=False)

    def forward(self, x):
        return self.gate(x)


class Scheduler:
    num_steps = 16


class Loader:
    """An external loader with its own position."""

    def __init__(self):
        self.position = 0

    def state_dict(self):
        return {"position": self.position, "key": (1, 2.5)}

    def load_state_dict(self, state):
        assert state["key"] == (1, 2.5), "a tuple comes back as a tuple"
        self.position = state["position"]


def build(seed: int = 0) -> Here:
    """A rank with everything in it away from its initial value, different for every seed."""
    torch.manual_seed(seed)
    model = Router()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1 / (seed + 1))
    model(torch.ones(1, 3)).square().sum().backward()
    inner.step()
    scaler = DynamicGradScaler(
        initial_scale=64.0, min_scale=1.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=9, hysteresis=2
    )
    for _ in range(seed + 1):
        scaler.update(False)
    model.expert_bias += seed + 0.25
    model.local_tokens_per_expert += seed + 3
    model.noise.manual_seed(100 + seed)
    torch.rand(1, generator=model.noise)
    loader = Loader()
    loader.position = 7 + seed
    scheduler = Scheduler()
    scheduler.num_steps = 16 + seed
    args = SimpleNamespace(
        consumed_train_samples=16 + seed, skipped_train_samples=0, consumed_valid_samples=8, attention_backend="unfused"
    )
    optimizer = SimpleNamespace(optimizer=inner, grad_scaler=scaler)
    metric = torch.tensor(0.5 + seed, device="cuda")
    get_moe_metrics_tracker().record("load_balancing_loss", metric, layer_number=1, num_layers=2)
    machine = get_rerun_state_machine()
    machine.max_values, machine.large_value_counts = {"loss": 3.5 + seed}, {"loss": 4 + seed}
    return Here([model], optimizer, scheduler, args, loader)


def head(rank: int) -> dict:
    return {
        "iteration": 5, "rank": rank, "world_size": RANKS, "layout": LAYOUT, "boundary": receipt.CLEAN,
        "environment": {"threads": {"torch": 1}},
    }  # fmt: skip
