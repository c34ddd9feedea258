"""The plans: how a reduction of one group is carried out. Bytes go by ``transport``, additions by ``ordered_sum``.

=====================  ============================================================================================
operation              plan (floating and complex tensors)
=====================  ============================================================================================
reduce-scatter         all-to-all of the pieces, then the ordered sum of what arrived
all-reduce             reduce-scatter of balanced pieces, then all-gather; up to ``Settings.small``: everybody sends the
                       whole to everybody and sums for itself
reduce                 as all-reduce, but the summed pieces go to the root only
node by node           inside the node, each rank sums its share of all destinations over the node's ranks; then between
                       nodes, each rank exchanges those partial sums (in the accumulator's type, not rounded) with the
                       ranks of the same place on other nodes. Order ``tree`` and ``order.blocks`` only
=====================  ============================================================================================

Order   ``order.plan`` over the logical ranks of the group. An element is summed in the same order whatever the size of
        the message, the plan, the chunk, the placement, or what other groups exist
Level   placement
Memory  for N ranks, with C = min(message, chunk_bytes): two scratch buffers of C (reduce-scatter: C is counted in
        the input), kept for the life of the group; small all-reduce one buffer of C at most; node by node: also 2 C
        in the accumulator's type
Pipeline  the pieces of chunk c + 1 travel while chunk c is summed. What was sent is waited for at the end only: the
        answer for a piece cannot arrive before that piece was received
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from megatron_det.collectives.header import Signature
from megatron_det.collectives.ordered_sum import Reduction, accumulator, ordered_sum
from megatron_det.collectives.settings import Settings
from megatron_det.collectives.transport import Pending, Wire, as_bytes

Views = Sequence[torch.Tensor]  # one flat contiguous tensor per rank


def balanced(total: int, parts: int) -> list[int]:
    """Borders that cut ``total`` elements into so many parts whose sizes differ by one at most."""
    return [part * total // parts for part in range(parts + 1)]


def cut(flat: torch.Tensor, parts: int) -> list[torch.Tensor]:
    return [flat[low:high] for low, high in pairwise(balanced(flat.numel(), parts))]


def raw_bytes(flat: torch.Tensor) -> bytes:
    return bytes(as_bytes(flat).numpy()) if flat.numel() else b""


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of reals: they are added part by part."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


class Core:
    """The reductions of one group over one wire."""

    def __init__(self, wire: Wire, settings: Settings) -> None:
        self.wire, self.settings = wire, settings
        self.me, self.ranks = wire.me, wire.ranks
        self.taken: dict[str, int] = {}
        self.alone = False  # whether the tensor of the current call has one element
        self.by_node: ByNode | None = None  # set once the nodes are known, where they allow it
        self._scratch: dict[tuple[str, torch.device], torch.Tensor] = {}

    # -- memory -------------------------------------------------------------------------------------------------------

    def scratch(self, slot: str, elements: int, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A flat buffer that lives as long as the group. Not initialised."""
        dtype = dtype or like.dtype
        size = elements * dtype.itemsize
        key = slot, like.device
        if key not in self._scratch or self._scratch[key].numel() < size:
            self._scratch[key] = torch.empty(size, dtype=torch.uint8, device=like.device)
        return self._scratch[key][:size].view(dtype)

    def _sum(self, shards: Views, out: torch.Tensor, reduction: Reduction, scratch: frozenset[int]) -> None:
        wide = torch.float64 if self.settings.wide_scalars and self.alone and out.dtype is torch.float32 else None
        ordered_sum(shards, out, self.settings.order, reduction, scratch, wide)

    def _take(self, plan: str) -> None:
        self.taken[plan] = self.taken.get(plan, 0) + 1

    # -- all-reduce and reduce ----------------------------------------------------------------------------------------

    def all_reduce(
        self, flat: torch.Tensor, reduction: Reduction, signature: Signature, root: int | None = None
    ) -> None:
        """In place. ``root``: only there (reduce); elsewhere the tensor keeps its value."""
        flat = real(flat)
        size = flat.numel() * flat.element_size()
        self.alone = flat.numel() == 1
        if self.wire.inline(flat, size):
            self._take("inline")
            self._inline(flat, reduction, signature, root)
            return
        self.wire.begin(signature)
        if not size:
            return
        if size <= self.settings.small(self.ranks):
            self._take("small")
            self._small(flat, reduction, root)
        elif root is None and (nodes := self._nodes(size)):
            self._take("node")
            nodes.all_reduce(flat, reduction)
        else:
            self._take("pieces")
            self._pieces(flat, reduction, root)

    def _inline(self, flat: torch.Tensor, reduction: Reduction, signature: Signature, root: int | None) -> None:
        riding = dict.fromkeys(self.wire.others, raw_bytes(flat))
        arrived = self.wire.begin(signature, payload=riding, size=flat.numel() * flat.element_size())
        if root in (None, self.me):
            self._sum_arrived(arrived, flat, flat, reduction)

    def _sum_arrived(
        self, arrived: dict[int, bytes], mine: torch.Tensor, out: torch.Tensor, reduction: Reduction
    ) -> None:
        if out.numel():
            shards = [mine] * self.ranks
            for rank, raw in arrived.items():
                shards[rank] = torch.frombuffer(bytearray(raw), dtype=out.dtype)
            self._sum(shards, out, reduction, frozenset(arrived))

    def _small(self, flat: torch.Tensor, reduction: Reduction, root: int | None) -> None:
        mine = root in (None, self.me)
        buffer = list(self.scratch("a", self.ranks * flat.numel(), flat).split(flat.numel()))
        receives = [(r, buffer[r]) for r in self.wire.others] if mine else []
        sends = [(r, flat) for r in self.wire.others if root in (None, r)]
        self.wire.exchange(sends, receives).wait()
        if mine:
            buffer[self.me] = flat
            self._sum(buffer, flat, reduction, frozenset(self.wire.others))

    def _pieces(self, flat: torch.Tensor, reduction: Reduction, root: int | None) -> None:
        chunk = max(self.ranks, self.settings.chunk_bytes // flat.element_size())
        chunks = [cut(part, self.ranks) for part in flat.split(chunk)]

        def finish(index: int, arrived: Views, scratch: frozenset[int]) -> Pending:
            pieces = chunks[index]
            mine = pieces[self.me] if root in (None, self.me) else torch.empty_like(pieces[self.me])
            self._sum(arrived, mine, reduction, scratch)
            sends = [(r, mine) for r in self.wire.others if root in (None, r)]
            receives = [(r, pieces[r]) for r in self.wire.others] if root in (None, self.me) else []
            return self.wire.exchange(sends, receives)

        self._pipeline(chunks, finish)

    # -- reduce-scatter -----------------------------------------------------------------------------------------------

    def reduce_scatter(self, out: torch.Tensor, pieces: Views, reduction: Reduction, signature: Signature) -> None:
        """``pieces[r]`` goes to rank r; ``out`` gets the reduction of what all ranks had for this one.

        Sizes may differ from piece to piece, so each rank compares what it gets with what it expects.
        """
        out, pieces = real(out), [real(piece) for piece in pieces]
        self.alone = out.numel() == 1
        sends = {r: pieces[r].numel() * pieces[r].element_size() for r in self.wire.others}
        size = out.numel() * out.element_size()
        wants = dict.fromkeys(self.wire.others, size)
        if self.wire.inline(out, max([size, *sends.values()])):
            self._take("inline")
            riding = {r: raw_bytes(pieces[r]) for r in self.wire.others}
            arrived = self.wire.begin(signature, sends, wants, riding, size)
            self._sum_arrived(arrived, pieces[self.me], out, reduction)
            return
        self.wire.begin(signature, sends, wants)
        self._scatter(out, pieces, reduction)

    def _scatter(self, out: torch.Tensor, pieces: Views, reduction: Reduction) -> None:
        own = pieces[self.me].data_ptr() == out.data_ptr()  # in place, the usual form: nobody else reads it
        if any(_overlap(out, piece) for r, piece in enumerate(pieces) if not (r == self.me and own)):
            whole = torch.empty_like(out)
            self._scatter(whole, pieces, reduction)
            out.copy_(whole)
            return
        even = all(piece.numel() == out.numel() for piece in pieces)
        if even and (nodes := self._nodes(out.numel() * out.element_size() * self.ranks)):
            self._take("node")
            nodes.reduce_scatter(out, pieces, reduction)
            return
        self._take("scatter")
        step = max(1, self.settings.chunk_bytes // (out.element_size() * self.ranks))
        many = max((-(-piece.numel() // step) for piece in pieces), default=0)
        chunks = [[piece[i * step : (i + 1) * step] for piece in pieces] for i in range(many)]
        outs = [out[i * step : (i + 1) * step] for i in range(many)]

        def finish(index: int, arrived: Views, scratch: frozenset[int]) -> None:
            self._sum(arrived, outs[index], reduction, scratch)

        self._pipeline(chunks, finish)

    def _pipeline(self, chunks: list[list[torch.Tensor]], finish: Callable[..., Pending | None]) -> None:
        """Sends ``chunks[c][r]`` to rank r; ``finish(c, shards, scratch)`` reduces what arrived of chunk c."""
        scratch = frozenset(self.wire.others)
        open_works: list[Pending] = []
        ahead: tuple[Pending, list[torch.Tensor]] | None = None
        for index in range(len(chunks)):
            now, shards = ahead or self._send(chunks[index], index)
            ahead = self._send(chunks[index + 1], index + 1) if index + 1 < len(chunks) else None
            now.arrive()
            last = finish(index, shards, scratch)
            open_works += [now] if last is None else [now, last]
        for work in open_works:
            work.wait()

    def _send(self, pieces: list[torch.Tensor], index: int) -> tuple[Pending, list[torch.Tensor]]:
        mine = pieces[self.me]
        size = mine.numel()
        buffer = self.scratch("ab"[index % 2], self.ranks * size, mine)
        shards = [buffer[r * size : (r + 1) * size] for r in range(self.ranks)]
        shards[self.me] = mine
        pending = self.wire.exchange(
            [(r, pieces[r]) for r in self.wire.others], [(r, shards[r]) for r in self.wire.others]
        )
        return pending, shards

    def _nodes(self, size: int) -> ByNode | None:
        alone = self.alone and self.settings.wide_scalars  # added in fp64 at once, by nobody else
        return self.by_node if size >= self.settings.node_bytes and not alone else None


class ByNode:
    """Two steps: inside the node, then between nodes. The bits of the flat tree (``order.blocks`` says when)."""

    def __init__(self, core: Core, per_node: int) -> None:
        self.core, self.wire, self.per_node = core, core.wire, per_node
        self.place, self.node = core.me % per_node, core.me // per_node
        self.nodes = core.ranks // per_node
        self.near = [self.node * per_node + place for place in range(per_node)]
        self.far = [node * per_node + self.place for node in range(self.nodes)]

    def all_reduce(self, flat: torch.Tensor, reduction: Reduction) -> None:
        chunk = max(self.core.ranks, self.core.settings.chunk_bytes // flat.element_size())
        for part in flat.split(chunk):
            shares = cut(part, self.per_node)
            partial = self._inside(shares, reduction)
            pieces = cut(partial, self.nodes)
            mine = cut(shares[self.place], self.nodes)
            self._between(pieces, mine[self.node], reduction)
            self._spread(self.far, self.node, mine)
            self._spread(self.near, self.place, shares)

    def reduce_scatter(self, out: torch.Tensor, pieces: Views, reduction: Reduction) -> None:
        step = max(1, self.core.settings.chunk_bytes // (out.element_size() * self.core.ranks))
        for low in range(0, out.numel(), step):
            part = [piece[low : low + step] for piece in pieces]
            size = part[0].numel()
            packed = self.core.scratch("pack", self.core.ranks * size, out)
            for rank, piece in enumerate(part):
                place, node = rank % self.per_node, rank // self.per_node
                packed[(place * self.nodes + node) * size :][:size].copy_(piece)
            partial = self._inside(list(packed.split(self.nodes * size)), reduction)
            self._between(list(partial.split(size)), out[low : low + step], reduction)

    def _inside(self, shares: Views, reduction: Reduction) -> torch.Tensor:
        """``shares[p]`` goes to place p of this node. Returns this place's sum over the node, not rounded."""
        mine = shares[self.place]
        buffer = self._buffer("a", self.per_node, mine)
        peers = [p for p in range(self.per_node) if p != self.place]
        self.wire.exchange(
            [(self.near[p], shares[p]) for p in peers], [(self.near[p], buffer[p]) for p in peers]
        ).wait()
        buffer[self.place] = mine
        partial = self.core.scratch("partial", mine.numel(), mine, accumulator(mine.dtype))
        first = reduction if reduction.name != "AVG" else Reduction("SUM")
        return ordered_sum(buffer, partial, "tree", first, frozenset(peers))

    def _buffer(self, slot: str, many: int, like: torch.Tensor) -> list[torch.Tensor]:
        size = like.numel()
        whole = self.core.scratch(slot, many * size, like)
        return [whole[i * size : (i + 1) * size] for i in range(many)]

    def _between(self, pieces: Views, out: torch.Tensor, reduction: Reduction) -> None:
        """``pieces[n]`` goes to the same place on node n; ``out`` gets the rounded sum over the nodes."""
        mine = pieces[self.node]
        buffer = self._buffer("b", self.nodes, mine)
        peers = [n for n in range(self.nodes) if n != self.node]
        self.wire.exchange([(self.far[n], pieces[n]) for n in peers], [(self.far[n], buffer[n]) for n in peers]).wait()
        buffer[self.node] = mine
        second = reduction if reduction.name in ("MAX", "MIN") else Reduction("SUM")
        total = ordered_sum(buffer, mine, "tree", second, frozenset(range(self.nodes)))
        out.copy_(total / self.core.ranks if reduction.name == "AVG" else total)

    def _spread(self, peers: list[int], place: int, pieces: Views) -> None:
        """All-gather between some ranks: ``pieces[place]`` is mine."""
        others = [i for i in range(len(peers)) if i != place]
        sends, receives = [(peers[i], pieces[place]) for i in others], [(peers[i], pieces[i]) for i in others]
        self.wire.exchange(sends, receives).wait()


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two flat contiguous tensors share memory."""
    if not a.numel() or not b.numel() or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    low_a, low_b = a.data_ptr(), b.data_ptr()
    return low_a < low_b + b.numel() * b.element_size() and low_b < low_a + a.numel() * a.element_size()
