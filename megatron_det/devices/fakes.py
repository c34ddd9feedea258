"""What stands for CUDA's objects: streams and events that are always done, properties of no device, tensor types."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch


class Stream:
    """A stream on which all work is done at once."""

    cuda_stream = 0
    device_index = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Event:
        return event if event is not None else Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class Event:
    """An event that has happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0


class Properties:
    """Device properties that open no feature gate and close none that Megatron's plain path needs."""

    name = "cpu-standin"
    major = 9
    minor = 0
    total_memory = 2**34
    multi_processor_count = 1


CURRENT = Stream()


class DeviceIndex:
    """What ``torch.cuda.set_device`` set."""

    def __init__(self) -> None:
        self.value = 0

    def set(self, device: Any) -> None:
        index = device.index if isinstance(device, torch.device) else device
        self.value = int(str(index or 0).rpartition(":")[2])

    def get(self) -> int:
        return self.value


class DeviceScope:
    """``torch.cuda.device(…)`` as a context."""

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> DeviceScope:
        return self

    def __exit__(self, *_: Any) -> None: ...


class StreamScope(DeviceScope):
    """``torch.cuda.stream(…)`` as a context."""


class _Constructor:
    dtype = torch.float32

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return torch.tensor(args[0] if args else [], dtype=cls.dtype)


class FloatTensor(_Constructor):
    """``torch.cuda.FloatTensor``: a type (for isinstance) whose call makes a tensor."""


class IntTensor(_Constructor):
    dtype = torch.int32


class LongTensor(_Constructor):
    dtype = torch.int64


def memory_stats(*_: Any, **__: Any) -> dict[str, int]:
    return defaultdict(int)


class Generators(tuple):
    """``torch.cuda.default_generators``: one device generator, whatever the index."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        return tuple.__getitem__(self, 0)
