"""Plain torch on ``backend="det"``: DDP and FSDP2 train, bit-equal across placements and bucket sizes; and the rest of
c10d that Megatron, FSDP2 and dist-checkpointing call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch.nn.parallel import DistributedDataParallel

from megatron_det.collectives import record

pytestmark = pytest.mark.distributed


def model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(40, 300), torch.nn.GELU(), torch.nn.Linear(300, 40), torch.nn.Linear(40, 7)
    )


def train(network: torch.nn.Module, rank: int) -> list[int]:
    """Bits of the weights after three steps on data that follow the logical rank."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(3):
        x = torch.randn(16, 40, generator=generator) * 10.0 ** (rank % 3)
        network(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in network.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in whole]).view(torch.int32).tolist()


def ddp(job: dict[str, Any], rank: int, ranks: int) -> tuple[list[int], int]:
    before = record.summed()
    bits = train(DistributedDataParallel(model(), bucket_cap_mb=job["bucket"]), rank)
    return bits, record.summed() - before


def fsdp2(job: dict[str, Any], rank: int, ranks: int) -> tuple[list[int], int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    before, mesh, network = record.summed(), init_device_mesh("cpu", (ranks,)), model()
    for layer in network if job["layers"] else []:
        fully_shard(layer, mesh=mesh) if isinstance(layer, torch.nn.Linear) else None
    fully_shard(network, mesh=mesh)
    return train(network, rank), record.summed() - before


@pytest.fixture(scope="module")
def placements():
    pools = [Pool("det", [0, 1, 2, 3]), Pool("det", [2, 0, 3, 1])]
    yield pools
    for pool in pools:
        pool.close()


@pytest.mark.parametrize(
    ("function", "jobs"),
    [(ddp, [{"bucket": 25}, {"bucket": 0.01}]), (fsdp2, [{"layers": False}, {"layers": True}])],
)
def test_trains_to_the_same_bits_wherever_ranks_are(placements, function, jobs):
    results = []
    for pool in placements:
        for job in jobs:
            for bits, summed in pool.run(function, job):
                assert summed >= 3, "the gradients were summed by our backend"
                results.append(bits)
    assert all(bits == results[0] for bits in results), "placement, bucket size and sharding units do not matter"


def test_plain_gloo_follows_the_bucket_size():
    """The control: the same DDP on gloo."""
    pool = Pool("gloo", [0, 1, 2, 3])
    try:
        one, other = (pool.run(ddp, {"bucket": bucket})[0][0] for bucket in (25, 0.01))
        assert one != other
    finally:
        pool.close()


def moves(_: Any, rank: int, ranks: int) -> str:
    """Everything that adds nothing, with values that say where they come from."""
    import torch.distributed._functional_collectives as fc

    def mine(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape, rank, dtype=dtype)

    def is_(tensor: torch.Tensor, values: list[Any]) -> None:
        assert tensor.flatten().tolist() == values, (tensor, values)

    every = list(range(ranks))
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.bool, torch.float8_e5m2):
        out = torch.empty(ranks, dtype=dtype)
        dist.all_gather_into_tensor(out, mine(1, dtype=dtype))
        is_(out.float(), [float(bool(r)) if dtype is torch.bool else float(r) for r in every])
    outs = [torch.empty(2) for _ in every]
    dist.all_gather(outs, mine(2))
    is_(torch.stack(outs), [float(r) for r in every for _ in range(2)])
    strided = torch.zeros(ranks, 2)[:, 0]
    dist.all_gather_into_tensor(strided, mine(1))
    is_(strided, [float(r) for r in every])
    root = mine(3)
    dist.broadcast(root, src=2)
    is_(root, [2.0] * 3)
    got = [torch.empty(1) for _ in every] if rank == 1 else None
    dist.gather(mine(1), got, dst=1)
    if got:
        is_(torch.cat(got), [float(r) for r in every])
    piece = torch.empty(1)
    dist.scatter(piece, [torch.tensor([10.0 * r]) for r in every] if rank == 3 else None, src=3)
    is_(piece, [10.0 * rank])
    sent = torch.cat([torch.full((r + 1, 2), 10.0 * rank + r) for r in every])
    out = torch.empty((rank + 1) * ranks, 2)
    dist.all_to_all_single(out, sent, [rank + 1] * ranks, [r + 1 for r in every])
    is_(out, [10.0 * r + rank for r in every for _ in range(2 * (rank + 1))])
    lists = [torch.empty(1) for _ in every]
    dist.all_to_all(lists, [torch.tensor([10.0 * rank + r]) for r in every])
    is_(torch.cat(lists), [10.0 * r + rank for r in every])
    ring = torch.empty(1)
    ops = [dist.P2POp(dist.isend, mine(1), (rank + 1) % ranks), dist.P2POp(dist.irecv, ring, (rank - 1) % ranks)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    is_(ring, [float((rank - 1) % ranks)])
    objects: list[Any] = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank})
    assert [item["rank"] for item in objects] == every
    given = [f"from {rank}"]
    dist.broadcast_object_list(given, src=1)
    assert given == ["from 1"]
    is_(fc.all_gather_tensor(mine(1), 0, dist.group.WORLD), [float(r) for r in every])
    is_(fc.all_reduce(mine(1), "sum", dist.group.WORLD), [float(sum(every))])
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        first, second = mine(1), mine(2)
        dist.all_reduce(first)
        dist.all_reduce(second)  # c10d takes the first call's reduction for all
    manager.wait()
    is_(torch.cat([first, second]), [float(sum(every))] * 3)
    dist.barrier()
    dist.monitored_barrier()
    return "done"


