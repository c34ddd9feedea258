"""The early half of an activation, right after ``import torch``: environment, CPU stand-in, hook on the parser."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_det.activation import environment, flags
from megatron_det.contract.options import Options
from megatron_det.errors import Finding

LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


class Activation:
    """What this process found out before Megatron was imported."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.late: list[str] = []
        self.problems: list[Finding] = []


_current: Activation | None = None


def current() -> Activation | None:
    return _current


def is_launcher(orig_argv: Sequence[str], argv0: str) -> bool:
    """Whether this process only starts the workers (torchrun): its command line holds the script's flags too."""
    module = orig_argv[orig_argv.index("-m") + 1] if "-m" in orig_argv[:-1] else ""
    return Path(argv0).name in LAUNCHERS or module in LAUNCHERS


def is_test_run(argv0: str) -> bool:
    return Path(argv0).name in ("pytest", "py.test") or "pytest" in Path(argv0).parts


def begin(argv: Sequence[str]) -> None:
    """Called by the autoload hook, the launcher and the one-line import. Does its work once; never raises."""
    global _current
    given = flags.present(argv[1:])
    if _current is not None or (not given and os.environ.get("MEGATRON_DET") != "1"):
        return
    options = flags.early(argv[1:])
    stand_in = options.device == "cpu"
    if is_launcher(sys.orig_argv, argv[0]):
        environment.prepare(os.environ, stand_in)
        return
    _current = Activation(options)
    try:
        _begin(_current, stand_in, argv[0])
    except Exception as error:  # noqa: BLE001  kept, and refused at the parser: `import torch` must not break
        _current.problems.append(
            Finding(
                "DET-START", "activation", f"{type(error).__name__}: {error}", "an activation without errors",
                "Training un-activated would break the promise of --det.", "report this; or train without --det.",
            )
        )  # fmt: skip


def _begin(activation: Activation, stand_in: bool, argv0: str) -> None:
    from megatron_det.activation import parser

    parser.hook(activation)
    if not activation.options.det:
        return
    activation.late = environment.prepare(os.environ, stand_in)
    if activation.late and not is_test_run(argv0):
        environment.start_again(os.environ)
    if activation.options.placement is not None:
        activation.problems += environment.place(os.environ, activation.options.placement)
    if stand_in:
        from megatron_det import devices

        devices.install(force=True)
