"""The ``det`` backend on 3, 4 and 5 real gloo processes: bit-equal to a single-process reference in the documented
order, whatever the size, dtype, bucketing, placement and group history. Pointed at plain gloo, the same checks fail.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_det.collectives import record, register
from megatron_det.collectives.ordered_sum import reference

pytestmark = pytest.mark.distributed
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}


def shard(seed: int, rank: int, size: int, dtype: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randn(size, generator=generator) * 10 ** (rank % 3)).to(DTYPES[dtype])


def work(job: dict[str, Any], rank: int, ranks: int) -> list[torch.Tensor]:
    """One job on one rank; the results that are compared."""
    op = dist.ReduceOp.AVG if job.get("average") else dist.ReduceOp.SUM
    sizes, dtype = job["sizes"], job["dtype"]
    group = dist.new_group(list(range(ranks))) if job.get("new_group") else None
    if job["name"] == "all_reduce":
        tensors = [shard(job["seed"] + i, rank, size, dtype) for i, size in enumerate(sizes)]
        if job.get("coalesced"):
            with dist._coalescing_manager(group=group, async_ops=True) as manager:
                for tensor in tensors:
                    dist.all_reduce(tensor, op=op, group=group)
            manager.wait()
        else:
            handles = [dist.all_reduce(t, op=op, group=group, async_op=True) for t in tensors]
            for handle in handles:
                handle.wait()
        return tensors
    whole = [shard(job["seed"] + i, rank, size * ranks, dtype) for i, size in enumerate(sizes)]
    outs = [torch.empty(size, dtype=DTYPES[dtype]) for size in sizes]
    for out, tensor in zip(outs, whole, strict=True):
        dist.reduce_scatter_tensor(out, tensor, op=op, group=group)
    return outs


def expected(job: dict[str, Any], rank: int, ranks: int) -> list[torch.Tensor]:
    results = []
    for i, size in enumerate(job["sizes"]):
        many = size if job["name"] == "all_reduce" else size * ranks
        shards = [shard(job["seed"] + i, r, many, job["dtype"]) for r in range(ranks)]
        total = reference(shards, "linear", bool(job.get("average")))
        results.append(total if job["name"] == "all_reduce" else total[rank * size : (rank + 1) * size])
    return results


def worker(process: int, backend: str, placement: list[int], port: int, pipes: list[Any]) -> None:
    torch.set_num_threads(1)
    rank, ranks = placement[process], len(placement)
    register()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group(backend, rank=rank, world_size=ranks)
    while (job := pipes[process].recv()) is not None:
        before = record.count()
        got = work(job, rank, ranks)
        wanted = expected(job, rank, ranks)
        equal = all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, wanted, strict=True) if a.numel()
        )
        pipes[process].send((equal, record.count() - before))
    dist.destroy_process_group()


class Pool:
    """Real processes that serve many examples. ``placement[p]`` is the logical rank of process p."""

    def __init__(self, backend: str, placement: list[int]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = mp.get_context("spawn")
        self.mine, theirs = zip(*(context.Pipe() for _ in placement), strict=True)
        arguments = (backend, placement, port, list(theirs))
        self.processes = [context.Process(target=worker, args=(p, *arguments)) for p in range(len(placement))]
        for process in self.processes:
            process.start()

    def run(self, job: dict[str, Any]) -> tuple[bool, int]:
        """(all ranks equal to the reference, calls that went through our backend)."""
        for pipe in self.mine:
            pipe.send(job)
        answers = []
        for pipe in self.mine:
            assert pipe.poll(60), "a worker hangs"
            answers.append(pipe.recv())
        return all(equal for equal, _ in answers), min(calls for _, calls in answers)

    def close(self) -> None:
        for pipe in self.mine:
            pipe.send(None)
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()


@pytest.fixture(scope="module", params=[[0, 1, 2], [3, 1, 0, 2], [0, 1, 2, 3, 4], [4, 2, 0, 1, 3]], ids=str)
def det(request):
    pool = Pool("det", request.param)
    yield pool
    pool.close()


JOBS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["all_reduce", "reduce_scatter"]),
        "sizes": st.lists(st.sampled_from([0, 1, 2, 7, 100, 2047, 2048, 5000]), min_size=1, max_size=3),
        "dtype": st.sampled_from(list(DTYPES)),
        "seed": st.integers(0, 10_000),
        "coalesced": st.booleans(),
        "average": st.booleans(),
        "new_group": st.sampled_from([False, False, False, True]),
    }
)


def test_equal_to_the_reference(det):
    @settings(max_examples=25)
    @given(JOBS)
    def check(job):
        equal, calls = det.run(job)
        assert equal
        assert calls >= 1, "the sums went through our backend"

    check()


def test_plain_gloo_fails_the_same_check():
    """The control: with 3 ranks and enough elements, gloo's own order gives other bits."""
    pool = Pool("gloo", [0, 1, 2])
    try:
        jobs = [{"name": "all_reduce", "sizes": [5000], "dtype": "f32", "seed": seed} for seed in range(3)]
        assert not all(pool.run(job)[0] for job in jobs)
    finally:
        pool.close()
