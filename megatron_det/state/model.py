"""Parameters and persistent buffers of Megatron's model chunks, by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def prefix(index: int, chunks: list[Any]) -> str:
    return f"chunk{index}/" if len(chunks) > 1 else ""


def plain(name: str) -> str:
    """The name without the wrappers' ``module.`` prefixes (DDP, Float16Module)."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def parameters(chunks: list[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for index, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            yield prefix(index, chunks) + plain(name), parameter


def buffers(chunks: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Persistent buffers (those a checkpoint holds), such as the router's expert bias."""
    for index, chunk in enumerate(chunks):
        for path, module in chunk.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield prefix(index, chunks) + plain(f"{path}.{name}" if path else name), buffer
