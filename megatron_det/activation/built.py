"""Looks at the model that was really built, just before the first forward: evidence, not configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron_det.errors import Finding, GuaranteeBroken
from megatron_det.patching.engine import Applied
from megatron_det.preflight import probes

MUST_RUN_BEFORE_TRAINING = ("pretrain", "train-step")


def check(applied: Applied, args: Any) -> Callable[..., None]:
    """A hook for before the first forward. Raises: GuaranteeBroken with the first thing that is not as planned."""

    def hook(iteration: int, model: list[Any], optimizer: Any, scheduler: Any) -> None:
        for finding in (*switch_in_modules(model), *replaced_backends(model, args), *idle(applied), *probes.run()):
            raise GuaranteeBroken(finding)

    return hook


def switch_in_modules(model: list[Any]) -> Iterator[Finding]:
    """``config.deterministic_mode``, which modules copy in their constructors, against torch's own switch."""
    seen = 0
    for chunk in model:
        for name, module in chunk.named_modules():
            config = getattr(module, "config", None)
            if config is None or not hasattr(config, "deterministic_mode"):
                continue
            seen += 1
            copied = getattr(module, "deterministic_mode", True)
            if not (config.deterministic_mode and copied):
                yield Finding(
                    "DET-BUILT-SWITCH", f"module {name}", "deterministic_mode off", "on in every module",
                    "One switch alone gave other gradients in about half of the trials.",
                    "build the model after the arguments are parsed, from the same config.",
                )  # fmt: skip
    if not seen:
        yield Finding(
            "DET-BUILT-SWITCH", "model", "no module with a config", "Megatron modules",
            "Nothing could be checked.", "report this model.",
        )  # fmt: skip


def replaced_backends(model: list[Any], args: Any) -> Iterator[Finding]:
    """``transformer_impl`` as asked: a backend that is not there must not be replaced silently."""
    modules = [type(module).__module__ for chunk in model for module in chunk.modules()]
    engine = any("transformer_engine" in name for name in modules)
    if (args.transformer_impl == "transformer_engine") != engine:
        found = "Transformer Engine layers" if engine else "no Transformer Engine layer"
        yield Finding(
            "DET-BUILT-BACKEND", "--transformer-impl " + args.transformer_impl, found, "the backend that was asked for",
            "Another backend has other kernels.", "name the backend that is installed.",
        )  # fmt: skip


def idle(applied: Applied) -> Iterator[Finding]:
    counts = applied.counts()
    for patch in MUST_RUN_BEFORE_TRAINING:
        if not counts.get(patch):
            yield Finding(
                "DET-PATCH-IDLE", f"patch {patch}", "it never ran", "at least one call",
                "A replacement that does not run promises nothing.", "call Megatron's own pretrain().",
            )  # fmt: skip
