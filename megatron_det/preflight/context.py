"""What the rules look at: a snapshot that activation gathers, so that rules are plain functions of data."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_det.contract.options import Options


@dataclass(frozen=True)
class Context:
    """``args`` is None for ``doctor`` (no training command). ``required_args`` and ``accepted_env`` and
    ``accepted_nccl`` are Megatron's own determinism tables (``megatron.training.determinism``)."""

    options: Options
    args: Namespace | None
    environment: Mapping[str, str]
    rank: int
    world_size: int
    gpu_visible: bool
    versions: Mapping[str, str | None]
    required_args: Mapping[str, Any] = field(default_factory=dict)
    accepted_env: Mapping[str, frozenset[str]] = field(default_factory=dict)
    accepted_nccl: frozenset[str] = frozenset()

    def arg(self, name: str, default: Any = None) -> Any:
        return getattr(self.args, name, default)
