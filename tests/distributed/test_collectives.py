"""The ``det`` backend on 3, 4 and 5 real gloo processes: bit-equal to a single-process reference in the documented
order, whatever the size, dtype, bucketing, chunking, plan, placement and group history. Pointed at plain gloo, the same
checks fail.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import Pool

from megatron_det.collectives import record
from megatron_det.collectives.ordered_sum import Reduction, reference

pytestmark = pytest.mark.distributed
DTYPES = {
    "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64, "c64": torch.complex64,
    "f8": torch.float8_e4m3fn,
}  # fmt: skip
OPS = {"SUM": dist.ReduceOp.SUM, "AVG": dist.ReduceOp.AVG, "MAX": dist.ReduceOp.MAX, "MIN": dist.ReduceOp.MIN}
FACTOR = 0.7


def shard(seed: int, rank: int, size: int, dtype: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    values = torch.randn(size, generator=generator) * 10 ** (rank % 3)
    values[::7] = 0.0 if rank % 2 else -0.0
    kind = DTYPES[dtype]
    return torch.complex(values, values.flip(0)) if kind.is_complex else values.to(kind)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with gaps between them."""
    wide = torch.zeros(tensor.numel(), 3, dtype=tensor.dtype)
    wide[:, 1] = tensor
    return wide[:, 1]


def op_of(job: dict[str, Any]) -> Any:
    return dist._make_nccl_premul_sum(FACTOR) if job["op"] == "PREMUL_SUM" else OPS[job["op"]]


