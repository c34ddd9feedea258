"""Fixed-order collectives: sums that depend on nothing but the logical ranks.

``register()`` makes the backend ``det`` known to torch.distributed; importing this changes nothing.
"""

from megatron_det.collectives.backend import NAME, DetProcessGroup, register
from megatron_det.collectives.settings import Settings

__all__ = ["NAME", "DetProcessGroup", "Settings", "register"]
