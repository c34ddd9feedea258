"""Ratio det / vendor of all-reduce and reduce-scatter: per size and world size, interleaved repeats in one run.

Each line is one arm beside the vendor's in the same processes: median of the paired ratios, and the 10th and 90th
percentile. A line is printed only when the arm's bits are those of the single-process reference in that run.

    scripts/bench_collectives.py --ranks 2 4 --sizes 4K 1M 16M 64M
    scripts/bench_collectives.py --plans            # each plan forced, for the table of thresholds
    scripts/bench_collectives.py --vendor nccl --ranks 8 --json scripts/bench/results/nccl.json
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_det.collectives import Settings, register
from megatron_det.collectives.ordered_sum import reference

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Arm:
    """``operation`` by the group ``group``; ``group`` "vendor" is the one that the others are compared with."""

    operation: str
    group: str


def size_of(text: str) -> int:
    return int(float(text[:-1]) * UNITS[text[-1].upper()]) if text[-1].upper() in UNITS else int(text)


def plans(chosen: bool) -> dict[str, Settings]:
    if not chosen:
        return {"det": Settings()}
    return {
        "whole to all": Settings(trip_bytes=1 << 62, chunk_bytes=1 << 30, checks="never"),
        "pieces": Settings(trip_bytes=0, checks="never"),
        "pieces, checked": Settings(trip_bytes=0),
    }


def shard(rank: int, elements: int) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank))


class Case:
    """One operation on one size: its tensors, and the call."""

    def __init__(self, operation: str, elements: int, rank: int, ranks: int, device: torch.device) -> None:
        self.operation, self.rank, self.ranks = operation, rank, ranks
        self.elements = max(ranks, elements // ranks * ranks)
        self.input = shard(rank, self.elements).to(device)
        self.work = self.input.clone()
        self.out = torch.empty(self.elements // ranks, device=device)

    def call(self, group: Any) -> None:
        if self.operation == "all_reduce":
            dist.all_reduce(self.work, group=group)
        else:
            dist.reduce_scatter_tensor(self.out, self.input, group=group)
        if self.input.is_cuda:
            torch.cuda.synchronize()

    def right(self, group: Any, order: str) -> bool:
        """Whether the bits are those of the reference."""
        self.work.copy_(self.input)
        self.call(group)
        total = reference([shard(r, self.elements) for r in range(self.ranks)], order)
        low = self.rank * self.out.numel()
        if self.operation == "all_reduce":
            return torch.equal(self.work.cpu().view(torch.int32), total.view(torch.int32))
        return torch.equal(self.out.cpu().view(torch.int32), total[low : low + self.out.numel()].view(torch.int32))


def measure(case: Case, groups: dict[str, Any], repeats: int) -> dict[str, list[float]]:
    """Seconds per call, the arms in turn."""
    times: dict[str, list[float]] = {name: [] for name in groups}
    for turn in range(repeats + 2):
        for name, group in groups.items():
            case.work.copy_(case.input)
            dist.barrier(group=groups["vendor"])
            start = time.perf_counter()
            case.call(group)
            if turn >= 2:
                times[name].append(time.perf_counter() - start)
    return times


def worker(rank: int, ranks: int, port: int, wish: argparse.Namespace, out: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device = torch.device("cuda", rank) if wish.vendor == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(wish.vendor, rank=rank, world_size=ranks)
    register()
    settings = plans(wish.plans)
    groups: dict[str, Any] = {"vendor": dist.group.WORLD}
    for name, chosen in settings.items():
        groups[name] = dist.new_group(list(range(ranks)), backend="det", pg_options=chosen)
    rows = []
    for size in wish.sizes:
        for operation in ("all_reduce", "reduce_scatter"):
            if operation == "reduce_scatter" and wish.plans:
                continue
            case = Case(operation, size_of(size) // 4, rank, ranks, device)
            right = {name: case.right(groups[name], settings[name].order) for name in settings}
            times = measure(case, groups, wish.repeats)
            rows += [row_of(case, name, times, right[name]) for name in settings]
            if rank == 0:
                for row in rows[-len(settings) :]:
                    print(text_of(row), flush=True)
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def row_of(case: Case, name: str, times: dict[str, list[float]], right: bool) -> dict[str, Any]:
    ratios = sorted(a / b for a, b in zip(times[name], times["vendor"], strict=True))
    row: dict[str, Any] = {
        "ranks": case.ranks, "operation": case.operation, "bytes": case.elements * 4, "arm": name, "bits": right
    }  # fmt: skip
    if right:
        row |= {
            "ratio": statistics.median(ratios), "p10": ratios[len(ratios) // 10],
            "p90": ratios[-1 - len(ratios) // 10], "ms": 1e3 * statistics.median(times[name]),
            "vendor_ms": 1e3 * statistics.median(times["vendor"]), "repeats": len(ratios),
        }  # fmt: skip
    return row


def text_of(row: dict[str, Any]) -> str:
    head = f"{row['ranks']} ranks  {row['operation']:<14} {row['bytes'] / 1024:>8.0f} KiB  {row['arm']:<16}"
    if not row["bits"]:
        return f"{head} bits differ from the reference: no figure"
    return (
        f"{head} x{row['ratio']:.2f} of the vendor's ({row['p10']:.2f} to {row['p90']:.2f}), "
        f"{row['ms']:.2f} ms against {row['vendor_ms']:.2f}"
    )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], help="world sizes, one after the other")
    parser.add_argument(
        "--sizes", nargs="+", default=["1K", "64K", "1M", "16M", "64M"], help="bytes of fp32 input per rank"
    )
    parser.add_argument("--repeats", type=int, default=15, help="timed repeats per arm (two more are dropped)")
    parser.add_argument("--vendor", choices=("gloo", "nccl"), default="nccl" if torch.cuda.is_available() else "gloo")
    parser.add_argument("--plans", action="store_true", help="measure each all-reduce plan, forced")
    parser.add_argument("--json", metavar="FILE", help="write the rows here")
    wish = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for ranks in wish.ranks:
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder) / "rows.json")
            mp.spawn(worker, args=(ranks, free_port(), wish, out), nprocs=ranks)
            rows += json.loads(Path(out).read_text())
    if wish.json:
        Path(wish.json).parent.mkdir(parents=True, exist_ok=True)
        head = {"torch": torch.__version__, "vendor": wish.vendor, "cores": os.cpu_count(), "rows": rows}
        Path(wish.json).write_text(json.dumps(head, indent=1) + "\n")
    return 0 if all(row["bits"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
