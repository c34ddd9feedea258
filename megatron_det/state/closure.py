"""Everything the next step depends on, in causal order, as (ledger name, exact value)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_det.kernels.fingerprint import value
from megatron_det.state import model as model_state
from megatron_det.state import optimizer as optimizer_state
from megatron_det.state import rng

Item = tuple[str, dict[str, Any]]


def rng_items() -> Iterator[Item]:
    for name, piece in rng.capture().items():
        yield f"rng/{name}", rng.value(piece)


def option_items(phase: str, optimizer: Any, scheduler: Any) -> Iterator[Item]:
    for kind, name, item in optimizer_state.options(optimizer):
        yield f"{phase}/{kind}/{name}", value(item)
    if scheduler is not None:
        yield f"{phase}/scheduler/num_steps", value(scheduler.num_steps)


def tensor_items(phase: str, chunks: list[Any], optimizer: Any, gathered: bool = True) -> Iterator[Item]:
    """Digests of parameters, buffers, main parameters and the optimizer's state.

    ``gathered`` is False where parameters may be pending: with ``--overlap-param-gather`` they are the old ones until
    the next forward, so only the main parameters say what the step stands on.
    """
    if gathered:
        for name, parameter in model_state.parameters(chunks):
            yield f"{phase}/param/{name}", value(parameter)
    for name, buffer in model_state.buffers(chunks):
        yield f"{phase}/buffer/{name}", value(buffer)
    for kind, name, item in optimizer_state.tensors(optimizer, chunks):
        yield f"{phase}/{kind}/{name}", value(item)
