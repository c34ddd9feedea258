"""``kill -9`` at random moments of Megatron's own ``dist_checkpointing.save``, the receipt and the tracker (in the
order of ``save_checkpoint``), at once and in the background: what the tracker names is whole and loads.

One process, a small model. ``MEGATRON_DET_KILLS`` sets how many moments are tried in each of the two ways.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.msc_utils import maybe_msc
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import MegatronModule, TransformerConfig
from small_rank import head

from megatron_det import devices
from megatron_det.formats import receipt as written
from megatron_det.patching import engine
from megatron_det.patching.inventory import tracker
from megatron_det.state import receipt
from megatron_det.state.piece import Here

SEEDS = int(os.environ.get("MEGATRON_DET_KILLS", "8"))


class Weights(MegatronModule):
    def __init__(self):
        super().__init__(TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1))
        self.one = torch.nn.Linear(64, 64)


def enter(store: Path) -> None:
    """In a forked child: a world of one, with our patch of the tracker. (Gloo's threads do not outlive a fork.)"""
    devices.install()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    engine.apply(tracker.patches())


def fork(action: Callable[[], None], store: Path, manager: Any) -> int:
    """A child in a group of its own, which the processes that it forks belong to; exit code 0 when ``action`` ends."""
    filesystem_async._results_queue = manager.Queue()  # a killed child leaves results in the one it had
    child = os.fork()
    if child == 0:  # must never come back into the test runner
        code = 1
        try:
            enter(store)
            action()
            code = 0
        finally:
            os._exit(code)
    os.setpgid(child, child)
    return child


def set_to(model: Weights, iteration: int) -> None:
    with torch.no_grad():
        model.one.weight.fill_(iteration + 0.125)
        model.one.bias.fill_(iteration + 0.25)


def save(directory: Path, model: Weights, iteration: int, queue: AsyncCallsQueue | None) -> None:
    """The order of ``save_checkpoint``: Megatron's files, the receipt, and then the tracker."""
    set_to(model, iteration)
    folder = directory / f"iter_{iteration:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    here = Here([model], None, None, SimpleNamespace(consumed_train_samples=iteration))
    document = receipt.take(here, {**head(0), "iteration": iteration, "world_size": 1}, only={"model", "rng"})
    request = dist_checkpointing.save(
        {"model": model.sharded_state_dict()}, str(folder), TorchDistSaveShardedStrategy(),
        async_sharded_save=queue is not None, async_strategy="mcore",
    )  # fmt: skip
    written.write_sealed(written.rank_path(folder, 0), document)
    written.write_sealed(written.index_path(folder), written.make_index(document, [written.summary(document, {})]))

    def name_it() -> None:
        with maybe_msc.open(str(directory / written.TRACKER), "w") as file:
            file.write(str(iteration))

    if queue is None:
        name_it()
    else:
        request.add_finalize_fn(name_it)
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=iteration % 2 == 0)


def forever(directory: Path, start: int, background: bool) -> None:
    model, queue = Weights(), AsyncCallsQueue() if background else None
    for iteration in range(start, start + 1000):
        save(directory, model, iteration, queue)


def newest(directory: Path) -> None:
    """Loads what the tracker names, into a fresh model, and checks it against its receipt."""
    iteration = int((directory / written.TRACKER).read_text())
    folder = directory / f"iter_{iteration:07d}"
    _, (document,) = written.read_all(folder)
    model = Weights()
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(folder))
    model.load_state_dict(loaded["model"])
    assert receipt.check(Here([model], None, None), document, {"model"}) == []


@pytest.fixture(scope="module")
def manager():
    """Megatron starts one of these per process, which takes seconds; here once for all children."""
    with multiprocessing.get_context("spawn").Manager() as started:
        yield started
    filesystem_async._results_queue = None


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_kill_9_at_random_moments(tmp_path, background, manager):
    if torch.cuda.is_available():
        pytest.skip("written for machines without a GPU; on a GPU the training tests try this")
    world = tmp_path / "checkpoints"
    assert ended(fork(lambda: save(world, Weights(), 1, None), tmp_path / "first", manager)) == 0
    named, seen = 1, set()
    for seed in range(SEEDS + 1):
        ready, tell = os.pipe()

        def live(first: int = named + 1, tell: int = tell) -> None:
            newest(world)
            os.write(tell, b"!")
            forever(world, first, background)

        child = fork(live, tmp_path / f"store-{seed}", manager)
        os.close(tell)
        assert os.read(ready, 1) == b"!", f"seed {seed}: what is named does not load"
        os.close(ready)
        time.sleep(random.Random(seed).uniform(0.01, 0.15))
        end_group(child)
        before, named = named, int((world / written.TRACKER).read_text())
        assert named >= before, "what was named stays named"
        seen.add(any(int(path.name[5:]) > named for path in world.glob("iter_*")))
        for path in world.glob("iter_*"):
            if int(path.name[5:]) != named:
                shutil.rmtree(path)
    assert named > 1, "the control: saves did end in between"
    assert True in seen, "the control: kills fell inside a save"


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def end_group(leader: int) -> None:
    """``kill -9`` for the child and the processes that it forked: exactly its own group."""
    os.killpg(leader, signal.SIGKILL)
    os.waitpid(leader, 0)


def test_control_stock_tracker_is_empty_for_a_moment(tmp_path):
    """Why the tracker is patched: between open and write nothing is named."""
    file = tmp_path / written.TRACKER
    file.write_text("4")
    with maybe_msc.open(str(file), "w"):
        assert file.read_text() == ""


def test_the_tracker_is_the_old_one_or_the_new_one(tmp_path):
    file = tmp_path / written.TRACKER
    file.write_text("4")
    applied = engine.apply(tracker.patches())
    try:
        with maybe_msc.open(str(file), "w") as new:
            new.write("6")
            assert file.read_text() == "4"
        assert file.read_text() == "6"
        with pytest.raises(ZeroDivisionError), maybe_msc.open(str(file), "w") as new:
            new.write("8")
            raise ZeroDivisionError
        assert file.read_text() == "6"
        with maybe_msc.open(str(tmp_path / "other"), "w") as other:
            other.write("x")
        assert applied.counts() == {"checkpoint-tracker": 2}
    finally:
        applied.undo()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".new")] == []
