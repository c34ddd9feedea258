"""Our flags in Megatron's parser, and the moment at which a run is refused or activated.

Replaces ``add_megatron_arguments`` and ``validate_args`` of ``megatron.training.arguments`` when that module is
imported: every script reaches both through the module's globals, whatever its own argument providers are.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from megatron_det.activation import flags
from megatron_det.activation.start import Activation
from megatron_det.patching.engine import Patch, apply_when_imported

STRAY_PERCENT = re.compile(r"%(?![(%])(?<!%%)")
MODULE = "megatron.training.arguments"


def hook(activation: Activation) -> None:
    """Registers both replacements; nothing of Megatron is imported by it."""
    why = "the flags of --det, and the preflight before anything is built"
    apply_when_imported(
        [
            Patch("parser-flags", f"{MODULE}:add_megatron_arguments", _add, why),
            Patch("parser-validate", f"{MODULE}:validate_args", _validate(activation), why),
        ]
    )


def _add(original: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
    def add_megatron_arguments(parser: Any) -> Any:
        ran()
        return readable_help(flags.add(original(parser)))

    return add_megatron_arguments


def readable_help(parser: Any) -> Any:
    """Doubles stray percent signs in help texts: megatron-core 0.19.2 has one, and its own ``--help`` fails on it."""
    for action in parser._actions:
        if action.help and action.help is not argparse.SUPPRESS:
            action.help = STRAY_PERCENT.sub("%%", action.help)
    return parser


def _validate(activation: Activation) -> Callable[..., Any]:
    def make(original: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
        def validate_args(args: Any, defaults: Any = None) -> Any:
            ran()
            from megatron_det.activation import apply

            return apply.validate(activation, original, args, defaults if defaults is not None else {})

        return validate_args

    return make
