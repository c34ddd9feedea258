"""The ``det`` backend: a Python ProcessGroup over the vendor's. Vendor calls move bytes; floating sums happen here.

=====================  =========================================================================================
operation              plan (floating SUM and AVG; max, min and integers pass through, they are exact)
=====================  =========================================================================================
reduce-scatter         all-to-all of the pieces, then the ordered local sum
all-reduce             reduce-scatter of equal pieces, then all-gather; below ``SMALL`` bytes: all-gather of the whole,
                       then the ordered sum on every rank. An element is summed in the same order either way
reduce                 as all-reduce; only the root keeps it
=====================  =========================================================================================

Order   ``order.plan`` over logical ranks of the group: independent of size, bucket, chunk, placement, other groups
Level   placement
Memory  all-reduce: about three times the input (padded, sent, received); reduce-scatter: twice; small
        all-reduce: N times
State   a first version, not used by ``--det``: CPU tensors over gloo only. It does not name mismatched calls (gloo
        aborts); device meshes (FSDP2), ``split_group`` and batched P2P do not work on its default group yet
Names   torch 2.14 renamed ProcessGroup methods; both names are defined, so that 2.10 to 2.14 find theirs
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import AllgatherOptions

from megatron_det.collectives.ordered_sum import ordered_sum
from megatron_det.collectives.record import Call, record
from megatron_det.collectives.work import Lane, run_now
from megatron_det.errors import Finding, Refused

SMALL = 8192  # bytes; a first value, to be measured
NAME = "det"
SUMS = (ReduceOp.SUM, ReduceOp.AVG)


def kind_of(op: Any) -> Any:
    """The reduction of an options object, with or without its wrapper."""
    return op.op if hasattr(op, "op") else op


def refuse_premultiplied(op: Any) -> None:
    """PREMUL_SUM would round before it adds. Raises: Refused."""
    if kind_of(op) == ReduceOp.PREMUL_SUM:
        raise Refused(
            Finding(
                "DET-COLLECTIVE-PREMUL",
                "reduction",
                "PREMUL_SUM",
                "SUM or AVG",
                "The product would be rounded before the sum.",
                "multiply the result.",
            )
        )


class DetProcessGroup(dist.ProcessGroup):
    """One group. ``vendor`` is the backend that moves the bytes."""

    def __init__(self, vendor: Any, rank: int, size: int, order: str = "linear") -> None:
        super().__init__(rank, size)
        self.vendor = vendor
        self.order = order
        self.lane = Lane(f"{rank}-of-{size}")
        self.me, self.ranks, self.label = rank, size, "?"

    def _set_group_name(self, name: str) -> None:
        self.label = name
        super()._set_group_name(name)

    def getBackendName(self) -> str:
        return NAME

    # -- running ----------------------------------------------------------------------------------------------------

    def _start(self, name: str, op: Any, tensors: list[torch.Tensor], action: Callable[[], None], opts: Any) -> Any:
        refuse_premultiplied(op)
        record(Call(self.label, self.ranks, name, str(op), tensors))
        if getattr(opts, "asyncOp", False) or not self.lane.idle():
            return self.lane.submit(action, tensors)
        return run_now(action, tensors)

    def _pass(self, name: str, method: str, outputs: Any, *arguments: Any) -> Any:
        """A call that adds nothing: the vendor's, in its turn."""
        vendor = getattr(self.vendor, method)
        record(Call(self.label, self.ranks, name, "-", outputs if isinstance(outputs, list) else [outputs]))
        if self.lane.idle():
            return vendor(*arguments)
        return self.lane.submit(lambda: vendor(*arguments).wait(), _flat(outputs))

    # -- sums -------------------------------------------------------------------------------------------------------

    def _reduce_pieces(self, pieces: list[torch.Tensor], out: torch.Tensor, op: Any) -> None:
        """``pieces[r]`` goes to rank r; ``out`` gets the ordered sum of what all ranks sent here."""
        received = torch.empty(self.ranks * out.numel(), dtype=out.dtype, device=out.device)
        sent = torch.cat([piece.reshape(-1) for piece in pieces]) if len(pieces) > 1 else pieces[0].reshape(-1)
        outputs = [out.numel()] * self.ranks
        self._all_to_all(received, sent, outputs, [piece.numel() for piece in pieces])
        average = self.ranks if kind_of(op) == ReduceOp.AVG else None
        ordered_sum(
            received.split(out.numel()) if out.numel() else [out] * self.ranks, out.view(-1), self.order, average
        )

    def _all_to_all(self, out: torch.Tensor, sent: torch.Tensor, outs: list[int], ins: list[int]) -> None:
        self.vendor.alltoall_base(out, sent, outs, ins, dist.AllToAllOptions()).wait()

    def _all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        flat = tensor.contiguous().view(-1)
        if flat.numel() * flat.element_size() < SMALL:
            self._all_reduce_small(flat, op)
        else:
            piece = -(-flat.numel() // self.ranks)
            padded = torch.nn.functional.pad(flat, (0, piece * self.ranks - flat.numel()))
            mine = torch.empty(piece, dtype=flat.dtype, device=flat.device)
            self._reduce_pieces(list(padded.split(piece)), mine, op)
            gathered = torch.empty_like(padded)
            self.vendor._allgather_base(gathered, mine, AllgatherOptions()).wait()
            flat = gathered[: flat.numel()]
        tensor.copy_(flat.view(tensor.shape))

    def _all_reduce_small(self, flat: torch.Tensor, op: Any) -> None:
        sent = flat.clone()
        everyone = torch.empty(self.ranks * flat.numel(), dtype=flat.dtype, device=flat.device)
        self.vendor._allgather_base(everyone, sent, AllgatherOptions()).wait()
        average = self.ranks if kind_of(op) == ReduceOp.AVG else None
        shards = everyone.split(flat.numel()) if flat.numel() else [sent] * self.ranks
        ordered_sum(shards, flat, self.order, average)

    def _must_sum(self, tensor: torch.Tensor, op: Any) -> bool:
        """Whether this reduction depends on the order of its terms."""
        inexact = tensor.is_floating_point() or tensor.is_complex()
        return self.ranks > 1 and inexact and kind_of(op) in SUMS

    # -- reductions: all-reduce -------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        opts = opts if opts is not None else dist.AllreduceOptions()
        op = opts.reduceOp
        if not self._must_sum(tensors[0], op):
            return self._exact_all_reduce(tensors, opts)

        def action() -> None:
            for tensor in tensors:
                self._all_reduce(tensor, op)

        return self._start("all_reduce", op, tensors, action, opts)

    def _exact_all_reduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Integers, bool, max, min, and groups of one: no order to keep. gloo has no AVG and no PREMUL_SUM."""
        if self.ranks == 1:
            return self._start("all_reduce", opts.reduceOp, tensors, lambda: None, opts)
        return self._pass("all_reduce", "allreduce", tensors, tensors, opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        opts = opts if opts is not None else dist.AllreduceCoalescedOptions()
        op = opts.reduceOp

        def action() -> None:
            for tensor in tensors:
                if self._must_sum(tensor, op):
                    self._all_reduce(tensor, op)
                elif self.ranks > 1:
                    one = dist.AllreduceOptions()
                    one.reduceOp = op
                    self.vendor.allreduce([tensor], one).wait()

        return self._start("all_reduce_coalesced", op, tensors, action, opts)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        op = opts.reduceOp
        if not self._must_sum(tensors[0], op):
            return self._pass("reduce", "reduce", tensors, tensors, opts)

        def action() -> None:
            total = tensors[0].clone()
            self._all_reduce(total, op)
            if self.me == opts.rootRank:
                tensors[0].copy_(total)

        return self._start("reduce", op, tensors, action, opts)

    # -- reductions: reduce-scatter ---------------------------------------------------------------------------------

    def _reduce_scatter(self, out: torch.Tensor, pieces: list[torch.Tensor], op: Any) -> None:
        if not out.is_contiguous():
            whole = torch.empty_like(out, memory_format=torch.contiguous_format)
            self._reduce_scatter(whole, pieces, op)
            out.copy_(whole)
        elif self._must_sum(out, op):
            self._reduce_pieces([p.contiguous() for p in pieces], out, op)
        elif self.ranks == 1:
            out.copy_(pieces[0].reshape(out.shape))
        else:
            opts = dist.ReduceScatterOptions()
            opts.reduceOp = op
            self.vendor.reduce_scatter([out], [[p.contiguous() for p in pieces]], opts).wait()

    def reduce_scatter(self, outs: list[torch.Tensor], ins: list[list[torch.Tensor]], opts: Any = None) -> Any:
        opts = opts if opts is not None else dist.ReduceScatterOptions()

        def action() -> None:
            for out, pieces in zip(outs, ins, strict=True):
                self._reduce_scatter(out, pieces, opts.reduceOp)

        return self._start("reduce_scatter", opts.reduceOp, outs, action, opts)

    def _reduce_scatter_base(self, out: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([out], [whole], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_single_coalesced(
        self, outs: list[torch.Tensor], wholes: list[torch.Tensor], opts: Any = None
    ) -> Any:
        opts = opts if opts is not None else dist.ReduceScatterOptions()

        def action() -> None:
            for out, whole in zip(outs, wholes, strict=True):
                flat = whole.contiguous().view(-1)
                pieces = list(flat.split(out.numel())) if out.numel() else [flat] * self.ranks
                self._reduce_scatter(out, pieces, opts.reduceOp)

        return self._start("reduce_scatter_single", opts.reduceOp, outs, action, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- what adds nothing ------------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        return self._pass("broadcast", "broadcast", tensors, tensors, opts or dist.BroadcastOptions())

    def allgather(self, outs: list[list[torch.Tensor]], ins: list[torch.Tensor], opts: Any = None) -> Any:
        return self._pass("all_gather", "allgather", ins, outs, ins, opts or AllgatherOptions())

    def _allgather_base(self, out: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> Any:
        return self._pass("all_gather_single", "_allgather_base", [out], out, mine, opts or AllgatherOptions())

    all_gather_single = _allgather_base

    def all_gather_single_coalesced(self, outs: list[Any], ins: list[Any], opts: Any = None) -> Any:
        opts = opts or AllgatherOptions()

        def action() -> None:
            for out, mine in zip(outs, ins, strict=True):
                self.vendor._allgather_base(out, mine, opts).wait()

        return self._start("all_gather_single_coalesced", "-", outs, action, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outs: list[Any], ins: list[torch.Tensor], opts: Any = None) -> Any:
        return self._pass("all_gather_coalesced", "allgather_coalesced", ins, outs, ins, opts or AllgatherOptions())

    def alltoall_base(self, out: Any, sent: Any, outs: list[int], ins: list[int], opts: Any = None) -> Any:
        opts = opts or dist.AllToAllOptions()
        return self._pass("all_to_all_single", "alltoall_base", [out], out, sent, outs, ins, opts)

    all_to_all_single = alltoall_base

    def alltoall(self, outs: list[torch.Tensor], ins: list[torch.Tensor], opts: Any = None) -> Any:
        """gloo has no list form: one flat exchange with uneven splits."""

        def action() -> None:
            flat = torch.cat([t.reshape(-1) for t in ins])
            got = torch.empty(sum(t.numel() for t in outs), dtype=flat.dtype, device=flat.device)
            self._all_to_all(got, flat, [t.numel() for t in outs], [t.numel() for t in ins])
            for out, piece in zip(outs, got.split([t.numel() for t in outs]), strict=True):
                out.copy_(piece.view(out.shape))

        return self._start("all_to_all", "-", outs, action, opts)

    def gather(self, outs: list[Any], ins: list[torch.Tensor], opts: Any = None) -> Any:
        return self._pass("gather", "gather", ins, outs, ins, opts or dist.GatherOptions())

    def scatter(self, outs: list[torch.Tensor], ins: list[Any], opts: Any = None) -> Any:
        return self._pass("scatter", "scatter", outs, outs, ins, opts or dist.ScatterOptions())

    def barrier(self, opts: Any = None) -> Any:
        return self._pass("barrier", "barrier", [], opts or dist.BarrierOptions())

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Any:
        record(Call(self.label, self.ranks, "send", "-", tensors))
        return self.vendor.send(tensors, dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Any:
        record(Call(self.label, self.ranks, "recv", "-", tensors))
        return self.vendor.recv(tensors, src, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Any:
        record(Call(self.label, self.ranks, "recv_anysource", "-", tensors))
        return self.vendor.recv_anysource(tensors, tag)

    def shutdown(self) -> None:
        self.lane.stop()

    def abort(self) -> None:
        self.lane.stop()


def _flat(outputs: Any) -> list[torch.Tensor]:
    return outputs if isinstance(outputs, list) else [outputs]


def create(store: Any, rank: int, size: int, timeout: timedelta) -> DetProcessGroup:
    """Called by c10d for each new group."""
    return DetProcessGroup(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)


def register() -> None:
    """Makes ``det`` known to torch.distributed, for CPU tensors over gloo. Calling it twice does no harm."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, devices=["cpu"])
