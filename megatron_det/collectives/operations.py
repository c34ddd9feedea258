"""c10d's operations of one group, for its ProcessGroup and its Backend object alike. What is not here raises by name.

Reductions of floating and complex tensors go by ``core``; integers and bools are exact in any order and go to the
vendor; everything else moves bytes. Every call first compares itself with the other ranks' (``header``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from megatron_det.collectives.core import Core, Views
from megatron_det.collectives.header import Signature
from megatron_det.collectives.ordered_sum import Reduction
from megatron_det.collectives.record import record
from megatron_det.collectives.transport import check_tag
from megatron_det.collectives.views import describe, fit, flat_in, flat_out, misfit, rows, sizes
from megatron_det.errors import Finding, Refused

EXACT = {torch.uint8, torch.int8, torch.int32, torch.int64}  # gloo adds no other integers, NCCL these at least
ORDERED = ("SUM", "AVG", "PREMUL_SUM", "MAX", "MIN")


def reduction_of(op: Any) -> Reduction:
    """The reduction of an options object. The factor of PREMUL_SUM lies in the op's pickled state."""
    kind = op.op if hasattr(op, "op") else op
    name = str(kind).rpartition(".")[2]
    return Reduction(name, float(op.__getstate__()[1]) if kind == ReduceOp.PREMUL_SUM else None)


def refuse_unordered(operation: str, name: str, dtype: torch.dtype) -> Refused:
    return Refused(
        Finding(
            "DET-COLLECTIVE-OP", f"{operation} of {dtype}", name, " or ".join(ORDERED),
            "There is no plan for this reduction of this type, and nothing falls back to the vendor's.",
            "use another reduction or type, or gather and reduce locally.",
        )
    )  # fmt: skip


