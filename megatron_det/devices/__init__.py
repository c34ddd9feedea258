"""CPU stand-in: Megatron's real, unmodified training loop on CPU over gloo, where no GPU is there.

What it proves: everything above the kernels (data, RNG, optimizer, checkpoints, collectives' call order).
What it cannot prove: anything about GPU kernels. The manifest says ``cpu-standin``.
"""

from megatron_det.devices.cpu import describe, install, installed

__all__ = ["describe", "install", "installed"]
