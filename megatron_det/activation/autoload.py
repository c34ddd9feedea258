"""PyTorch's plug-in entry point (``torch.backends``): called at the end of every ``import torch``.

Without one of our flags it looks at the command line and returns. It never raises: what goes wrong is kept and
becomes a refusal when Megatron parses its arguments, so that ``--det`` can never train un-activated.
"""

from __future__ import annotations

import os
import sys


def autoload() -> None:
    """The hook. Level: none; it changes nothing unless ``--det`` (or MEGATRON_DET=1) asks for it."""
    if os.environ.get("MEGATRON_DET") != "1" and not any(map(looks_like_ours, sys.argv[1:])):
        return
    from megatron_det.activation import start

    start.begin(sys.argv)


def looks_like_ours(word: str) -> bool:
    """``--det`` and ``--det-…``, not Megatron's ``--deterministic-mode``. The exact names are looked at later."""
    return word == "--det" or word.startswith(("--det-", "--det="))
