"""Exact resume, in Megatron's own loop: from every step, twice in a row, across an epoch's end, after damage."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import BIN, ROOT, environment

from megatron_det.errors import FormatError
from megatron_det.formats import receipt
from megatron_det.testing.resume import FLAGS, resume_every_step

pytestmark = [pytest.mark.distributed, pytest.mark.training]

EP2 = ("--expert-model-parallel-size", "2")
SMALL = ("--num-layers", "2", "--seq-length", "64", "--max-position-embeddings", "64")
NOISY = ("--moe-router-force-load-balancing",)  # draws from the expert-parallel stream
EPOCHS = ("--dataloader-type", "cyclic", "--num-workers", "2")


@pytest.fixture
def every(launch, tmp_path, monkeypatch):
    """``every(nproc, config, flags, ...)``: resume_every_step on the stand-in."""
    monkeypatch.chdir(ROOT)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)

    def run(nproc: int, config: str, *flags: str, **options):
        command = launch(nproc, config, *SMALL, *flags)
        return resume_every_step([str(BIN / command[0]), *command[1:]], out=tmp_path / "proof", **options)

    return run


def exact(results, starts) -> None:
    assert [result.start for result in results] == starts
    assert {result.start: result.differences[:5] for result in results} == {start: [] for start in starts}
    assert all(result.steps for result in results)


def test_gpt_from_every_step(every):
    """Warm-up of the learning rate (2 steps), dropout, and evaluation after every second step."""
    exact(every(2, "gpt", "--eval-interval", "2", steps=4), [1, 2, 3])


def test_moe_from_step_to_step(every):
    """A -> B -> C: each run loads what the run before it saved; receipts of all of them are the straight run's."""
    exact(every(2, "moe", *EP2, *NOISY, steps=4, chain=True), [1, 2, 3])


def test_a_difference_is_seen(every):
    """The control: a fault in the resumed run."""
    fault = ("--det-chaos", "skip-rng-restore")
    results = every(1, "gpt", steps=2, flags=(*FLAGS, *fault))
    assert any("rng/" in text for text in results[0].differences), results


@pytest.fixture
def train(launch, tmp_path):
    """``train(nproc, *flags)``: one run on the stand-in; (exit code, output)."""

    def run(nproc: int, *flags: str, config: str = "gpt", **extra: str):
        command = launch(nproc, config, *SMALL, "--det", "--det-device", "cpu", *flags)
        done = subprocess.run(
            [str(BIN / command[0]), *command[1:]], cwd=ROOT, env={**environment(), **extra}, stdin=subprocess.DEVNULL,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=400, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    return run


def flip(shard: Path, at: float) -> None:
    data = bytearray(shard.read_bytes())
    data[int(len(data) * at)] ^= 4
    shard.write_bytes(data)


def test_what_is_wrong_is_named_before_the_first_step(train, tmp_path):
    """One checkpoint of two ranks, damaged in several ways; each time the run stops before its first step."""
    code, output = train(2, "--save", str(tmp_path / "good"), "--save-interval", "2", "--exit-interval", "2")
    assert code == 0, output[-3000:]
    assert "iteration        2/" in output

    def resumed(name: str, *flags: str) -> str:
        code, output = train(2, "--load", str(tmp_path / name), "--exit-interval", "3", *flags)
        assert code != 0, output[-2000:]
        assert "iteration        3/" not in output, "nothing was trained"
        return output

    def damaged(name: str) -> Path:
        shutil.copytree(tmp_path / "good", tmp_path / name)
        return tmp_path / name / "iter_0000002"

    flip(sorted(damaged("flipped").glob("__1_0.distcp"))[0], 0.6)
    output = resumed("flipped")
    assert "loaded state is not what the receipt says" in output
    table = output[output.index("loaded state is not what the receipt says") :]
    assert "likely cause" in table
    assert "DET-CKPT-STATE" in output

    folder = damaged("swapped") / "megatron_det"  # rank 1 gets the moments of rank 0
    one, other = (folder / f"rank-{rank:05d}.json" for rank in (0, 1))
    theirs = json.loads(other.read_text())
    pieces = {piece["name"]: piece for piece in json.loads(one.read_text())["pieces"]}
    theirs["pieces"] = [pieces["optimizer"] if piece["name"] == "optimizer" else piece for piece in theirs["pieces"]]
    receipt.write_sealed(other, theirs)
    output = resumed("swapped")
    assert "DET-CKPT-FOREIGN" in output
    assert "rank 1, piece optimizer" in output
    assert "the piece of rank 0" in output

    other_threads = {"OMP_NUM_THREADS": "2"}
    code, output = train(2, "--load", str(tmp_path / "good"), "--exit-interval", "3", **other_threads)
    assert code != 0, output[-2000:]
    assert "DET-CKPT-ENVIRONMENT" in output
    assert "threads/torch 2" in output

    code, output = train(1, "--load", str(tmp_path / "good"), "--exit-interval", "3")
    assert code != 0, output[-2000:]
    assert "DET-CKPT-LAYOUT" in output
    assert "saved with world_size 2" in output
    assert "this run's world_size 1" in output


@pytest.mark.parametrize("how", ["sync", "async"])
def test_kill_9_in_the_middle_of_saves(train, launch, tmp_path, how):
    """A run that saves at every step is killed at random; what its tracker names loads exactly. Twice per way."""
    flags = ("--async-save",) if how == "async" else ()
    for seed in (1, 2):
        folder = tmp_path / f"ckpt-{seed}"
        command = launch(2, "gpt", *SMALL, *FLAGS, *flags, "--save", str(folder), "--save-interval", "1")
        process = subprocess.Popen(
            [str(BIN / command[0]), *command[1:]], cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            wait_for(folder / receipt.TRACKER, process)
            time.sleep(random.Random(seed).uniform(0.0, 1.5))
        finally:
            kill_family(process)
        named = int((folder / receipt.TRACKER).read_text())
        receipt.read_all(folder / f"iter_{named:07d}")
        code, output = train(2, "--load", str(folder), "--exit-interval", str(named + 1))
        assert code == 0, output[-3000:]
        assert f"iteration {named + 1:8d}/" in output


def wait_for(path: Path, process: subprocess.Popen) -> None:
    for _ in range(1200):
        if path.exists():
            return
        assert process.poll() is None, "the run ended before it saved"
        time.sleep(0.1)
    raise AssertionError("no checkpoint within two minutes")


def kill_family(process: subprocess.Popen) -> None:
    """``kill -9`` for exactly what was started: the launcher and its workers, by id."""
    import psutil

    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for one in reversed(family):
        try:
            os.kill(one.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait(30)


def test_a_run_that_fails_is_an_error(every):
    with pytest.raises(FormatError, match="DET-ARM"):
        every(1, "gpt", "--no-such-flag", steps=2)
