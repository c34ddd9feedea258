"""Times our dense modules against Megatron's default branch and its deterministic one: forward and backward, on CPU.

Pairs are interleaved, so that load on the machine meets both. Prints the median ratio and its quartiles.

Example:
    OMP_NUM_THREADS=1 python scripts/bench_dense.py
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

PAIRS = 31


def seconds(run: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - start) / times


def compare(name: str, ours: Callable[[], Any], theirs: Callable[[], Any]) -> None:
    seconds(ours, 2), seconds(theirs, 2)
    times = max(1, int(0.004 / max(seconds(theirs, 1), 1e-6)))
    pairs = [(seconds(ours, times), seconds(theirs, times)) for _ in range(PAIRS)]
    low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4)
    a, b = (statistics.median(column) * 1e6 for column in zip(*pairs, strict=True))
    print(f"{name:58} {a:9.0f} us {b:9.0f} us   {middle:5.2f}  ({low:.2f} … {high:.2f})", flush=True)


def norms(rows: int, width: int, dtype: torch.dtype) -> None:
    from megatron_det.kernels.norm import Norm

    x = torch.randn(rows, width, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)
    for kind in ("RMSNorm", "LayerNorm"):
        theirs = getattr(torch.nn, kind)(width, eps=1e-5).to(dtype)
        words = (theirs.weight, getattr(theirs, "bias", None), 1e-5, kind == "LayerNorm", False)
        compare(f"{kind} {rows} x {width} {dtype}", lambda words=words: Norm.apply(x, *words).backward(grad),
                lambda theirs=theirs: theirs(x).backward(grad))  # fmt: skip


def embeddings(rows: int, width: int, words: int, dtype: torch.dtype) -> None:
    from megatron_det.kernels.segment_sum import Lookup

    table = torch.randn(words, width, dtype=dtype, requires_grad=True)
    ids = (torch.rand(rows) ** 3 * words).long()
    grad = torch.randn(rows, width, dtype=dtype)
    branches = {"default": lambda: torch.nn.functional.embedding(ids, table), "deterministic": lambda: table[ids]}
    for branch, theirs in branches.items():
        torch.use_deterministic_algorithms(branch == "deterministic")
        compare(f"embedding {rows} x {width}, {words} words {dtype}, {branch}",
                lambda: Lookup.apply(table, ids, False).backward(grad),
                lambda theirs=theirs: theirs().backward(grad))  # fmt: skip
    torch.use_deterministic_algorithms(False)


def losses(rows: int, words: int, dtype: torch.dtype) -> None:
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy as theirs

    from megatron_det.modules.cross_entropy import vocab_parallel_cross_entropy as ours

    group = torch.distributed.group.WORLD
    logits = torch.randn(rows, 1, words, dtype=dtype, requires_grad=True)
    target = torch.randint(0, words, (rows, 1))
    ones = torch.ones(rows, 1)
    compare(f"cross entropy {rows} x {words} {dtype}", lambda: ours(logits, target, 0.0, group).backward(ones),
            lambda: theirs(logits * 1, target, 0.0, group).backward(ones))  # fmt: skip


def attentions(s: int, heads: int, width: int, dtype: torch.dtype) -> None:
    """Flash against what Megatron's unfused path computes (scores, mask, softmax, context)."""
    from megatron_det.modules.attention import flash

    q, k, v = (torch.randn(2, heads, s, width, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.randn(2, heads, s, width, dtype=dtype)
    mask = torch.ones(s, s, dtype=torch.bool).triu(1)

    def theirs() -> torch.Tensor:
        scores = (q @ k.transpose(-1, -2) * width**-0.5).masked_fill(mask, -10000.0)
        return scores.softmax(-1) @ v

    compare(f"attention 2 x {heads} x {s} x {width} {dtype}",
            lambda: flash(q, k, v, 0.0, width**-0.5, True).backward(grad), lambda: theirs().backward(grad))  # fmt: skip


def main() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("MASTER_PORT", "29577"))
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    print(f"{'':58} {'ours':>12} {'Megatron':>12}   ratio  (quartiles)   threads: {torch.get_num_threads()}")
    for dtype in (torch.bfloat16, torch.float32):
        norms(256, 128, dtype)
        norms(1024, 1024, dtype)
        embeddings(256, 128, 384, dtype)
        embeddings(1024, 1024, 32768, dtype)
        losses(256, 384, dtype)
        losses(256, 32768, dtype)
        attentions(128, 4, 32, dtype)
        attentions(512, 8, 64, dtype)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
