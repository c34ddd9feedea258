"""Tensors as flat views, one per rank, and whether they fit each other. What is returned is one-dimensional."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from megatron_det.collectives.core import Views


def describe(*tensors: torch.Tensor) -> str:
    """dtype and shape, as they are compared between ranks."""
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)


def fit(operation: str, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Each output against the input that comes into it, before anything is sent. Raises: ValueError."""
    for out, given in pairs:
        if out.dtype != given.dtype or out.numel() != given.numel():
            raise ValueError(f"{operation}: found an output of {describe(out)} for {describe(given)}")


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as one dimension of stride 1. ``view`` keeps the stride of a dimension of one element."""
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("a lazily conjugated or negated view: call resolve_conj() or resolve_neg() first")
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def flat_out(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
    """A flat view to write to, and what to do afterwards: a strided tensor is written through a copy."""
    if tensor.is_contiguous():
        return flat(tensor), lambda: None
    whole = flat(tensor.contiguous())

    def finish() -> None:
        tensor.detach().copy_(whole.view(tensor.shape))

    return whole, finish


def flat_in(tensor: torch.Tensor) -> torch.Tensor:
    return flat(tensor.contiguous())


def sizes(views: Views, me: int) -> dict[int, int]:
    return {r: view.numel() * view.element_size() for r, view in enumerate(views) if r != me}


def misfit(operation: str, whole: torch.Tensor, piece: torch.Tensor, ranks: int) -> str:
    return f"{operation}: found {list(whole.shape)} for pieces of {list(piece.shape)} from {ranks} ranks"


def rows(tensor: torch.Tensor, parts: int, split: list[int] | None = None) -> list[torch.Tensor]:
    """A tensor as one flat view per rank: by rows of the first dimension, or equal pieces."""
    whole = flat_in(tensor)
    if not split:
        if whole.numel() % parts:
            raise ValueError(f"found {list(tensor.shape)} to cut into {parts} equal pieces")
        size = whole.numel() // parts
        return [whole[r * size : (r + 1) * size] for r in range(parts)]
    row = whole.numel() // max(sum(split), 1)
    return list(whole.split([many * row for many in split]))
