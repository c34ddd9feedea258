"""The distributed optimizer with torch's own Adam (no Transformer Engine, no Apex) can be resumed.

Replaces      ``DistributedOptimizer.state_dict``, ``load_state_dict``, ``load_parameter_state``,
              ``_set_main_param_and_optimizer_states``
Why           megatron-core 0.19.2: a fresh process has no optimizer state yet, and ``state_dict`` (the load template)
              asserts exactly one step value; in fp32 the load copies in place into views of leaves; with
              ``dp_reshardable`` the step of the template (0) overwrites the saved one; all parameters share one
              step tensor, so that each step counts once per parameter.
Reaches       loads and saves in the ``torch`` format and, in ``torch_dist``, of the shardings ``dp_reshardable`` and
              ``fully_reshardable`` (0.19.2 cannot save others), when the inner optimizer is torch's Adam or AdamW
Leaves alone  fused optimizers of TE and Apex, CPU offloading
Drop when     upstream resumes torch's Adam (megatron-core main of 2026-08 does not)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_det.patching.engine import Patch

CLASS = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
WHY = "the distributed optimizer cannot resume torch's Adam in megatron-core 0.19.2"


def is_torch_adam(optimizer: Any) -> bool:
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)


def materialise(optimizer: torch.optim.Optimizer) -> None:
    """The state that the first step would make: step 0 and zero moments, for every parameter that has none."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state.get(parameter):
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }


def _state_dict(original: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
    def state_dict(self: Any) -> Any:
        if is_torch_adam(self.optimizer):
            ran()
            materialise(self.optimizer)
        return original(self)

    return state_dict


def _load_state_dict(original: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        if not is_torch_adam(self.optimizer):
            return original(self, state_dict)
        ran()
        materialise(self.optimizer)
        with torch.no_grad():
            result = original(self, state_dict)
        step = float(state_dict["optimizer"]["param_groups"][0]["step"])
        for state in self.optimizer.state.values():
            state["step"] = torch.tensor(step, dtype=torch.float32)
        for group in self.optimizer.param_groups:
            group.pop("step", None)  # the checkpoint's form of the step; torch's Adam keeps it per parameter
        return result

    return load_state_dict


def _without_grad(original: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
    def load_parameter_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        ran()
        with torch.no_grad():
            return original(self, *args, **kwargs)

    return load_parameter_state


def _set_states(original: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        if is_torch_adam(self.optimizer):
            ran()
            tensors = {**tensors, "step": None}  # the step comes from the parameter groups, never from a template
        with torch.no_grad():
            return original(self, model_param, tensors)

    return set_states


def patches() -> list[Patch]:
    makers = {
        "state_dict": _state_dict,
        "load_state_dict": _load_state_dict,
        "load_parameter_state": _without_grad,
        "_set_main_param_and_optimizer_states": _set_states,
    }
    return [
        Patch(f"distrib-optimizer-{name.strip('_')}", f"{CLASS}.{name}", maker, why=WHY)
        for name, maker in makers.items()
    ]
