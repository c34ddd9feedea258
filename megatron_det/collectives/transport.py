"""Moving bytes between the ranks of one group: one exchange of pieces with any peers, over gloo or NCCL.

Everything that the plans need is an exchange: what I send to whom, what I receive from whom, straight from and into
the tensors. Nothing is added here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_det.collectives.header import INLINE, SIZE, TEXT, Header, Signature, disagreement, lost, pack
from megatron_det.errors import Finding, Refused

Piece = tuple[int, torch.Tensor]  # (peer, flat contiguous tensor)
TAG_BASE = 1 << 30  # tags from here on are ours; users' send and recv keep theirs below
TAGS = 1 << 24
FIRST = 256


@dataclass
class Pending:
    """An exchange on its way. The tensors are held: the vendor reads and writes them."""

    wire: Wire
    receives: list[tuple[int, Any]] = field(default_factory=list)
    sends: list[tuple[int, Any]] = field(default_factory=list)
    held: list[torch.Tensor] = field(default_factory=list)

    def arrive(self) -> None:
        """Returns when everything was received; what is sent may still be read.

        Raises: CollectiveError that names the peer that did not answer.
        """
        self.receives = self._wait(self.receives)

    def wait(self) -> None:
        """Returns when everything was received and sent. Raises: as ``arrive``."""
        self.arrive()
        self.sends = self._wait(self.sends)

    def _wait(self, works: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
        for peer, work in works:
            try:
                work.wait()
            except RuntimeError as cause:
                self.wire.bury(self)
                raise self.wire.fail(cause, peer) from cause
        return []


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat contiguous tensor as bytes: any dtype can be moved."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor).view(-1)
    return tensor if tensor.dtype is torch.uint8 else tensor.view(torch.uint8)


class Wire:
    """Of one group. ``members[r]`` is the global rank of logical rank r; ``name`` is c10d's name of the group."""

    def __init__(self, vendor: Any, me: int, members: list[int], checks: str) -> None:
        self.vendor, self.me, self.members, self.checks = vendor, me, members, checks
        self.name = "?"
        self.calls = 0
        self._tag = 0
        self._broken: BaseException | None = None
        self._graveyard: list[Pending] = []
        self.signature = Signature("nothing", "")

    @property
    def ranks(self) -> int:
        return len(self.members)

    @property
    def others(self) -> list[int]:
        return [(self.me + step) % self.ranks for step in range(1, self.ranks)]

    # -- one call -----------------------------------------------------------------------------------------------------

    def begin(self, signature: Signature, sends: dict[int, int] | None = None, wants: dict[int, int] | None = None,
              payload: dict[int, bytes] | None = None, size: int = 0) -> dict[int, bytes]:  # fmt: skip
        """Starts a call: compares it with what the others are about to do. Returns their payloads, by rank.

        ``sends`` and ``wants``: bytes per peer, where they may differ from rank to rank. ``payload``: what rides to
        each peer in its header; ``size``: the bytes that ride in each header to this rank.
        Raises: CollectiveError when they disagree, or one does not answer.
        """
        if self._broken is not None:
            raise self._broken
        self.signature = signature
        self.calls += 1
        if not self.checked(self.calls):
            return {}
        return self.header(signature, sends or {}, wants or {}, payload or {}, size)

    def header(
        self, signature: Signature, sends: dict[int, int], wants: dict[int, int], payload: dict[int, bytes], size: int
    ) -> dict[int, bytes]:
        """One round: everybody's header to everybody."""
        arrived = {r: torch.empty(SIZE, dtype=torch.uint8) for r in self.others}
        packed = {r: pack(signature, sends.get(r, 0), payload.get(r, b"")) for r in arrived}
        heads = [(r, torch.frombuffer(head, dtype=torch.uint8)) for r, head in packed.items()]
        self.header_exchange(heads, list(arrived.items())).wait()
        raw = {r: bytes(head.numpy()) for r, head in arrived.items()}
        error = disagreement(
            self.name, self.members, self.me, signature, {r: Header.read(head) for r, head in raw.items()}, wants
        )
        if error is not None:
            self._broken = error
            raise error
        return {r: head[16 + TEXT : 16 + TEXT + size] for r, head in raw.items()}

    def checked(self, call: int) -> bool:
        return self.checks == "always" or (self.checks == "first" and call <= FIRST)

    def inline(self, tensor: torch.Tensor, size: int) -> bool:
        """Whether pieces of at most so many bytes ride in the header of the coming call. Host memory only."""
        return size <= INLINE and not tensor.is_cuda and self.ranks > 1 and self.checked(self.calls + 1)

    def fail(self, cause: RuntimeError, peer: int | None = None) -> BaseException:
        """The vendor failed: the error to raise, and what every later call gets."""
        self._broken = lost(self.name, self.members, self.me, peer, self.signature, str(cause))
        return self._broken

    def spoil(self, cause: BaseException) -> None:
        """A call ended here after it had begun: this rank and the others are no longer in step."""
        if self._broken is None:
            self._broken = cause

    def bury(self, pending: Pending) -> None:
        """Keeps the tensors of an exchange that failed half-way: the vendor may still write to them."""
        self._graveyard.append(pending)

    def next_tag(self) -> int:
        self._tag = (self._tag + 1) % TAGS
        return TAG_BASE + self._tag

    def meet(self) -> None:
        """Returns when all ranks have called it: a barrier. Raises: CollectiveError naming who did not come."""
        if self._broken is not None:
            raise self._broken
        self.signature = Signature("barrier", "")
        self.calls += 1
        self.header(self.signature, {}, {}, {}, 0)

    # -- moving -------------------------------------------------------------------------------------------------------

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> Pending:
        raise NotImplementedError

    def header_exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> Pending:
        """Host memory to host memory."""
        return self.exchange(sends, receives)


