"""Bitwise reproducible and bitwise resumable pretraining with NVIDIA Megatron Core.

Importing this package, or any module of it, changes nothing. What a run changes is decided by
``megatron_det.activation`` and only when ``--det`` is on the command line.
"""

__version__ = "0.1.0"
