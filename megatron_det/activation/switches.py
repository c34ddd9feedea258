"""torch's switches: set before the model is built, looked at again before every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_det.errors import GuaranteeBroken


def set_all(debug: bool) -> Callable[[], None]:
    """Sets them; returns the undo. ``debug`` also fills fresh memory with NaN, so that reads of it show."""
    matmul, cudnn, fill = torch.backends.cuda.matmul, torch.backends.cudnn, torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    values: list[tuple[Any, str, Any]] = [
        (fill, "fill_uninitialized_memory", debug),
        (cudnn, "benchmark", False),
        (cudnn, "deterministic", True),
        (matmul, "allow_bf16_reduced_precision_reduction", False),
        (matmul, "allow_fp16_reduced_precision_reduction", False),
    ]
    old = [(holder, name, getattr(holder, name)) for holder, name, _ in values]
    for holder, name, value in values:
        setattr(holder, name, value)
    torch.use_deterministic_algorithms(True, warn_only=False)

    def undo() -> None:
        for holder, name, value in old:
            setattr(holder, name, value)
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])

    return undo


def check(debug: bool) -> Callable[..., None]:
    """A hook for before every step. Raises: GuaranteeBroken when somebody turned a switch."""

    def hook(iteration: int, *_: Any) -> None:
        found = {
            "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled()
            and not torch.is_deterministic_algorithms_warn_only_enabled(),
            "fill_uninitialized_memory as planned": torch.utils.deterministic.fill_uninitialized_memory == debug,
            "torch.backends.cudnn.benchmark off": not torch.backends.cudnn.benchmark,
        }
        for name, holds in found.items():
            if not holds:
                raise GuaranteeBroken.of(
                    "DET-SWITCH", name, found=f"changed before iteration {iteration}", needed="as --det set it",
                    why="Half a deterministic mode is none.", do="remove the code that changes it.",
                )  # fmt: skip

    return hook
