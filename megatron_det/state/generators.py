"""Random generators that somebody keeps for himself: in a module, an optimizer, a data set.

Neither Megatron's checkpoint nor the global streams know of them (``fim_dataset`` of megatron-core keeps one).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
DEPTH = 6  # attributes and containers between the root and the generator
WIDTH = 4096  # longer containers hold data, not generators


def find(root: Any, depth: int = DEPTH, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """(path, generator) of every generator reachable from ``root`` through attributes, lists, tuples and dicts.

    Process-wide generators are left out: they are streams of their own piece. ``seen``: what several calls have looked
    into already (ids; it is filled).
    """
    seen = set() if seen is None else seen
    seen.update(id(one) for one in _global())
    yield from _walk(root, "", depth, seen)


def _global() -> list[Any]:
    hidden = [getattr(random, "_inst", None), getattr(np.random.mtrand, "_rand", None)]
    return [torch.default_generator, *getattr(torch.cuda, "default_generators", ()), *hidden]


def _walk(one: Any, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(one, (str, bytes, int, float, bool, type(None), torch.Tensor, np.ndarray, type)) or id(one) in seen:
        return
    if isinstance(one, KINDS):
        seen.add(id(one))
        yield path or "itself", one
        return
    if depth == 0 or type(one).__module__.startswith(("torch._C", "torch.distributed")):
        return
    seen.add(id(one))
    for name, child in _children(one):
        yield from _walk(child, f"{path}.{name}" if path else name, depth - 1, seen)


def _children(one: Any) -> list[tuple[str, Any]]:
    if isinstance(one, dict):
        return [(str(key), child) for key, child in one.items()] if len(one) <= WIDTH else []
    if isinstance(one, (list, tuple)):
        return [(str(number), child) for number, child in enumerate(one)] if len(one) <= WIDTH else []
    fields = getattr(one, "__dict__", None)
    return list(fields.items()) if isinstance(fields, dict) else []


def get(generator: Any) -> Any:
    """The state of a generator as plain values (see ``state.packing``)."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate()


def put(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)


def seed(generator: Any, number: int) -> None:
    """Starts a generator anew from a 64-bit number."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    elif isinstance(generator, np.random.Generator):
        kind = type(generator.bit_generator)
        generator.bit_generator.state = kind(number).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed([number & 0xFFFFFFFF, number >> 32])
    else:
        generator.seed(number)
