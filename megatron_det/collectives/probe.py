"""``megatron-det doctor --collectives``: which sums keep their bits on this machine, and how fast each is.

Each arm (the vendor's own, and the plans of the det backend) sums the same numbers in several ways that must not
matter; sessions in new processes do it again, with ranks placed otherwise and with other groups made first.
"""

from __future__ import annotations

import hashlib
import os
import queue
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_det.collectives.backend import register
from megatron_det.collectives.settings import Settings
from megatron_det.errors import DetError

ELEMENTS = 40_000
TIMED = 1 << 20  # elements
REPEATS = 9
QUESTIONS = ("split as fused", "slice of a longer one", "repeated in new processes", "ranks placed otherwise",
             "other groups made first")  # fmt: skip
SPLIT = (9_000, 1, 14_999, 16_000)
Answers = dict[str, dict[str, Any]]


def arms(ranks: int) -> dict[str, Settings | None]:
    """Name of an arm -> its settings; None is the vendor."""
    node = {"trip_bytes": 0, "node_bytes": 1}
    plans: dict[str, Settings | None] = {
        "vendor": None,
        "det tree, whole to all": Settings(trip_bytes=1 << 40),
        "det tree, pieces": Settings(trip_bytes=0),
        "det linear, pieces": Settings(trip_bytes=0, order="linear"),
    }
    if ranks % 2 == 0 and ranks > 2:
        plans["det tree, two nodes"] = Settings(**node)  # type: ignore[arg-type]  # the node's name is set per rank
    return plans


@dataclass(frozen=True)
class Session:
    """One set of processes. ``placement[p]`` is the logical rank of process p."""

    placement: tuple[int, ...]
    groups_first: bool = False
    timed: bool = False


def shard(rank: int, elements: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(elements, generator=generator) * 10.0 ** (rank % 4)).to(device)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest()[:16]


def examine(group: Any, rank: int, device: torch.device) -> dict[str, Any]:
    """Digests of the same sum made in several ways."""
    fused = shard(rank, ELEMENTS, device)
    longer = torch.cat([fused, shard(rank + 100, ELEMENTS, device)])
    pieces = [piece.clone() for piece in fused.split(SPLIT)]
    for tensor in (fused, longer, *pieces):
        dist.all_reduce(tensor, group=group)
    return {"fused": digest(fused), "split": digest(torch.cat(pieces)), "slice": digest(longer[:ELEMENTS])}


def race(groups: dict[str, Any], tensor: torch.Tensor) -> dict[str, list[float]]:
    """Seconds of one all-reduce per arm, the arms in turn; the first turn is dropped."""
    seconds: dict[str, list[float]] = {name: [] for name in groups}
    for turn in range(REPEATS + 1):
        for name, group in groups.items():
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            if tensor.is_cuda:
                torch.cuda.synchronize()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _serve(process: int, session: Session, vendor: str, port: int, answers: Any) -> None:
    torch.set_num_threads(1)
    rank, ranks = session.placement[process], len(session.placement)
    device = torch.device("cuda", process) if vendor == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    register()
    dist.init_process_group(vendor, rank=rank, world_size=ranks)
    everybody = list(range(ranks))
    if session.groups_first:
        for low in range(ranks):
            dist.new_group(sorted({low, (low + 1) % ranks}))
    groups: dict[str, Any] = {}
    for name, settings in arms(ranks).items():
        if settings is None:
            groups[name] = dist.new_group(everybody)
        else:
            half = f"node{rank * 2 // ranks}" if "nodes" in name else "one node"
            options = Settings(**{**vars(settings), "node": half})
            groups[name] = dist.new_group(everybody, backend="det", pg_options=options)
    found: Answers = {name: examine(group, rank, device) for name, group in groups.items()}
    if session.timed:
        for name, seconds in race(groups, shard(rank, TIMED, device)).items():
            found[name]["seconds"] = seconds
    answers.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()


def play(session: Session, vendor: str, timeout: float) -> Answers:
    """Rank 0's answers. Raises: DetError when a process ends or hangs, or ranks got different sums."""
    context = mp.get_context("spawn")
    answers = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        context.Process(target=_serve, args=(p, session, vendor, port, answers)) for p in range(len(session.placement))
    ]
    for process in processes:
        process.start()
    try:
        got = dict(answers.get(timeout=timeout) for _ in processes)
    except queue.Empty as error:
        raise DetError.of(
            "DET-PROBE", "collectives", found=f"no answer within {timeout:.0f} s", needed=f"{len(processes)} processes",
            why="A process ended or hangs.", do="read its error above.",
        ) from error  # fmt: skip
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    for name, answer in got[0].items():
        answer["all ranks"] = all(other[name]["fused"] == answer["fused"] for other in got.values())
    return got[0]


def probe(ranks: int, vendor: str, progress: Callable[[str], None], timeout: float = 180) -> list[dict[str, Any]]:
    """One row per arm: the answer to each question, and the speed beside the vendor's."""
    plain = tuple(range(ranks))
    moved = (*plain[1:], 0)[::-1]
    sessions = {
        "first": Session(plain, timed=True),
        "repeated in new processes": Session(plain),
        "ranks placed otherwise": Session(moved),
        "other groups made first": Session(plain, groups_first=True),
    }
    seen = {}
    for name, session in sessions.items():
        progress(f"{ranks} processes: {name}")
        seen[name] = play(session, vendor, timeout)
    first = seen.pop("first")
    rows = []
    for arm, answer in first.items():
        row: dict[str, Any] = {"arm": arm}
        row["split as fused"] = answer["split"] == answer["fused"]
        row["slice of a longer one"] = answer["slice"] == answer["fused"]
        for name, other in seen.items():
            row[name] = other[arm]["fused"] == answer["fused"] and other[arm]["all ranks"]
        ratios = sorted(a / b for a, b in zip(answer["seconds"], first["vendor"]["seconds"], strict=True))
        row |= {"ms": 1e3 * statistics.median(answer["seconds"]), "of vendor": statistics.median(ratios)}
        row["spread"] = [ratios[1], ratios[-2]]
        rows.append(row)
    trees = {answer["fused"] for arm, answer in first.items() if "tree" in arm}
    for row in rows:
        row["equals the other plans"] = len(trees) == 1 if "tree" in row["arm"] else None
    return rows