def all_reduce(job: dict[str, Any], group: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    if job["coalesced"]:
        with dist._coalescing_manager(group=group, async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor, op=op_of(job), group=group)
        manager.wait()
    else:
        works = [dist.all_reduce(t, op=op_of(job), group=group, async_op=True) for t in tensors]
        for work in works:
            work.wait()
            assert work.is_completed()
            work.get_future().wait()
    return tensors


def perform(job: dict[str, Any], rank: int, ranks: int) -> list[torch.Tensor]:
    """One job on one rank; the results that are compared."""
    group = dist.new_group(list(range(ranks))) if job["new_group"] else None
    many = [size * (1 if job["name"] in ("all_reduce", "reduce") else ranks) for size in job["sizes"]]
    tensors = [shard(job["seed"] + i, rank, size, job["dtype"]) for i, size in enumerate(many)]
    tensors = [strided(t) for t in tensors] if job["strided"] else tensors
    if job["name"] == "all_reduce":
        return all_reduce(job, group, tensors)
    if job["name"] == "reduce":
        for tensor in tensors:
            dist.reduce(tensor, 1, op=op_of(job), group=group)
        return tensors if rank == 1 else []
    outs = [torch.empty(size, dtype=DTYPES[job["dtype"]]) for size in job["sizes"]]
    for out, tensor in zip(outs, tensors, strict=True):
        dist.reduce_scatter_tensor(out, tensor, op=op_of(job), group=group)
    return outs


def expected(job: dict[str, Any], rank: int, ranks: int) -> list[torch.Tensor]:
    reduction = Reduction(job["op"], FACTOR if job["op"] == "PREMUL_SUM" else None)
    results = []
    for i, size in enumerate(job["sizes"]):
        many = size * (1 if job["name"] in ("all_reduce", "reduce") else ranks)
        shards = [shard(job["seed"] + i, r, many, job["dtype"]) for r in range(ranks)]
        total = reference(shards, job.get("order", "tree"), reduction)
        results.append(total if job["name"] != "reduce_scatter" else total[rank * size : (rank + 1) * size])
    return results if job["name"] != "reduce" or rank == 1 else []


def bits(tensor: torch.Tensor) -> bytes:
    values = torch.empty(tensor.numel(), dtype=tensor.dtype)
    values.copy_(tensor.flatten())
    return bytes(torch.view_as_real(values).numpy() if tensor.is_complex() else values.view(torch.uint8).numpy())


def same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return [bits(t) for t in got] == [bits(t) for t in wanted]


def check(job: dict[str, Any], rank: int, ranks: int) -> tuple[bool, int]:
    """(bits equal to the reference, sums that were made by us)."""
    before = record.summed()
    got = perform(job, rank, ranks)
    return same(got, expected(job, rank, ranks)), record.summed() - before


TWO_NODES = ["a", "a", "b", "b"]
CASES = {
    "3 ranks": ([0, 1, 2], {}, None),
    "4 ranks, permuted": ([3, 1, 0, 2], {}, None),
    "4 ranks, pieces, small chunks": ([0, 1, 2, 3], {"trip_bytes": 0, "chunk_bytes": 1024}, None),
    "4 ranks, linear, permuted": ([2, 3, 1, 0], {"order": "linear", "trip_bytes": 3000}, None),
    "4 ranks on 2 nodes": ([0, 1, 2, 3], {"trip_bytes": 0, "node_bytes": 1, "chunk_bytes": 2048}, TWO_NODES),
    "5 ranks, permuted, unchecked": ([4, 2, 0, 1, 3], {"checks": "never", "trip_bytes": 50000}, None),
}


def pool_of(name: str) -> tuple[Pool, dict[str, Any]]:
    placement, chosen, nodes = CASES[name]
    each = [dict(chosen, **({"node": nodes[rank]} if nodes else {})) for rank in placement]
    return Pool("det", placement, each), chosen


@pytest.fixture(scope="module", params=list(CASES))
def det(request):
    pool, chosen = pool_of(request.param)
    yield pool, chosen.get("order", "tree")
    pool.close()


REDUCTIONS = {
    "name": st.sampled_from(["all_reduce", "reduce_scatter", "reduce"]),
    "sizes": st.lists(st.sampled_from([0, 1, 2, 7, 43, 100, 2047, 2048, 5000]), min_size=1, max_size=3),
    "dtype": st.sampled_from(list(DTYPES)),
    "seed": st.integers(0, 10_000),
    "coalesced": st.booleans(),
    "strided": st.booleans(),
    "op": st.sampled_from(["SUM", "SUM", "AVG", "PREMUL_SUM", "MAX", "MIN"]),
    "new_group": st.sampled_from([False, False, False, True]),
}
JOBS = st.fixed_dictionaries(REDUCTIONS).filter(lambda job: job["dtype"] != "c64" or job["op"] not in ("MAX", "MIN"))


def test_equal_to_the_reference(det):
    pool, order = det

    @settings(max_examples=30)
    @given(JOBS)
    def prove(job):
        answers = pool.run(check, job | {"order": order})
        assert all(equal for equal, _ in answers)
        assert min(ours for _, ours in answers) >= 1, "the sums were made by our backend"

    prove()


def plans_taken(job: Any, rank: int, ranks: int) -> dict[str, int]:
    return dist.group.WORLD.state.core_for(None).taken


def test_each_plan_was_taken(det):
    """The cases above are there to force the plans; this shows that they did (after the property test)."""
    pool, order = det
    for size in (1, 5000):
        pool.run(check, {"name": "all_reduce", "sizes": [size], "dtype": "f32", "seed": 1, "coalesced": False,
                         "strided": False, "op": "SUM", "new_group": False, "order": order})  # fmt: skip
    taken = set().union(*(set(answer) for answer in pool.run(plans_taken, None)))
    assert taken & {"small", "pieces", "node"} and len(taken) >= 2, taken


def test_node_by_node_was_taken():
    pool, _ = pool_of("4 ranks on 2 nodes")
    try:
        job = {"coalesced": False, "strided": False, "new_group": False, "sizes": [5000, 333], "seed": 3}
        for name in ("all_reduce", "reduce_scatter"):
            for op in ("SUM", "AVG", "PREMUL_SUM", "MAX"):
                for dtype in ("f32", "bf16"):
                    answers = pool.run(check, job | {"name": name, "op": op, "dtype": dtype})
                    assert all(equal for equal, _ in answers), (name, op, dtype)
        assert pool.run(plans_taken, None)[0]["node"] >= 16
    finally:
        pool.close()


SPLIT = [1500, 0, 2500, 1000]


def buckets(job: str, rank: int, ranks: int) -> bool:
    """The same 5000 numbers in one call, in four, and as the head of a longer message: the same bits?"""
    fused = shard(7, rank, 5000, "f32")
    split, long = [t.clone() for t in fused.split(SPLIT)], torch.cat([fused, shard(9, rank, 3000, "f32")])
    dist.all_reduce(fused)
    for tensor in split:
        dist.all_reduce(tensor)
    dist.all_reduce(long)
    return same([fused, fused], [torch.cat(split), long[:5000]])


def test_bucketing_does_not_matter(det):
    pool, _ = det
    assert all(pool.run(buckets, "")), "one call, split calls and a longer call give the same bits"


def test_plain_gloo_fails_the_same_checks():
    """The control: gloo's own order is not the documented one, and follows the size of the message."""
    pool = Pool("gloo", [0, 1, 2])
    job = {"name": "all_reduce", "sizes": [5000], "dtype": "f32", "coalesced": False, "strided": False, "op": "SUM",
           "new_group": False}  # fmt: skip
    try:
        equal = [all(e for e, _ in pool.run(check, job | {"seed": seed})) for seed in range(3)]
        assert not all(equal)
        assert not all(pool.run(buckets, ""))
    finally:
        pool.close()
