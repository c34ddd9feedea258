"""What goes wrong between ranks is named: who, in which group, in which operation; and nothing hangs."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pool import free_port

from megatron_det.collectives import Settings, register
from megatron_det.errors import DetError

pytestmark = pytest.mark.distributed
LIMIT = 60


def different_size(rank: int) -> None:
    dist.all_reduce(torch.ones(5 if rank == 1 else 4))


def different_shape(rank: int) -> None:
    dist.all_reduce(torch.ones((4, 1) if rank == 2 else (1, 4)))


def different_dtype(rank: int) -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank == 0 else torch.float32))


def different_reduction(rank: int) -> None:
    dist.all_reduce(torch.ones(400), op=dist.ReduceOp.MAX if rank == 0 else dist.ReduceOp.SUM)


def different_operation(rank: int) -> None:
    if rank == 2:
        dist.broadcast(torch.ones(4), src=0)
    else:
        dist.all_reduce(torch.ones(4))


def different_root(rank: int) -> None:
    dist.broadcast(torch.ones(4), src=1 if rank == 2 else 0)


def different_splits(rank: int) -> None:
    outs = [1, 2, 1] if rank == 0 else [1, 1, 1]
    dist.all_to_all_single(torch.empty(sum(outs)), torch.ones(3), outs, [1, 1, 1])


def different_integers(rank: int) -> None:
    dist.all_reduce(torch.ones(4 + rank, dtype=torch.int64), async_op=True).wait()


def different_gather(rank: int) -> None:
    dist.all_gather_into_tensor(torch.empty(3 * (2 + rank)), torch.ones(2 + rank))


def killed(rank: int) -> None:
    """Rank 1 dies in the middle of a large all-reduce of the others."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1 << 22))


def killed_later(rank: int) -> None:
    """Rank 2 sends its header, then dies: the others are in the exchange of data."""
    if rank == 2:
        wire = dist.group.WORLD.state.core_for(None).wire
        begin = wire.begin

        def begin_and_die(*args, **kwargs):
            begin(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        wire.begin = begin_and_die
    dist.all_reduce(torch.ones(1 << 22))


def absent(rank: int) -> None:
    """Rank 0 never makes the call; it goes on sleeping."""
    if rank == 0:
        time.sleep(LIMIT)
        return
    dist.all_reduce(torch.ones(4))


def different_settings(rank: int) -> None:
    group = dist.new_group([0, 1, 2], backend="det", pg_options=Settings(order="linear" if rank == 1 else "tree"))
    dist.all_reduce(torch.ones(4), group=group)


def worker(rank: int, case: str, port: int, answers, done) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    register()
    dist.init_process_group("det", rank=rank, world_size=3, timeout=timedelta(seconds=5))
    dist.all_reduce(torch.ones(1))
    try:
        globals()[case](rank)
        answers.put((rank, "no error", ""))
    except (DetError, RuntimeError) as error:
        answers.put((rank, getattr(getattr(error, "finding", None), "code", type(error).__name__), str(error)))
    answers.close()
    answers.join_thread()
    done.wait(LIMIT)  # rank 0 holds the store that the others still read
    os._exit(0)  # a broken group cannot be taken down in good order


def play(case: str, expected: int) -> dict[int, tuple[str, str]]:
    context = mp.get_context("spawn")
    answers, done, port = context.Queue(), context.Event(), free_port()
    processes = [context.Process(target=worker, args=(rank, case, port, answers, done)) for rank in range(3)]
    for process in processes:
        process.start()
    try:
        got = [answers.get(timeout=LIMIT) for _ in range(expected)]
    finally:
        done.set()
        for process in processes:
            process.join(1)
            if process.is_alive():
                process.kill()
    return {rank: (code, text) for rank, code, text in got}


MISMATCHES = {
    "different_size": ["all_reduce", "float32[4]", "float32[5]", "rank 1"],
    "different_shape": ["float32[4, 1]", "float32[1, 4]", "rank 2"],
    "different_dtype": ["float64[4]", "float32[4]", "ranks 1-2"],
    "different_reduction": ["MAX", "SUM", "rank 0"],
    "different_operation": ["broadcast", "all_reduce", "rank 2"],
    "different_root": ["from rank 1", "from rank 0"],
    "different_integers": ["int64[4]", "int64[5]", "int64[6]"],
    "different_gather": ["float32[2]", "float32[3]", "float32[4]"],
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_a_mismatch_is_named_on_every_rank(case):
    for code, text in play(case, 3).values():
        assert code == "DET-COLLECTIVE-MISMATCH", text
        assert "group 0" in text and "ranks 0-2" in text
        for word in MISMATCHES[case]:
            assert word in text, f"{word!r} in {text}"


def test_splits_that_do_not_fit_are_named_where_they_are_seen():
    answers = play("different_splits", 3)
    code, text = answers[0]
    assert code == "DET-COLLECTIVE-MISMATCH"
    assert "all_to_all" in text and "rank 1 sends 4 bytes where rank 0 expects 8" in text
    assert all(code in ("DET-COLLECTIVE-MISMATCH", "DET-COLLECTIVE-PEER", "no error") for code, _ in answers.values())


@pytest.mark.parametrize(("case", "dead"), [("killed", 1), ("killed_later", 2)])
def test_a_killed_peer_is_named_by_the_others(case, dead):
    answers = play(case, 2)
    assert sorted(answers) == [rank for rank in range(3) if rank != dead]
    texts = [text for _, text in answers.values()]
    assert all(code == "DET-COLLECTIVE-PEER" for code, _ in answers.values()), answers
    assert all("all_reduce SUM float32[4194304]" in text and "group 0" in text for text in texts)
    assert any(f"no answer from rank {dead}" in text for text in texts)


def test_a_rank_that_never_comes_is_named_within_the_timeout():
    start = time.monotonic()
    answers = play("absent", 2)
    assert time.monotonic() - start < 45
    for rank in (1, 2):
        code, text = answers[rank]
        assert code == "DET-COLLECTIVE-PEER" and "all_reduce" in text
    assert any("no answer from rank 0" in text for _, text in answers.values())


def test_different_settings_are_refused():
    for code, text in play("different_settings", 3).values():
        assert code == "DET-COLLECTIVE-SETTINGS" and "linear" in text and "tree" in text
