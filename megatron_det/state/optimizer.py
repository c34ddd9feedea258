"""Megatron's optimizers seen as named quantities: main parameters, moments, step, learning rate, weight decay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_det.state.model import parameters

Quantity = tuple[str, str, Any]


def each(optimizer: Any) -> list[Any]:
    """The optimizers inside a chained one, in its order; else the one itself. A stub (nothing to train) gives none."""
    if optimizer is None or getattr(optimizer, "is_stub_optimizer", False):
        return []
    chained = getattr(optimizer, "chained_optimizers", None)
    return list(chained) if chained is not None else [optimizer]


def options(optimizer: Any) -> Iterator[Quantity]:
    """(kind, name, value): the learning rate and weight decay that the coming step uses, per parameter group."""
    number = 0
    for one in each(optimizer):
        for group in one.optimizer.param_groups:
            yield "lr", f"group{number}", float(group["lr"])
            yield "weight_decay", f"group{number}", float(group["weight_decay"])
            if "step" in group:
                yield "group_step", f"group{number}", int(group["step"])
            number += 1
        scaler = getattr(one, "grad_scaler", None)
        if scaler is not None:
            yield "loss_scale", f"optimizer{number}", scaler.scale
            for key, item in sorted(scaler.state_dict().items()):  # when the scale changes next depends on these
                yield "grad_scaler", f"optimizer{number}/{key}", item


def tensors(optimizer: Any, chunks: list[Any]) -> Iterator[Quantity]:
    """(kind, parameter name, tensor): main parameters and the optimizer's state, in the optimizer's own order.

    Shapes: with the distributed optimizer, the shard of this data-parallel rank (flat); else the parameter's.
    A state entry whose parameter has no name in the model is still given, under its position.
    """
    names = {id(parameter): name for name, parameter in parameters(chunks)}
    for number, one in enumerate(each(optimizer)):
        owners = _owners(one, names)
        position = 0
        for group in one.optimizer.param_groups:
            for main in group["params"]:
                name = owners.get(id(main), f"optimizer{number}.parameter{position}")
                position += 1
                if id(main) not in names:
                    yield "main", name, main
                state = one.optimizer.state.get(main, {})
                for key in sorted(state):
                    if isinstance(state[key], (torch.Tensor, int, float)):
                        yield key, name, state[key]


def _owners(one: Any, names: dict[int, str]) -> dict[int, str]:
    """id of a main parameter -> name of the model parameter that it stands for."""
    owners = dict(names)
    for parameter, (group, order) in getattr(one, "model_param_group_index_map", {}).items():
        main = one.optimizer.param_groups[group]["params"][order]
        owners[id(main)] = names.get(id(parameter), f"group{group}.parameter{order}")
    for low, high in zip(
        getattr(one, "float16_groups", []), getattr(one, "fp32_from_float16_groups", []), strict=False
    ):
        for parameter, main in zip(low, high, strict=True):
            owners[id(main)] = names.get(id(parameter), "?")
    return owners