def exact(_: Any, rank: int, ranks: int) -> list[Any]:
    whole = torch.arange(8) + rank
    dist.all_reduce(whole)
    flag = torch.tensor([rank == 1]).byte()
    dist.all_reduce(flag, op=dist.ReduceOp.BOR)
    piece = torch.empty(2, dtype=torch.int32)
    dist.reduce_scatter_tensor(piece, torch.arange(2 * ranks, dtype=torch.int32))
    return [whole.tolist(), flag.tolist(), piece.tolist()]


def groups(_: Any, rank: int, ranks: int) -> list[float]:
    """Groups of one, of pairs in other orders of creation, and of a mesh."""
    from torch.distributed.device_mesh import init_device_mesh

    values = []
    ones = [dist.new_group([r]) for r in range(ranks)]
    pairs = [dist.new_group([low, low + 1]) for low in range(0, ranks, 2)]
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("outer", "inner"))
    for group in (ones[rank], pairs[rank // 2], mesh["outer"].get_group(), mesh["inner"].get_group()):
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=group)
        values.append(tensor.item())
    average = torch.tensor([float(rank)], dtype=torch.bfloat16)
    dist.all_reduce(average, op=dist.ReduceOp.AVG, group=ones[rank])
    return [*values, average.item()]


def refusals(_: Any, rank: int, ranks: int) -> list[str]:
    codes = []
    for call in (
        lambda: dist.all_reduce(torch.ones(3), op=dist.ReduceOp.PRODUCT),
        lambda: dist.isend(torch.ones(1), (rank + 1) % ranks, tag=1 << 30),
    ):
        try:
            call()
            codes.append("no error")
        except Exception as error:  # noqa: BLE001  its text is the answer
            codes.append(str(error).split(":")[0])
    return codes


def test_moves(placements):
    for pool in placements:
        assert set(pool.run(moves, None)) == {"done"}


def test_integers_are_exact_and_pass_through(placements):
    for rank, (whole, flag, piece) in enumerate(placements[0].run(exact, None)):
        assert whole == [4 * i + 6 for i in range(8)]
        assert flag == [1]
        assert piece == [8 * rank, 8 * rank + 4]


def test_groups_of_all_kinds(placements):
    for rank, values in enumerate(placements[0].run(groups, None)):
        pair = float(2 * (rank // 2) * 2 + 1)
        assert values == [float(rank), pair, float(rank % 2 * 2 + 2), pair, float(rank)]


def test_what_is_not_served_raises_by_name(placements):
    for codes in placements[0].run(refusals, None):
        assert codes == ["DET-COLLECTIVE-OP", "DET-COLLECTIVE-TAG"]


def chained(_: Any, rank: int, ranks: int) -> list[float]:
    """A collective issued in the callback of another: runs at once, in its place."""
    first, second = torch.tensor([float(rank)]), torch.tensor([10.0 * rank])

    def then(_: Any) -> torch.Tensor:
        return dist.all_reduce(second, async_op=True).get_future().wait()[0]

    dist.all_reduce(first, async_op=True).get_future().then(then).wait()
    return [first.item(), second.item()]


def wrong_calls(_: Any, rank: int, ranks: int) -> list[str]:
    """Outputs that do not fit are refused before anything is sent: the group can be used afterwards."""
    ones = torch.ones(4)
    calls = [
        lambda: dist.all_gather_into_tensor(torch.zeros(4 * ranks, dtype=torch.bfloat16), ones),
        lambda: dist.all_gather_into_tensor(torch.zeros(4 * ranks, dtype=torch.int32), ones),
        lambda: (
            dist.scatter(torch.zeros(4), [torch.ones(6)] * ranks if rank == 0 else None, src=0) if rank == 0 else 1 / 0
        ),
        lambda: dist.reduce_scatter_tensor(torch.zeros(2, dtype=torch.int32), torch.full((2 * ranks,), 0.5)),
        lambda: dist.all_to_all_single(torch.zeros(7), torch.ones(7)),
        lambda: dist.all_reduce(torch.ones(4, dtype=torch.int64), op=dist.ReduceOp.AVG),
        lambda: dist.all_reduce(torch.ones(4, dtype=torch.int16)),
    ]
    found = []
    for call in calls:
        try:
            call()
            found.append("no error")
        except Exception as error:  # noqa: BLE001  its kind is the answer
            found.append(type(error).__name__)
    total = torch.ones(4)
    dist.all_reduce(total)
    assert total.tolist() == [float(ranks)] * 4
    return found


def leaks(_: Any, rank: int, ranks: int) -> bool:
    """Whether the group still holds the tensor of a call that is over."""
    import gc
    import time
    import weakref

    class Marker:
        pass

    tensor = torch.ones(10**5)
    tensor.marker = Marker()
    held = weakref.ref(tensor.marker)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    del tensor, work
    for _ in range(20):
        gc.collect()
        if held() is None:
            return False
        time.sleep(0.05)
    return True


def inference(_: Any, rank: int, ranks: int) -> float:
    with torch.inference_mode():
        tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, async_op=True).wait()
    return tensor[0].item()


def needs_grad(_: Any, rank: int, ranks: int) -> float:
    parameter = torch.nn.Parameter(torch.ones(1000))
    dist.all_reduce(parameter)
    return parameter[0].item()


def overlapping(_: Any, rank: int, ranks: int) -> bool:
    """An output that lies across its own piece and the next one."""
    from megatron_det.collectives.ordered_sum import reference

    size = 1000
    buffers = [torch.randn(size * ranks + 7, generator=torch.Generator().manual_seed(r)) for r in range(ranks)]
    mine = buffers[rank].clone()
    out = mine[rank * size + 7 :][:size]
    dist.reduce_scatter_tensor(out, mine[: size * ranks])
    wanted = reference([b[: size * ranks] for b in buffers], "tree")[rank * size : (rank + 1) * size]
    return torch.equal(out.view(torch.int32), wanted.view(torch.int32))


def test_a_collective_in_a_callback(placements):
    for values in placements[0].run(chained, None):
        assert values == [6.0, 60.0]


def test_calls_that_do_not_fit_are_refused_before_anything_is_sent(placements):
    for rank, found in enumerate(placements[0].run(wrong_calls, None)):
        kinds = ["ValueError"] * 2 + ["ValueError" if rank == 0 else "ZeroDivisionError"] + ["ValueError"] * 2
        assert found == [*kinds, "Refused", "Refused"], (rank, found)


def test_nothing_is_held_after_a_call(placements):
    assert placements[0].run(leaks, None) == [False] * 4


def test_inference_tensors_parameters_and_overlaps(placements):
    assert placements[0].run(inference, None) == [16.0] * 4
    assert placements[0].run(needs_grad, None) == [4.0] * 4
    assert placements[0].run(overlapping, None) == [True] * 4


def wide(_: Any, rank: int, ranks: int) -> float:
    value = torch.tensor([[1e8, 1.0, -1e8, 1.0][rank]])
    dist.all_reduce(value)
    return value.item()


@pytest.mark.parametrize(("chosen", "sum_"), [(True, 2.0), (False, 0.0)])
def test_wide_scalars_also_node_by_node(chosen, sum_):
    """1e8 + 1 - 1e8 + 1: fp32 loses the ones, fp64 does not; linear order so that fp32 does lose them."""
    common = {"wide_scalars": chosen, "trip_bytes": 0, "node_bytes": 1, "checks": "never"}
    pool = Pool("det", [0, 1, 2, 3], [{**common, "node": node} for node in "aabb"])
    try:
        assert pool.run(wide, None) == [sum_] * 4
    finally:
        pool.close()


def accumulate(_: Any, rank: int, ranks: int) -> list[bool]:
    """Megatron's reduce-scatter with fp32 accumulation, stock and ours: does a slice get the bits of the whole?"""
    from megatron.core.distributed import reduce_scatter_with_fp32_accumulation as module

    from megatron_det.patching.inventory.collectives import _fp32_accumulation

    stock, ran = module.reduce_scatter_with_fp32_accumulation, []
    ours = _fp32_accumulation(stock, lambda: ran.append(1))
    whole = torch.randn(ranks, 1003, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank % 4)

    def slice_keeps_its_bits(function: Any) -> bool:
        def call(low: int, high: int) -> torch.Tensor:
            out = torch.empty(high - low)
            function(out, whole[:, low:high].contiguous().view(-1), dist.ReduceOp.SUM, None, False)
            return out.view(torch.int32)

        full = call(0, 1003)
        borders = ((0, 7), (5, 37), (900, 1003))
        slices = [call(low, high) for low, high in borders]  # all ranks make all calls
        return all(torch.equal(s, full[low:high]) for s, (low, high) in zip(slices, borders, strict=True))

    answer = [slice_keeps_its_bits(stock), slice_keeps_its_bits(ours)]
    return [*answer, len(ran) == 4]


def test_fp32_accumulation_keeps_its_bits_and_stock_does_not():
    """From five ranks on torch.sum(dim=0), which stock Megatron uses, follows the position of the element."""
    pool = Pool("det", [0, 1, 2, 3, 4])
    try:
        answers = pool.run(accumulate, None)
    finally:
        pool.close()
    assert not all(stock for stock, _, _ in answers), "the control"
    assert all(ours and counted for _, ours, counted in answers)
