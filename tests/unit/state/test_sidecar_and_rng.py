"""Per-rank state: RNG comes back exactly, and a file that is torn, foreign or swapped is refused."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from megatron.core import tensor_parallel

from megatron_det import devices
from megatron_det.errors import CheckpointError, GuaranteeBroken
from megatron_det.state import rng, sidecar


@pytest.fixture
def streams():
    if torch.cuda.is_available():
        pytest.skip("written for machines without a GPU; on a GPU the real streams are tried by the training tests")
    standin = devices.install()
    tracker = tensor_parallel.get_cuda_rng_tracker()
    before = tracker.get_states()
    tracker.reset()
    tracker.add("model-parallel-rng", 11)
    tracker.add("expert-parallel-rng", 12)
    yield tracker
    tracker.reset()
    tracker.set_states(before)
    standin.undo()


def draw(tracker) -> list:
    with tracker.fork("expert-parallel-rng"):
        expert = torch.empty(3).uniform_().tolist()
    return [
        random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(2).tolist(),
        torch.rand(2, device="cuda").tolist(), expert,
    ]  # fmt: skip


def test_every_stream_comes_back(streams):
    draw(streams)
    saved = json.loads(json.dumps(rng.capture()))
    first = draw(streams)
    moved = rng.capture()
    assert [name for name in saved if rng.value(saved[name]) == rng.value(moved[name])] == [
        "tracker/model-parallel-rng"
    ]
    rng.restore(saved)
    assert draw(streams) == first


def test_the_cached_gaussian_is_part_of_it(streams):
    random.gauss(0, 1)
    np.random.randn()
    saved = rng.capture()
    random.seed(1)
    np.random.seed(1)
    other = rng.capture()
    assert rng.value(saved["python"]) != rng.value(other["python"])
    rng.restore(saved)
    assert rng.capture() == saved


def test_other_named_streams_are_refused(streams):
    saved = rng.capture()
    del saved["tracker/expert-parallel-rng"]
    with pytest.raises(CheckpointError, match="DET-RNG-STREAMS"):
        rng.restore(saved)


class Scheduler:
    num_steps = 16


LAYOUT = {"world_size": 2, "tensor": 1}


def parts():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    inner.step()
    optimizer = type("Optimizer", (), {"optimizer": inner})()
    return [model], optimizer, Scheduler()


@pytest.fixture
def saved(streams, tmp_path):
    model, optimizer, scheduler = parts()
    for rank in (0, 1):
        sidecar.write(tmp_path, sidecar.capture(5, rank, LAYOUT, model, optimizer, scheduler))
    return tmp_path, model, optimizer, scheduler


def test_what_was_saved_is_what_is_there(saved):
    folder, *state = saved
    document = sidecar.read(folder, 1, 5, LAYOUT)
    sidecar.check(document, *state)
    assert {name.split("/")[1] for name, _ in document["items"]} == {
        "lr", "weight_decay", "scheduler", "param", "exp_avg", "exp_avg_sq", "step"
    }  # fmt: skip


def refused(code, folder, rank=1, iteration=5, layout=LAYOUT):
    with pytest.raises(CheckpointError) as caught:
        sidecar.read(folder, rank, iteration, layout)
    assert caught.value.finding.code == code


def test_damage(saved):
    folder = saved[0]
    file = sidecar.path(folder, 1)
    text = file.read_text()
    for damaged in (text[:-40], text.replace('"rank": 1', '"rank": 3'), "", "[]", "not json"):
        file.write_text(damaged)
        refused("DET-CKPT-DAMAGED", folder)
    file.unlink()
    refused("DET-CKPT-NO-STATE", folder)


def test_another_ranks_file(saved):
    folder = saved[0]
    sidecar.path(folder, 1).write_bytes(sidecar.path(folder, 0).read_bytes())
    refused("DET-CKPT-FOREIGN", folder)
    refused("DET-CKPT-FOREIGN", folder, rank=0, iteration=6)


def test_another_layout_is_named(saved):
    with pytest.raises(CheckpointError, match=r"world_size 2.*world_size 4"):
        sidecar.read(saved[0], 0, 5, {**LAYOUT, "world_size": 4})


def flip(tensor):
    tensor.view(-1).view(torch.int32)[0] ^= 1


@pytest.mark.parametrize(
    ("break_it", "named", "why"),
    [
        (lambda m, o, s: flip(next(iter(o.optimizer.state.values()))["exp_avg"]), "state/exp_avg/", "damaged"),
        (lambda m, o, s: o.optimizer.state.clear(), "state/exp_avg/", "moments"),
        (lambda m, o, s: [v["step"].zero_() for v in o.optimizer.state.values()], "state/step/", "moments"),
        (lambda m, o, s: flip(m[0].weight.data), "state/param/weight", "damaged"),
        (lambda m, o, s: o.optimizer.param_groups[0].update(lr=0.2), "state/lr/group0", "schedule"),
        (lambda m, o, s: setattr(s, "num_steps", 32), "state/scheduler/num_steps", "schedule"),
    ],
)
def test_every_piece_that_is_not_restored_is_named(saved, break_it, named, why):
    folder, model, optimizer, scheduler = saved
    document = sidecar.read(folder, 0, 5, LAYOUT)
    break_it(model, optimizer, scheduler)
    with pytest.raises(GuaranteeBroken) as caught:
        sidecar.check(document, model, optimizer, scheduler)
    assert caught.value.exit_code == 3
    assert named in caught.value.finding.what
    assert "rank 0" in caught.value.finding.what
    assert why in caught.value.finding.why


def test_weights_without_the_optimizer(saved):
    """--no-load-optim: moments may differ, weights may not."""
    folder, model, optimizer, scheduler = saved
    document = sidecar.read(folder, 0, 5, LAYOUT)
    optimizer.optimizer.state.clear()
    sidecar.check(document, model, optimizer, scheduler, optimizer_loaded=False)
    flip(model[0].weight.data)
    with pytest.raises(GuaranteeBroken, match="state/param/weight"):
        sidecar.check(document, model, optimizer, scheduler, optimizer_loaded=False)
