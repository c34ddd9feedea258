"""The language model's loss over a vocabulary split by tensor parallelism: in order, and lean.

Replaces      ``megatron.core.tensor_parallel.vocab_parallel_cross_entropy`` and ``compute_language_model_loss``
Why           shares are added in rank order (Megatron: an all-reduce, in the transport's order, for more than two
              ranks); sums along the words are written down; ``--cross-entropy-loss-fusion`` is refused upstream
Level         placement
Leaves alone  the caller's logits: Megatron's subtracts in place when they are fp32
Differs       label smoothing with a split vocabulary: the mean goes over all words. Megatron's goes over each rank's
              own, so that its ranks have other losses than each other
Source        ``megatron.core.tensor_parallel.cross_entropy``, 0.19.2 (the formula)
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_tensor_model_parallel_group

from megatron_det.errors import Refused
from megatron_det.kernels import cross_entropy as kernel
from megatron_det.kernels.tree import pairs


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, smoothing: float, group: Any) -> torch.Tensor:
        ranks, rank = group.size(), group.rank()
        share = logits.shape[-1]
        flat = logits.reshape(-1, share)
        here = target.reshape(-1) - rank * share
        top = kernel.top(flat)
        if ranks > 1:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        total = _over_ranks(kernel.sums(flat, here, top, smoothing > 0), group)
        loss = kernel.loss(total, smoothing, share * ranks)
        ctx.save_for_backward(logits, here, top, total[0])
        ctx.smoothing, ctx.words = smoothing, share * ranks
        return loss.view(target.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, here, top, total = ctx.saved_tensors
        flat = logits.reshape(-1, logits.shape[-1])
        grad = kernel.gradient(flat, here, top, total, grads[0].reshape(-1).float(), ctx.smoothing, ctx.words)
        return grad.view(logits.shape), None, None, None


def _over_ranks(sums: torch.Tensor, group: Any) -> torch.Tensor:
    """The shares' sums added as neighbouring pairs of ranks: the same on all ranks, whatever the transport."""
    if group.size() == 1:
        return sums
    shares = [torch.empty_like(sums) for _ in range(group.size())]
    dist.all_gather(shares, sums, group=group)
    return pairs(torch.stack(shares))


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    tp_group: Any = None,
) -> torch.Tensor:
    """Shapes: logits [s, b, words / tp], target [s, b] with word numbers of the whole vocabulary -> [s, b], fp32.

    Raises: Refused for a smoothing outside 0 … 1.
    """
    if not 0.0 <= label_smoothing < 1.0:
        raise Refused.of(
            "DET-SMOOTHING",
            "label smoothing",
            found=label_smoothing,
            needed="0 <= smoothing < 1",
            why="It is a share of the probability.",
            do="give a value in this range.",
        )
    group = tp_group if tp_group is not None else get_tensor_model_parallel_group()
    result: Any = _CrossEntropy.apply(vocab_parallel_logits, target, label_smoothing, group)
    return result


class DetLoss:
    """Stands in for a model's ``compute_language_model_loss``. ``runs`` counts calls.

    Shapes: labels [b, s], logits [s, b, words / tp] -> [b, s].
    """

    def __init__(self, tp_group: Any) -> None:
        self.tp_group = tp_group
        self.runs: Counter[str] = Counter()

    def __call__(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        self.runs["loss"] += 1
        loss = vocab_parallel_cross_entropy(logits, labels.transpose(0, 1).contiguous(), tp_group=self.tp_group)
        return loss.transpose(0, 1).contiguous()
