"""What may be chosen about the ``det`` backend. Nothing here but ``order`` and ``wide_scalars`` changes a bit."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field, replace

from megatron_det.collectives.order import ORDERS

CHECKS = ("always", "first", "never")


@dataclass(frozen=True)
class Settings:
    """Of one group; the same on all its ranks (compared when the group is first used).

    order         ``tree`` or ``linear``: see ``order``
    wide_scalars  add fp32 tensors of one element in fp64. The element of a longer tensor keeps fp32, so a value then
                  depends on whether it travels alone: off by default
    trip_bytes    bytes that travel in the time that a round trip costs: decides ``small`` (docs/collectives.md)
    chunk_bytes   larger messages are cut here, so that scratch memory is bounded
    node          the name of this rank's node. Sums go node by node where ``order.blocks`` allows it
    node_bytes    from here on sums go node by node
    checks        compare what the ranks ask for, on the host: ``always``; ``first`` 256 calls of a group; ``never``.
                  Empty: ``always`` over gloo, ``first`` over NCCL
    """

    order: str = "tree"
    wide_scalars: bool = False
    trip_bytes: int = 2 << 20
    chunk_bytes: int = 32 << 20
    node: str = field(default_factory=lambda: os.environ.get("MEGATRON_DET_NODE") or socket.gethostname())
    node_bytes: int = 64 << 10
    checks: str = ""

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order={self.order!r}: found none of {', '.join(ORDERS)}")
        if self.checks not in ("", *CHECKS):
            raise ValueError(f"checks={self.checks!r}: found none of {', '.join(CHECKS)}")
        if self.chunk_bytes < 1024:
            raise ValueError(f"chunk_bytes={self.chunk_bytes}: at least 1024 are needed")

    def shared(self) -> str:
        """What must be equal on all ranks of a group."""
        return str(replace(self, node=""))

    def small(self, ranks: int) -> int:
        """Up to so many bytes all ranks send the whole to all, and each adds for itself: one trip instead of two.

        The whole to all moves (N-1) S bytes per rank, pieces 2 (N-1)/N S bytes and one more trip; they cost the same at
        S = trip_bytes * N / ((N-1) (N-2)). For two ranks the volumes are equal. The N shards fit one chunk.
        """
        fits = self.chunk_bytes // ranks
        if ranks <= 2:
            return fits if self.trip_bytes else 0
        return min(fits, self.trip_bytes * ranks // ((ranks - 1) * (ranks - 2)))
