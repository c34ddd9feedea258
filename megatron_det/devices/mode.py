"""Rewrites what Python code asks of torch: device arguments, ``.cuda()``, type names, random draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from megatron_det.devices.streams import Streams

CPU = torch.device("cpu")


def is_cuda(device: Any) -> bool:
    """Whether this device argument names a CUDA device (a bare index does)."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def is_cpu(device: Any) -> bool:
    return (isinstance(device, torch.device) and device.type == "cpu") or device == "cpu"


class StandInMode(TorchFunctionMode):
    """Active for the whole process, backward included: CPU graphs run in the calling thread."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.streams = streams
        self.special: dict[Any, Callable[..., Any]] = {
            torch.Tensor.cuda: _stay,
            torch.Tensor.pin_memory: _stay,
            torch.Tensor.cpu: _copy_to_host,
            torch.Tensor.type: _type,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs) if kwargs else {}
        if func is torch.Tensor.to:
            return _to(*args, **kwargs)
        asked_for_cuda = is_cuda(kwargs.get("device"))
        if asked_for_cuda:
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        special = self.special.get(func)
        if special is not None:
            return special(*args, **kwargs)
        name = getattr(func, "__name__", "")
        on_tensors = any(isinstance(a, torch.Tensor) for a in (*args, *kwargs.values()))
        if self.streams.is_device_draw(name, kwargs, asked_for_cuda or on_tensors):
            with self.streams.drawing():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    @contextmanager
    def again(self) -> Iterator[None]:
        """torch takes the mode off while it handles a function. A backward is one, and what runs inside (recomputation,
        custom functions) needs the mode: it is put on again, unless it is on."""
        if any(mode is self for mode in _get_current_function_mode_stack()):
            yield
        else:
            with self:
                yield


def _stay(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


def _copy_to_host(tensor: torch.Tensor, *_: Any, **kwargs: Any) -> torch.Tensor:
    """On a GPU ``.cpu()`` is a copy: a snapshot must not change when the parameter does."""
    return tensor.clone(**kwargs)


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    asked = kwargs.get("device", args[0] if args else None)
    if is_cuda(asked):
        if "device" in kwargs:
            kwargs["device"] = CPU
        else:
            args = (CPU, *args[1:])
    moved = torch.Tensor.to(tensor, *args, **kwargs)
    return moved.clone() if is_cpu(asked) and moved is tensor else moved


def _type(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Megatron compares ``tensor.type()`` with ``'torch.cuda.BFloat16Tensor'``."""
    if dtype is None:
        return torch.Tensor.type(tensor).replace("torch.", "torch.cuda.", 1)
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.")
    return torch.Tensor.type(tensor, dtype, *args, **kwargs)
