"""Installs and removes the CPU stand-in."""

from __future__ import annotations

from typing import Any

import torch

from megatron_det.devices.mode import StandInMode
from megatron_det.devices.streams import Streams
from megatron_det.devices.table import TABLE, patches
from megatron_det.errors import Finding, Refused
from megatron_det.patching.engine import Applied, apply_when_imported


class StandIn:
    """An installed stand-in. ``undo`` takes everything back."""

    def __init__(self) -> None:
        self.streams = Streams()
        self.applied = Applied()
        self.mode = StandInMode(self.streams)
        self.streams.mode = self.mode

    def start(self) -> None:
        apply_when_imported(patches(self.streams), self.applied)
        self.mode.__enter__()

    def undo(self) -> None:
        global _current
        self.applied.undo()  # refused while a run's patches lie on top: then nothing is undone
        self.mode.__exit__(None, None, None)
        _current = None


_current: StandIn | None = None


def install(force: bool = False) -> StandIn:
    """Redirects CUDA to CPU for this process. Call it right after ``import torch``, before Megatron is imported.

    ``force``: the user asked for it by name although a GPU is visible.
    Raises: Refused when a GPU is visible and it was not asked for, or when it is installed already.
    """
    global _current
    if _current is not None:
        raise Refused(
            Finding(
                "DET-STANDIN-TWICE", "CPU stand-in", "installed already", "one installation",
                "Two would undo each other.", "call undo() of the first, or use installed().",
            )
        )  # fmt: skip
    if not force and torch.cuda.is_available():
        raise Refused(
            Finding(
                "DET-STANDIN-GPU", "CPU stand-in", f"a GPU ({torch.cuda.get_device_name(0)})", "no GPU",
                "Nobody should train on CPU by surprise.", "ask for it: --det-device cpu.",
            )
        )  # fmt: skip
    stand_in = StandIn()
    stand_in.start()
    _current = stand_in
    return stand_in


def installed() -> bool:
    return _current is not None


def describe() -> dict[str, Any]:
    """For the manifest: what a verdict must say of the device."""
    return {"device": "cpu-standin", "redirects": len(TABLE), "backend": "gloo"}
