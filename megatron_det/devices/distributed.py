"""Process groups of the stand-in: gloo, whatever was asked for. The call is adapted, never the order of a sum."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_det.devices.streams import Streams

NOT_FOR_GLOO = ("device_id", "pg_options")


def counted(original: Any, replacement: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
    """``replacement`` under the name of ``original``, counting its calls."""

    def call(*args: Any, **kwargs: Any) -> Any:
        ran()
        return replacement(*args, **kwargs)

    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        if isinstance(getattr(original, attribute, None), str):
            setattr(call, attribute, getattr(original, attribute))
    return call


def _backend(name: Any) -> Any:
    return "gloo" if name is None or "nccl" in str(name) else name


def init_process_group(original: Any, streams: Streams) -> Any:
    def run(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs = {k: v for k, v in kwargs.items() if k not in NOT_FOR_GLOO}
        return original(_backend(backend), *args, **kwargs)

    return run


def new_group(original: Any, streams: Streams) -> Any:
    def run(ranks: Any = None, timeout: Any = None, backend: Any = None, *_: Any, **kwargs: Any) -> Any:
        kwargs = {k: v for k, v in kwargs.items() if k not in NOT_FOR_GLOO}
        if backend is not None:
            kwargs["backend"] = _backend(backend)
        return original(ranks, timeout, **kwargs)

    return run


def barrier(original: Any, streams: Streams) -> Any:
    def run(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return original(group=group, async_op=async_op)

    return run


def all_reduce(original: Any, streams: Streams) -> Any:
    @functools.wraps(original)
    def run(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if op != dist.ReduceOp.AVG or dist.get_backend(group) != "gloo":
            return original(tensor, op=op, group=group, async_op=async_op)
        work = original(tensor, op=dist.ReduceOp.SUM, group=group, async_op=async_op)
        if work is not None:
            work.wait()
        tensor.div_(dist.get_world_size(group))
        return work

    return run


def all_to_all_single(original: Any, streams: Streams) -> Any:
    def as_list(sizes: Any) -> Any:
        return sizes.tolist() if hasattr(sizes, "tolist") else sizes

    def run(
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        sizes = as_list(output_split_sizes), as_list(input_split_sizes)
        return original(output, input, *sizes, group=group, async_op=async_op)

    return run
