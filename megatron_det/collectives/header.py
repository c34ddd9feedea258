"""What a rank says about the call that it is about to make, so that ranks that disagree can say so by name.

gloo ends the process when two ranks disagree on a size, NCCL hangs. So each rank first sends every other one a header
of fixed size; a small payload rides in it, so that scalars still need one message. All ranks see all headers, so all
raise the same error.

====== ======================================================================
bytes  meaning
====== ======================================================================
0-7    digest of the signature: what must be equal on all ranks
8-15   bytes that the sender will send to this receiver in the call
16-335 the signature as text, for the error, cut and padded with NUL
336-   payload of up to ``INLINE`` bytes
====== ======================================================================
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from megatron_det.errors import GuaranteeBroken

TEXT = 320
INLINE = 4096 - 336
SIZE = 16 + TEXT + INLINE


class CollectiveError(GuaranteeBroken, RuntimeError):
    """A collective could not be carried out: ranks disagree, a peer is gone, or time is up."""


@dataclass(frozen=True)
class Signature:
    """One call. ``same`` is compared between ranks; ``own`` is only shown (uneven splits, for example)."""

    operation: str
    same: str
    own: str = ""

    def text(self) -> str:
        return f"{self.operation} {self.same}{' ' + self.own if self.own else ''}"

    def digest(self) -> bytes:
        return hashlib.blake2b(f"{self.operation} {self.same}".encode(), digest_size=8).digest()


def pack(signature: Signature, sends: int, payload: bytes = b"") -> bytearray:
    """The header for one receiver."""
    head = bytearray(SIZE)
    text = signature.text().encode()[:TEXT]
    head[: 16 + len(text)] = signature.digest() + struct.pack("<q", sends) + text
    head[16 + TEXT : 16 + TEXT + len(payload)] = payload
    return head


@dataclass(frozen=True)
class Header:
    """A header as it arrived."""

    digest: bytes
    sends: int
    text: str

    @classmethod
    def read(cls, raw: bytes) -> Header:
        text = raw[16 : 16 + TEXT].rstrip(b"\0").decode(errors="replace")
        return cls(raw[:8], struct.unpack("<q", raw[8:16])[0], text)


def disagreement(
    group: str, members: list[int], me: int, mine: Signature, heads: dict[int, Header], expected: dict[int, int]
) -> CollectiveError | None:
    """The error when ranks disagree, else None. ``members``: global ranks; ``expected``: bytes wanted per peer."""
    bad = [r for r, head in heads.items() if head.digest != mine.digest() or head.sends != expected.get(r, 0)]
    if not bad:
        return None
    rows = {me: mine.text(), **{r: head.text for r, head in heads.items()}}
    said: dict[str, list[int]] = {}
    for rank, text in sorted(rows.items()):
        said.setdefault(text, []).append(members[rank])
    found = "; ".join(f"rank{'s' if len(who) > 1 else ''} {_list(who)}: {text}" for text, who in said.items())
    sizes = [r for r in bad if heads[r].digest == mine.digest()]
    if sizes:
        found += "; " + ", ".join(
            f"rank {members[r]} sends {heads[r].sends} bytes where rank {members[me]} expects {expected.get(r, 0)}"
            for r in sizes
        )
    return CollectiveError.of(
        "DET-COLLECTIVE-MISMATCH", f"{mine.operation} in group {group} of ranks {_list(members)}", found=found,
        needed="the same call, with the same reduction, dtype and sizes, on every rank",
        why="The sum of different things has no value; gloo would end the process and NCCL would hang.",
        do="look at the code that makes this call on the ranks that differ.",
    )  # fmt: skip


def lost(group: str, members: list[int], me: int, peer: int | None, mine: Signature, cause: str) -> CollectiveError:
    """The error when the vendor's transport failed while waiting for ``peer``."""
    who = f"rank {members[peer]}" if peer is not None else "a peer"
    return CollectiveError.of(
        "DET-COLLECTIVE-PEER", f"{mine.text()} in group {group} of ranks {_list(members)}, on rank {members[me]}",
        found=f"no answer from {who} ({cause.strip().splitlines()[0] if cause.strip() else 'no reason given'})",
        needed="all ranks of the group to make the call within the timeout",
        why="A peer ended, hangs, or never made this call; nothing was reduced.",
        do=f"read the log of {who}: its own error is the first one.",
    )  # fmt: skip


def _list(ranks: list[int]) -> str:
    """0-3,7 for [0, 1, 2, 3, 7]."""
    parts: list[str] = []
    for rank in ranks:
        if parts and int(parts[-1].split("-")[-1]) == rank - 1:
            parts[-1] = f"{parts[-1].split('-')[0]}-{rank}"
        else:
            parts.append(str(rank))
    return ",".join(parts)
