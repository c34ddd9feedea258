"""Cross entropy over a vocabulary that may be cut into shares; what travels between ranks is left to the caller.

    top = max x;  S = sum exp(x - top);  loss = log S - (x[target] - top)

With smoothing a, K words and s = a K / (K - 1): (1 - s) loss - s (mean (x - top) - log S), as Megatron has it.

Order    along the share's words: ``tree.last_dim``; the caller adds the shares in rank order
Level    placement; a row's loss depends on no other row, and not on CHUNK
Shapes   logits [n, words of the share], any floating type; target [n] counted from the share's first word, and
         outside 0 … words - 1 where another share holds it; sums [3, n] and all results in fp32
Memory   keeps the logits as they came and two fp32 numbers per row; the backward computes exp again, CHUNK elements at
         a time. Megatron's keeps the softmax in fp32: twice the bytes of bf16 logits again
Error    relative error of S at most (ceil(log2 K) + 3) * 2**-24 per share, plus exp's own (1 ulp)

Worked example: logits [0, log 3], target 1: top = log 3, S = 1 + 1/3, loss = log(4/3).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_det.kernels.tree import last_dim

CHUNK = 1 << 18


def _chunks(rows: int, words: int) -> Iterator[slice]:
    step = max(1, CHUNK // max(1, words))
    for low in range(0, rows, step):
        yield slice(low, min(rows, low + step))


def top(logits: torch.Tensor) -> torch.Tensor:
    """Shapes: [n, words] -> [n], fp32. Exact: no order."""
    return logits.amax(-1).float()


def sums(logits: torch.Tensor, target: torch.Tensor, top: torch.Tensor, smooth: bool) -> torch.Tensor:
    """Shapes: -> [3, n]: sum exp(x - top); x[target] - top, 0 where elsewhere; sum (x - top), 0 unless ``smooth``."""
    rows, words = logits.shape
    out = torch.zeros((3, rows), dtype=torch.float32, device=logits.device)
    here = (target >= 0) & (target < words)
    column = target.masked_fill(~here, 0).unsqueeze(1)
    for part in _chunks(rows, words):
        wide = logits[part].float() - top[part].unsqueeze(1)
        out[1, part] = wide.gather(1, column[part]).squeeze(1)
        if smooth:
            out[2, part] = last_dim(wide).squeeze(1)
        out[0, part] = last_dim(wide.exp_()).squeeze(1)
    out[1].masked_fill_(~here, 0.0)
    return out


def loss(total: torch.Tensor, smoothing: float, words: int) -> torch.Tensor:
    """Shapes: total [3, n], added over the shares -> [n]. ``words``: of the whole vocabulary."""
    log_sum = total[0].log()
    plain = log_sum - total[1]
    if not smoothing:
        return plain
    share = smoothing * words / (words - 1)
    return plain * (1.0 - share) - (total[2] / words - log_sum) * share


def gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    top: torch.Tensor,
    total: torch.Tensor,
    grad: torch.Tensor,
    smoothing: float,
    words: int,
) -> torch.Tensor:
    """(softmax - (1 - s) [word is the target] - s / K) * grad. Shapes: total, grad [n] -> [n, words of the share]."""
    share = smoothing * words / (words - 1) if smoothing else 0.0
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    here = (target >= 0) & (target < logits.shape[1])
    column = target.masked_fill(~here, 0).unsqueeze(1)
    hit = here.float().mul_(1.0 - share).unsqueeze(1)
    for part in _chunks(*logits.shape):
        wide = (logits[part].float() - top[part].unsqueeze(1)).exp_().div_(total[part].unsqueeze(1))
        wide.scatter_(1, column[part], wide.gather(1, column[part]) - hit[part])  # one place per row: no order
        if share:
            wide.sub_(share / words)
        out[part] = wide.mul_(grad[part].unsqueeze(1))
    return out