def check_tag(tag: int) -> int:
    """A tag of a user's send or receive. Raises: Refused where it could meet one of ours."""
    if tag < TAG_BASE:
        return tag
    raise Refused(
        Finding(
            "DET-COLLECTIVE-TAG", "tag of a send or receive", str(tag), f"less than {TAG_BASE}",
            "Tags from there on carry the pieces of collectives.", "use a smaller tag.",
        )
    )  # fmt: skip


class GlooWire(Wire):
    """Point to point over gloo: no ring, no staging copy, uneven pieces as they are."""

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> Pending:
        tag = self.next_tag()
        ins = [(peer, as_bytes(t)) for peer, t in receives if t.numel()]
        outs = [(peer, as_bytes(t)) for peer, t in sends if t.numel()]
        pending = Pending(self, held=[t for _, t in ins + outs])
        try:
            pending.receives += [(peer, self.vendor.recv([t], peer, tag)) for peer, t in ins]
            pending.sends += [(peer, self.vendor.send([t], peer, tag)) for peer, t in outs]
        except RuntimeError as cause:
            self.bury(pending)
            raise self.fail(cause) from cause
        return pending


class NcclWire(Wire):
    """Grouped sends and receives on the vendor's stream: nothing waits on the host. Headers go over gloo."""

    def __init__(self, vendor: Any, me: int, members: list[int], checks: str, host: GlooWire) -> None:
        super().__init__(vendor, me, members, checks)
        self.host = host

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> Pending:
        ins = [(peer, as_bytes(t)) for peer, t in receives if t.numel()]
        outs = [(peer, as_bytes(t)) for peer, t in sends if t.numel()]
        if not ins and not outs:
            return Pending(self)
        try:
            self.vendor._start_coalescing()
            for peer, tensor in outs:
                self.vendor.send([tensor], peer, 0)
            for peer, tensor in ins:
                self.vendor.recv([tensor], peer, 0)
            work = self.vendor._end_coalescing()
        except RuntimeError as cause:
            raise self.fail(cause) from cause
        return Pending(self, [(self.me, work)], held=[t for _, t in ins + outs])

    def header_exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> Pending:
        self.host.signature = self.signature
        return self.host.exchange(sends, receives)
