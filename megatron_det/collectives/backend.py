"""The ``det`` backend for torch.distributed: ``register()``, then ``init_process_group("det")`` or ``new_group``.

A group is a Python ProcessGroup that carries a Python Backend over the vendor's (gloo for CPU tensors, NCCL for CUDA).
Two objects, because callers come in two ways: Python calls the ProcessGroup's methods and gets our ``Work``; C++
(DDP, functional collectives, device meshes) asks the ProcessGroup for its Backend, which torch 2.14 lets Python write.
Older torch has no such Backend: there C++ comes through the ProcessGroup's virtual methods, under their old names.

Level   placement
Source  torch.distributed's third-party backends (``Backend.register_backend``)
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as C10dBackend

from megatron_det.collectives.core import ByNode, Core
from megatron_det.collectives.operations import Operations
from megatron_det.collectives.order import blocks
from megatron_det.collectives.settings import Settings
from megatron_det.collectives.transport import GlooWire, NcclWire, Wire
from megatron_det.collectives.work import Lane, Several
from megatron_det.errors import GuaranteeBroken

NAME = "det"
CUSTOM = dist.ProcessGroup.BackendType.CUSTOM
PYTHON_BACKENDS = "rank" in (C10dBackend.__init__.__doc__ or "")  # from torch 2.14 on
_defaults = Settings()


class GroupState:
    """What the two objects of one group share."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, members: list[int], settings: Settings,
                 options: Any = None) -> None:  # fmt: skip
        self.rank, self.size, self.members, self.settings = rank, size, members, settings
        self.name, self.desc = "?", ""
        self.lane = Lane(f"{rank}-of-{size}")
        self.coalescing: list[Any] | None = None
        self._store, self._timeout, self._options = store, timeout, options
        self._cores: dict[str, Core] = {}
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, size, timeout)
        self._gloo = GlooWire(gloo, rank, members, settings.checks or "always")
        self._cores["cpu"] = Core(self._gloo, settings)
        store.set(f"det/{rank}", f"{settings.node}\n{settings.shared()}")
        self._met = size == 1
        self._per_node: int | None = None

    def label(self) -> str:
        return f"{self.name} {self.desc}" if self.desc not in ("", "undefined") else self.name

    def core_for(self, tensor: torch.Tensor | None) -> Core:
        """The plans for a tensor's device. Raises: GuaranteeBroken when ranks have different settings."""
        kind = "cpu" if tensor is None else tensor.device.type
        if kind not in self._cores:
            self._cores[kind] = Core(self._nccl(), self.settings)
        if not self._met:
            self._meet()
        core = self._cores[kind]
        core.wire.name = self.label()
        if self._per_node and core.by_node is None:
            core.by_node = ByNode(core, self._per_node)
        return core

    def _nccl(self) -> Wire:
        nccl = dist.ProcessGroupNCCL
        options = self._options if isinstance(self._options, nccl.Options) else nccl.Options()
        options._timeout = self._timeout
        vendor = nccl(dist.PrefixStore("nccl/", self._store), self.rank, self.size, options)
        return NcclWire(vendor, self.rank, self.members, self.settings.checks or "first", self._gloo)

    def _meet(self) -> None:
        """Once, at the first call: where everybody is, and that everybody has the same settings."""
        keys = [f"det/{rank}" for rank in range(self.size)]
        self._store.wait(keys, self._timeout)
        said = [self._store.get(key).decode().partition("\n") for key in keys]
        different = [rank for rank, (_, _, shared) in enumerate(said) if shared != self.settings.shared()]
        if different:
            raise GuaranteeBroken.of(
                "DET-COLLECTIVE-SETTINGS", f"settings of group {self.label()}",
                found=f"{said[different[0]][2]} on rank {self.members[different[0]]}, "
                f"{self.settings.shared()} on rank {self.members[self.rank]}",
                needed="the same on all ranks", why="The order of a sum would follow the rank that makes it.",
                do="give all ranks the same settings.",
            )  # fmt: skip
        self._met = True
        self._per_node = blocks([node for node, _, _ in said]) if self.settings.order == "tree" else None

    def cores(self) -> list[Core]:
        return list(self._cores.values())

    def core_wire(self, kind: str) -> Wire:
        return self._cores[kind].wire

    def stop(self, method: str) -> None:
        self.lane.stop()
        for core in self._cores.values():
            getattr(core.wire.vendor, method)()


