"""Exact values of many tensors at once: on the host by a few threads, on a device one after another.

Memory: streaming. Beside the tensors themselves each thread holds a few times 512 KiB (``formats.digest.CHUNK``), and a
contiguous copy of a tensor that is not contiguous.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from megatron_det.kernels.fingerprint import value

THREADS = 8
ALONE = 1 << 16  # bytes: smaller tensors are not worth a thread

Item = tuple[str, Any]


def values(items: Iterable[Item], threads: int | None = None) -> list[tuple[str, dict[str, Any]]]:
    """(name, exact value) in the order of ``items``; dictionaries are taken as ready values.

    Level: placement (integer sums: the number of threads changes no value).
    """
    given = list(items)
    large = [one for _, one in given if _on_host(one)]
    count = min(threads or min(THREADS, len(os.sched_getaffinity(0))), len(large))
    if count < 2:
        return [(name, _value(one)) for name, one in given]
    with ThreadPoolExecutor(count) as pool:
        coming = [(name, pool.submit(_value, one) if _on_host(one) else None, one) for name, one in given]
        return [(name, future.result() if future else _value(one)) for name, future, one in coming]


def _on_host(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.device.type == "cpu" and one.numel() * one.element_size() > ALONE


def _value(one: Any) -> dict[str, Any]:
    return one if isinstance(one, dict) else value(one)
