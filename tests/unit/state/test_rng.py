"""RNG comes back exactly, stream by stream."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from megatron_det.errors import CheckpointError
from megatron_det.state import rng


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