class _Group(Operations):
    """What is not an operation: names, coalescing, the end."""

    state: GroupState

    def getBackendName(self) -> str:
        return NAME

    def start_coalescing(self, *_: Any) -> None:
        self.state.coalescing = []

    def end_coalescing(self, *_: Any) -> Any:
        works, self.state.coalescing = self.state.coalescing or [], None
        return Several(works)

    _start_coalescing, _end_coalescing = start_coalescing, end_coalescing

    def set_timeout(self, timeout: timedelta) -> None:
        for core in self.state.cores():
            core.wire.vendor.set_timeout(timeout)

    def _get_sequence_number_for_group(self) -> int:
        return self.state.core_wire("cpu").calls

    def _set_sequence_number_for_group(self) -> None:
        """The number starts at zero when the group is made."""

    def shutdown(self) -> None:
        self.state.stop("shutdown")

    def abort(self) -> None:
        self.state.stop("abort")


class DetBackend(_Group, C10dBackend):
    """For C++ callers. Properties are defined here: torch would look them up on this object without end."""

    supports_coalescing = False
    supports_splitting = False
    supports_shrinking = False
    supports_time_estimate = False
    supports_reconfigure = False
    supports_window = False

    def __init__(self, state: GroupState) -> None:
        super().__init__(state.rank, state.size)
        self.state = state


class DetProcessGroup(_Group, dist.ProcessGroup):
    """For Python callers; torch 2.10 to 2.13 call its virtual methods from C++ too, under their older names."""

    def __init__(self, store: Any, state: GroupState) -> None:
        if PYTHON_BACKENDS:
            super().__init__(store, state.rank, state.size)
            backend, kind = DetBackend(state), CUSTOM
            devices = ["cpu", "cuda"]
        else:  # what torch asks a Backend there (whether it coalesces, for one) adds nothing
            super().__init__(state.rank, state.size)
            backend, kind, devices = state.core_wire("cpu").vendor, dist.ProcessGroup.BackendType.GLOO, ["cpu"]
        self.state = state
        self.backend = backend  # held: C++ keeps no reference to a Python object
        self._set_default_backend(kind)
        for device in devices:
            self._register_backend(torch.device(device), kind, backend)

    def _set_group_name(self, name: str) -> None:
        self.state.name = name
        super()._set_group_name(name)

    def _set_group_desc(self, desc: str) -> None:
        self.state.desc = desc
        super()._set_group_desc(desc)

    _allgather_base = Operations.all_gather_single
    allgather_into_tensor_coalesced = Operations.all_gather_single_coalesced
    alltoall_base = Operations.all_to_all_single
    _reduce_scatter_base = Operations.reduce_scatter_single
    reduce_scatter_tensor_coalesced = Operations.reduce_scatter_single_coalesced


def create(options: Any, backend_options: Any = None) -> DetProcessGroup:
    """Called by c10d for each new group. ``pg_options`` may be ``Settings``, or NCCL's options for the vendor."""
    settings = backend_options if isinstance(backend_options, Settings) else _defaults
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    state = GroupState(
        options.store, options.group_rank, options.group_size, options.timeout, members, settings, backend_options
    )
    return DetProcessGroup(options.store, state)


def register(settings: Settings | None = None) -> None:
    """Makes ``det`` known to torch.distributed. ``settings`` become those of groups made from now on."""
    global _defaults
    if settings is not None:
        _defaults = settings
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
