"""Embeddings whose backward adds the gradients of a word in token order.

Replaces  the ``forward`` of ``VocabParallelEmbedding`` and of ``torch.nn.Embedding``
Why       with ``deterministic_mode`` Megatron's backward is ``index_put_(accumulate=True)``; without torch's own switch
          as well, 14 of 30 gradients differed on two threads. This one needs neither switch
Level     placement; and layout along the vocabulary: a word's gradient has the same bits for every tensor-parallel size
Source    ``megatron.core.tensor_parallel.layers``, 0.19.2: construction, initialisation and checkpointing are inherited
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from megatron_det.errors import Refused
from megatron_det.kernels.segment_sum import Lookup


class DetVocabParallelEmbedding(VocabParallelEmbedding):
    """Shapes: ids [b, s] -> [b, s, H]; with ``reduce_scatter_embeddings`` [s / tp, b, H]. ``runs`` counts forwards.

    The sum over the ranks adds one row to zeros: exact in any order. Raises: Refused for a GTP-sharded table.
    """

    runs: Counter[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._took_over()

    def _took_over(self) -> None:
        if self.gtp_remat_size > 1:
            raise Refused.of(
                "DET-EMBEDDING",
                "embedding sharded by GTP",
                found=f"GTP size {self.gtp_remat_size}",
                needed="GTP size 1",
                why="Its backward is Megatron's, in no written-down order.",
                do="train without GTP.",
            )
        self.runs = Counter()

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        self.runs["lookup"] += 1
        share = self.tp_group.size() > 1
        ids = input_ - self.vocab_start_index if share else input_
        rows: Any = Lookup.apply(self.weight, ids, share)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(rows.transpose(0, 1).contiguous(), group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(rows, group=self.tp_group) if share else rows


class DetEmbedding(torch.nn.Embedding):
    """Learned positions and token types. Shapes: ids [...] -> [..., H]."""

    runs: Counter[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._took_over()

    def _took_over(self) -> None:
        odd = [name for name in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(self, name)]
        if self.padding_idx is not None:
            odd.append("padding_idx")
        if odd:
            raise Refused.of(
                "DET-EMBEDDING",
                "torch.nn.Embedding",
                found=", ".join(odd),
                needed="a plain table",
                why="The ordered backward knows only sums.",
                do="build the embedding without these options.",
            )
        self.runs = Counter()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.runs["lookup"] += 1
        rows: Any = Lookup.apply(self.weight, input, False)
        return rows


def take_over(module: torch.nn.Module) -> bool:
    """Turns Megatron's or torch's embedding into ours, in place: parameters, hooks and names stay. False: not one.

    Only the exact classes: a subclass has a forward of its own.
    """
    ours = {VocabParallelEmbedding: DetVocabParallelEmbedding, torch.nn.Embedding: DetEmbedding}.get(type(module))
    if ours is None:
        return False
    module.__class__ = ours
    module._took_over()
    return True
