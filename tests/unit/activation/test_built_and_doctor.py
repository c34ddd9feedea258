"""What was really built is looked at; ``doctor`` says what this machine is."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from megatron_det.activation import built, switches
from megatron_det.errors import GuaranteeBroken
from megatron_det.patching.engine import Applied, Patch

LOCAL = Namespace(transformer_impl="local")


class Layer(torch.nn.Module):
    def __init__(self, mode=True, copied=True):
        super().__init__()
        self.config = SimpleNamespace(deterministic_mode=mode)
        self.deterministic_mode = copied


def applied(**counts: int) -> Applied:
    result = Applied([Patch(name, "x:y", lambda o, r: o, "test") for name in built.MUST_RUN_BEFORE_TRAINING])
    result.counter.update({"pretrain": 1, "train-step": 1, **{k.replace("_", "-"): v for k, v in counts.items()}})
    return result


@pytest.fixture
def switched():
    undo = switches.set_all(debug=False)
    yield
    undo()


def check(model, args=LOCAL, **counts):
    built.check(applied(**counts), args)(1, model, None, None)


def test_a_sound_model_passes(switched):
    check([torch.nn.Sequential(Layer(), Layer())])


@pytest.mark.parametrize(
    ("model", "args", "counts", "code"),
    [
        ([torch.nn.Sequential(Layer(), Layer(mode=False))], LOCAL, {}, "DET-BUILT-SWITCH"),
        ([torch.nn.Sequential(Layer(), Layer(copied=False))], LOCAL, {}, "DET-BUILT-SWITCH"),
        ([torch.nn.Linear(1, 1)], LOCAL, {}, "DET-BUILT-SWITCH"),
        ([Layer()], Namespace(transformer_impl="transformer_engine"), {}, "DET-BUILT-BACKEND"),
        ([Layer()], LOCAL, {"pretrain": 0}, "DET-PATCH-IDLE"),
    ],
)
def test_what_is_not_as_planned_is_named(switched, model, args, counts, code):
    with pytest.raises(GuaranteeBroken, match=code):
        check(model, args, **counts)


def test_a_switch_that_is_not_honoured_is_seen():
    """The probes run on the built model too: here torch's switch is off."""
    with pytest.raises(GuaranteeBroken, match="DET-PROBE"):
        check([Layer()])


def doctor(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "megatron_det.cli", "doctor", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_doctor_on_the_stand_in():
    done = doctor("--device", "cpu", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["findings"] == []
    sections = document["manifest"]["sections"]
    assert sections["versions"]["megatron-core"].startswith("0.")
    assert {"versions", "device", "env", "threads", "switches"} <= set(sections)
    assert sections["switches"]["deterministic_algorithms"] is True


def test_doctor_without_a_gpu_says_what_to_do():
    if torch.cuda.is_available():
        pytest.skip("a GPU is visible: this is about machines without one")
    done = doctor()
    assert done.returncode == 2
    assert "DET-NO-GPU" in done.stdout.replace("\n", "")
    assert "--det-device" in done.stdout
