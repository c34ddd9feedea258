"""One line in a script, before Megatron is imported: ``import megatron_det.activate  # noqa: F401``.

This is the one module of the package whose import does something, and only when ``--det`` is on the command line:
what PyTorch's entry point does, for places where that is switched off.
"""

import sys

from megatron_det.activation import start

start.begin(sys.argv)