class Operations:
    """Needs ``state``: see ``backend.GroupState``."""

    state: Any

    # -- running ------------------------------------------------------------------------------------------------------

    def _run(self, operation: str, reduction: str, tensors: list[torch.Tensor], action: Callable[[Core], None],
             opts: Any, ordered: bool = False) -> Any:  # fmt: skip
        state = self.state
        core = state.core_for(tensors[0] if tensors else None)
        record(state.label(), state.size, operation, reduction, tensors, ordered)
        works = state.coalescing
        asynchronous = works is not None or bool(getattr(opts, "asyncOp", False))

        def in_step() -> None:
            before = core.wire.calls
            try:
                action(core)
            except BaseException as error:
                if core.wire.calls != before:
                    core.wire.spoil(error)
                raise

        work = state.lane.run(in_step, tensors, asynchronous)
        if works is not None:
            works.append(work)
        return work

    def _vendor(self, core: Core, signature: Signature, call: Callable[[Any], Any]) -> None:
        """A vendor's collective that adds nothing, or adds exactly."""
        core.wire.begin(signature)
        try:
            call(core.wire.vendor).wait()
        except RuntimeError as cause:
            raise core.wire.fail(cause) from cause

    # -- reductions ---------------------------------------------------------------------------------------------------

    def _is_ordered(self, operation: str, tensor: torch.Tensor, reduction: Reduction) -> bool:
        """Whether the sum is made here. Raises: Refused for a floating reduction without a plan."""
        if not (tensor.is_floating_point() or tensor.is_complex()):
            if self.state.size > 1 and (tensor.dtype not in EXACT or reduction.name in ("AVG", "PREMUL_SUM")):
                raise refuse_unordered(operation, reduction.name, tensor.dtype)
            return False
        named = reduction.name in ORDERED and not (tensor.is_complex() and reduction.by_key)
        if not named and self.state.size > 1:
            raise refuse_unordered(operation, reduction.name, tensor.dtype)
        return named

    def _any_ordered(self, operation: str, tensors: list[torch.Tensor], reduction: Reduction) -> bool:
        """All are looked at, so that a refusal comes before anything is sent."""
        return True in [self._is_ordered(operation, tensor, reduction) for tensor in tensors]

    def _all_reduce(
        self, core: Core, tensor: torch.Tensor, op: Any, reduction: Reduction, root: int | None = None
    ) -> None:
        operation = "all_reduce" if root is None else "reduce"
        to = "" if root is None else f" to rank {core.wire.members[root]}"
        signature = Signature(operation, f"{reduction.label()} {describe(tensor)}{to}")
        if self._is_ordered(operation, tensor, reduction):
            view, finish = flat_out(tensor)
            core.all_reduce(view, reduction, signature, root)
            if root in (None, core.me):
                finish()
        elif core.ranks > 1:
            self._vendor(core, signature, lambda vendor: _exact(vendor, tensor, op, root))

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        return self._reduce_each("all_reduce", tensors, opts or dist.AllreduceOptions())

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        return self._reduce_each("all_reduce_coalesced", tensors, opts or dist.AllreduceCoalescedOptions())

    def _reduce_each(self, operation: str, tensors: list[torch.Tensor], opts: Any) -> Any:
        op, reduction = opts.reduceOp, reduction_of(opts.reduceOp)

        def action(core: Core) -> None:
            for tensor in tensors:
                self._all_reduce(core, tensor, op, reduction)

        ordered = self._any_ordered(operation, tensors, reduction)
        return self._run(operation, reduction.name, tensors, action, opts, ordered)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        opts = opts or dist.ReduceOptions()
        op, reduction, root = opts.reduceOp, reduction_of(opts.reduceOp), opts.rootRank
        ordered = self._is_ordered("reduce", tensors[0], reduction)
        return self._run(
            "reduce", reduction.name, tensors,
            lambda core: self._all_reduce(core, tensors[0], op, reduction, root), opts, ordered,
        )  # fmt: skip

    def _reduce_scatter(self, core: Core, out: torch.Tensor, pieces: Views, op: Any, reduction: Reduction) -> None:
        total = sum(piece.numel() for piece in pieces)
        signature = Signature(
            "reduce_scatter",
            f"{reduction.label()} {str(out.dtype).removeprefix('torch.')}[{total}]",
            f"-> {list(out.shape)}",
        )
        target, finish = flat_out(out)
        ins = [flat_in(piece) for piece in pieces]
        if ins[core.me].numel() != target.numel():
            raise ValueError(
                f"reduce_scatter: found an output of {list(out.shape)}; {ins[core.me].numel()} elements needed"
            )
        if self._is_ordered("reduce_scatter", out, reduction):
            core.reduce_scatter(target, ins, reduction, signature)
        elif core.ranks > 1:
            wants = dict.fromkeys(core.wire.others, target.numel() * target.element_size())
            core.wire.begin(signature, sizes(ins, core.me), wants)
            self._exact_scatter(core, target, ins, op)
        else:
            target.copy_(ins[0])
        finish()

    def _exact_scatter(self, core: Core, target: torch.Tensor, ins: Views, op: Any) -> None:
        """gloo's own reduce-scatter wants equal pieces: all-reduce everything, keep one."""
        whole = torch.cat(list(ins))
        low = sum(piece.numel() for piece in ins[: core.me])
        _exact(core.wire.vendor, whole, op, None).wait()
        target.copy_(whole[low : low + target.numel()])

    def reduce_scatter(self, outs: list[torch.Tensor], ins: list[list[torch.Tensor]], opts: Any = None) -> Any:
        return self._scatter_each("reduce_scatter", outs, ins, opts or dist.ReduceScatterOptions())

    def _scatter_each(self, operation: str, outs: list[torch.Tensor], ins: list[Any], opts: Any) -> Any:
        for out, pieces in zip(outs, ins, strict=True):
            if len(pieces) != self.state.size or {piece.dtype for piece in pieces} != {out.dtype}:
                raise ValueError(
                    f"{operation}: found {len(pieces)} pieces for {self.state.size} ranks, or another dtype"
                )
        op, reduction = opts.reduceOp, reduction_of(opts.reduceOp)

        def action(core: Core) -> None:
            for out, pieces in zip(outs, ins, strict=True):
                self._reduce_scatter(core, out, pieces, op, reduction)

        ordered = self._any_ordered(operation, outs, reduction)
        return self._run(operation, reduction.name, outs, action, opts, ordered)

    def reduce_scatter_single(self, out: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([out], [whole], opts, "reduce_scatter_single")

    def reduce_scatter_single_coalesced(self, outs: list[torch.Tensor], wholes: list[torch.Tensor], opts: Any = None,
                                        operation: str = "reduce_scatter_single_coalesced") -> Any:  # fmt: skip
        for out, whole in zip(outs, wholes, strict=True):
            if whole.dtype != out.dtype or whole.numel() != out.numel() * self.state.size:
                raise ValueError(misfit(operation, whole, out, self.state.size))
        pieces = [rows(whole, self.state.size) for whole in wholes]
        return self._scatter_each(operation, outs, pieces, opts or dist.ReduceScatterOptions())

    # -- moves --------------------------------------------------------------------------------------------------------

    def _gather_each(self, operation: str, outs: list[list[torch.Tensor]], ins: list[torch.Tensor], opts: Any) -> Any:
        for views, mine in zip(outs, ins, strict=True):
            if len(views) != self.state.size:
                raise ValueError(f"{operation}: found {len(views)} outputs for {self.state.size} ranks")
            fit(operation, ((view, mine) for view in views))

        def action(core: Core) -> None:
            for views, mine in zip(outs, ins, strict=True):
                core.wire.begin(Signature(operation, f"{str(mine.dtype).removeprefix('torch.')}[{mine.numel()}]"))
                _exchange_all(core, [flat_in(mine)] * core.ranks, list(views))

        return self._run(operation, "-", [t for views in outs for t in views], action, opts)

    def allgather(self, outs: list[list[torch.Tensor]], ins: list[torch.Tensor], opts: Any = None) -> Any:
        return self._gather_each("all_gather", outs, ins, opts)

    allgather_coalesced = allgather

    def all_gather_single(self, out: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([out], [mine], opts)

    def all_gather_single_coalesced(self, outs: list[torch.Tensor], ins: list[torch.Tensor], opts: Any = None) -> Any:
        for out, mine in zip(outs, ins, strict=True):
            if out.dtype != mine.dtype or out.numel() != mine.numel() * self.state.size:
                raise ValueError(misfit("all_gather_single", out, mine, self.state.size))
        copies = [flat_out(out) for out in outs]
        views = [rows(target, self.state.size) for target, _ in copies]
        work = self._gather_each("all_gather_single", views, ins, opts)
        if any(not out.is_contiguous() for out in outs):
            work.wait()
            for _, finish in copies:
                finish()
        return work

    def alltoall(self, outs: list[torch.Tensor], ins: list[torch.Tensor], opts: Any = None) -> Any:
        own = f"sends {[t.numel() for t in ins]}, receives {[t.numel() for t in outs]}"
        if {len(outs), len(ins)} != {self.state.size} or len({t.dtype for t in (*ins, *outs)}) != 1:
            raise ValueError(
                f"all_to_all: found {own}; needed one piece of one dtype for each of {self.state.size} ranks"
            )
        fit("all_to_all, own piece", [(outs[self.state.rank], ins[self.state.rank])])

        def action(core: Core) -> None:
            same = str(ins[0].dtype).removeprefix("torch.")
            flats = [flat_in(t) for t in ins]
            core.wire.begin(Signature("all_to_all", same, own), sizes(ins, core.me), sizes(outs, core.me))
            _exchange_all(core, flats, outs)

        return self._run("all_to_all", "-", outs, action, opts)

    def all_to_all_single(
        self, out: torch.Tensor, sent: torch.Tensor, outs: list[int], ins: list[int], opts: Any = None
    ) -> Any:
        """Splits are in rows; empty lists mean equal rows."""
        if not out.is_contiguous():
            raise ValueError(f"all_to_all_single: found an output of stride {out.stride()}; a contiguous one is needed")
        return self.alltoall(rows(out, self.state.size, outs), rows(sent, self.state.size, ins), opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        opts = opts or dist.BroadcastOptions()

        def action(core: Core) -> None:
            root = opts.rootRank
            for tensor in tensors:
                what = f"{str(tensor.dtype).removeprefix('torch.')}[{tensor.numel()}]"
                core.wire.begin(Signature("broadcast", f"{what} from rank {core.wire.members[root]}"))
                target, finish = flat_out(tensor)
                sends = [(r, target) for r in core.wire.others] if core.me == root else []
                core.wire.exchange(sends, [] if core.me == root else [(root, target)]).wait()
                finish()

        return self._run("broadcast", "-", tensors, action, opts)

    def gather(self, outs: list[list[torch.Tensor]], ins: list[torch.Tensor], opts: Any = None) -> Any:
        opts = opts or dist.GatherOptions()
        if self.state.rank == opts.rootRank:
            if len(outs[0]) != self.state.size:
                raise ValueError(f"gather: found {len(outs[0])} outputs for {self.state.size} ranks")
            fit("gather", ((out, ins[0]) for out in outs[0]))

        def action(core: Core) -> None:
            root, mine = opts.rootRank, flat_in(ins[0])
            what = f"{str(mine.dtype).removeprefix('torch.')}[{mine.numel()}] to rank {core.wire.members[root]}"
            core.wire.begin(Signature("gather", what))
            if core.me == root:
                _exchange_all(core, [mine[:0]] * root + [mine] + [mine[:0]] * (core.ranks - root - 1), outs[0])
            else:
                core.wire.exchange([(root, mine)], []).wait()

        return self._run("gather", "-", ins, action, opts)

    def scatter(self, outs: list[torch.Tensor], ins: list[list[torch.Tensor]], opts: Any = None) -> Any:
        opts = opts or dist.ScatterOptions()
        if self.state.rank == opts.rootRank:
            if len(ins[0]) != self.state.size:
                raise ValueError(f"scatter: found {len(ins[0])} inputs for {self.state.size} ranks")
            fit("scatter", ((outs[0], piece) for piece in ins[0]))

        def action(core: Core) -> None:
            root = opts.rootRank
            target, finish = flat_out(outs[0])
            what = f"{str(target.dtype).removeprefix('torch.')}[{target.numel()}] from rank {core.wire.members[root]}"
            core.wire.begin(Signature("scatter", what))
            if core.me == root:
                pieces = [flat_in(piece) for piece in ins[0]]
                core.wire.exchange([(r, pieces[r]) for r in core.wire.others], []).wait()
                target.copy_(pieces[root])
            else:
                core.wire.exchange([], [(root, target)]).wait()
            finish()

        return self._run("scatter", "-", outs, action, opts)

    def barrier(self, opts: Any = None) -> Any:
        return self._run("barrier", "-", [], lambda core: core.wire.meet(), opts)

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        """The barrier names who is missing already."""
        self.barrier().wait()

    # -- point to point: the vendor's, unchanged ----------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Any:
        return self._point("send", tensors, lambda vendor: vendor.send(tensors, dst, check_tag(tag)))

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Any:
        return self._point("recv", tensors, lambda vendor: vendor.recv(tensors, src, check_tag(tag)))

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Any:
        return self._point("recv_anysource", tensors, lambda vendor: vendor.recv_anysource(tensors, check_tag(tag)))

    def _point(self, operation: str, tensors: list[torch.Tensor], call: Callable[[Any], Any]) -> Any:
        record(self.state.label(), self.state.size, operation, "-", tensors)
        work = call(self.state.core_for(tensors[0]).wire.vendor)
        if self.state.coalescing is not None:
            self.state.coalescing.append(work)
        return work

    # -- what is not served -------------------------------------------------------------------------------------------

    def allreduce_sparse(self, *_: Any, **__: Any) -> Any:
        raise refuse_unordered("all_reduce of a sparse tensor", "allreduce_sparse", torch.float32)


def _exchange_all(core: Core, ins: Views, outs: Views) -> None:
    """``ins[r]`` to rank r, ``outs[r]`` from rank r; strided outputs are written through a copy."""
    written = [flat_out(out) for out in outs]
    pending = core.wire.exchange(
        [(r, ins[r]) for r in core.wire.others], [(r, written[r][0]) for r in core.wire.others]
    )
    written[core.me][0].copy_(ins[core.me])
    pending.wait()
    for _, finish in written:
        finish()


def _exact(vendor: Any, tensor: torch.Tensor, op: Any, root: int | None) -> Any:
    """A reduction that is exact in any order. The vendor wants a contiguous tensor."""
    opts = dist.AllreduceOptions() if root is None else dist.ReduceOptions()
    opts.reduceOp = op
    if root is None:
        return vendor.allreduce([tensor], opts)
    opts.rootRank = root
    return vendor.reduce([tensor], opts)
