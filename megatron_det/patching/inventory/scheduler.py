"""Loading the learning-rate schedule twice does not advance it twice.

Replaces      ``OptimizerParamScheduler.load_state_dict``
Why           megatron-core 0.19.2 ends it with ``self.step(increment=num_steps)``, which *adds*
Reaches       every load of a checkpoint
Leaves alone  how the schedule computes rates
Drop when     upstream assigns ``num_steps``
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_det.patching.engine import Patch


def _make(original: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        ran()
        self.num_steps = 0
        return original(self, state_dict)

    return load_state_dict


def patches() -> list[Patch]:
    target = "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.load_state_dict"
    return [Patch("scheduler-load-idempotent", target, _make, why="loading twice doubled the schedule's position")]
