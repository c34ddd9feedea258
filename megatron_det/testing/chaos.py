"""Faults injected on purpose, to see that the product catches them: ``--det-chaos SPEC``.

A spec is ``NAME:key=value,key=value``. Common keys: ``iteration`` (Megatron's 1-based), ``rank`` (global).

======================  =============================================================================
name                    what it does, just before the ledger looks (keys beside iteration and rank)
======================  =============================================================================
``flip-bit``            flips one bit of one weight (``param`` part of its name, ``element``, ``bit``)
``skip-rng-restore``    neither Megatron nor we restore any RNG stream from the checkpoint
``drop-moments``        zeroes Adam's moments (the loss of that iteration is unchanged!)
``swap-sample``         replaces one sample of the batch by another of the data set (``by``: distance)
``lr-off``              moves the learning-rate schedule ahead by one global batch
``switch-off``          turns torch's deterministic algorithms off in the middle of the run
======================  =============================================================================

The run's manifest says which fault was injected; it is never compared, always shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from megatron_det.errors import Finding, Refused
from megatron_det.patching.engine import Patch


@dataclass(frozen=True)
class Spec:
    """One parsed fault."""

    name: str
    values: dict[str, str]

    def integer(self, key: str, default: int) -> int:
        return int(self.values.get(key, default))


@dataclass(frozen=True)
class Fault:
    """How a named fault is installed: hooks on the run, patches, or both."""

    name: str
    keys: tuple[str, ...]
    install: Callable[[Spec, Any], list[Patch]]


def refuse(text: str, found: str, needed: str) -> Refused:
    return Refused(
        Finding(
            "DET-CHAOS",
            text,
            found,
            needed,
            "A fault that is not injected as asked would make its test pass for nothing.",
            "See the table in megatron_det/testing/chaos.py.",
        )
    )


def parse(text: str) -> Spec:
    """Reads ``NAME:key=value,…``. Raises: Refused for an unknown name, key or malformed value."""
    name, _, rest = text.partition(":")
    if name not in FAULTS:
        raise refuse("unknown fault", name or "nothing", "one of " + ", ".join(FAULTS))
    values = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals or key not in FAULTS[name].keys:
            raise refuse(f"fault {name}", item, "key=value with a key of " + ", ".join(FAULTS[name].keys))
        if key != "param" and not value.lstrip("-").isdigit():
            raise refuse(f"fault {name}", item, f"a whole number for {key}")
        values[key] = value
    return Spec(name, values)


def install(text: str, run: Any) -> list[Patch]:
    """Installs the fault's hooks on ``run`` when this is its rank; returns the patches it needs."""
    spec = parse(text)
    if "rank" in spec.values and spec.integer("rank", 0) != run.rank:
        return []
    return FAULTS[spec.name].install(spec, run)


def _at(spec: Spec, default: int, action: Callable[[Any, Any, Any], None]) -> Callable[..., None]:
    """Calls ``action(model, optimizer, scheduler)`` before the step of the chosen iteration."""

    def hook(iteration: int, model: Any, optimizer: Any, scheduler: Any) -> None:
        if iteration == spec.integer("iteration", default):
            action(model, optimizer, scheduler)

    return hook


def _flip_bit(spec: Spec, run: Any) -> list[Patch]:
    import torch

    def action(model: Any, optimizer: Any, scheduler: Any) -> None:
        wanted = spec.values.get("param", "")
        for chunk in model:
            for name, parameter in chunk.named_parameters():
                if wanted in name and parameter.is_floating_point():
                    flat = parameter.data.view(-1).view(torch.uint8)
                    flat[spec.integer("element", 0) * parameter.element_size()] ^= 1 << spec.integer("bit", 0)
                    return
        raise refuse("flip-bit", f"no parameter named like {wanted!r} on rank {run.rank}", "a part of a name")

    run.before_step.append(_at(spec, 3, action))
    return []


def _drop_moments(spec: Spec, run: Any) -> list[Patch]:
    def action(model: Any, optimizer: Any, scheduler: Any) -> None:
        dropped = 0
        for one in getattr(optimizer, "chained_optimizers", [optimizer]):
            for state in one.optimizer.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    if key in state:
                        state[key].zero_()
                        dropped += 1
        if not dropped:
            raise refuse("drop-moments", "an optimizer without moments", "an iteration after the first")

    run.before_step.append(_at(spec, 4, action))
    return []


def _lr_off(spec: Spec, run: Any) -> list[Patch]:
    def action(model: Any, optimizer: Any, scheduler: Any) -> None:
        scheduler.step(increment=int(run.manifest["sections"]["args"]["global_batch_size"]))

    run.before_step.append(_at(spec, 4, action))
    return []


def _switch_off(spec: Spec, run: Any) -> list[Patch]:
    import torch

    run.before_step.insert(0, _at(spec, 3, lambda *_: torch.use_deterministic_algorithms(False)))
    return []


def _arguments() -> Any:
    """Megatron's arguments; this room does not import Megatron by itself."""
    return import_module("megatron.training").get_args()


def _skip_rng_restore(spec: Spec, run: Any) -> list[Patch]:
    def make(original: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            ran()
            _arguments().no_load_rng = True
            return original(*args, **kwargs)

        return load_checkpoint

    target = "megatron.training.checkpointing:load_checkpoint"
    return [Patch("chaos-skip-rng-restore", target, make, why="injected fault", stack=True)]


def _swap_sample(spec: Spec, run: Any) -> list[Patch]:
    def make(original: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
        def iterate(sampler: Any) -> Iterator[list[int]]:
            size = sampler.micro_batch_times_data_parallel_size
            start = (spec.integer("iteration", 3) - 1) * _arguments().global_batch_size
            for number, indices in enumerate(original(sampler), start=sampler.consumed_samples // size):
                if number == start // size:
                    ran()
                    indices = [(indices[0] + spec.integer("by", 7)) % sampler.total_samples, *indices[1:]]
                yield indices

        return iterate

    target = "megatron.training.datasets.data_samplers:MegatronPretrainingSampler.__iter__"
    return [Patch("chaos-swap-sample", target, make, why="injected fault", stack=True)]


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("flip-bit", ("iteration", "rank", "param", "element", "bit"), _flip_bit),
        Fault("skip-rng-restore", ("rank",), _skip_rng_restore),
        Fault("drop-moments", ("iteration", "rank"), _drop_moments),
        Fault("swap-sample", ("iteration", "rank", "by"), _swap_sample),
        Fault("lr-off", ("iteration", "rank"), _lr_off),
        Fault("switch-off", ("iteration", "rank"), _switch_off),
    )
}
