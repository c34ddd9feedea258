"""Recording reads and never disturbs: with and without a ledger, saved at once or in the background, the same bits."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from conftest import BIN, ROOT, environment

pytestmark = [pytest.mark.distributed, pytest.mark.training]

ITERATION = 4


@pytest.fixture
def states(launch, tmp_path):
    """``states(name, *flags)``: trains and gives what each rank kept beside the checkpoint (RNG and all digests)."""

    def run(name: str, *flags: str) -> list[bytes]:
        checkpoint = tmp_path / name
        end = ("--save", str(checkpoint), "--save-interval", "2", "--exit-interval", str(ITERATION))
        command = launch(2, "gpt", "--det", "--det-device", "cpu", *end, *flags)
        done = subprocess.run(
            [str(BIN / command[0]), *command[1:]], cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=400, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:]
        assert (checkpoint / "latest_checkpointed_iteration.txt").read_text().strip() == str(ITERATION)
        folder: Path = checkpoint / f"iter_{ITERATION:07d}" / "megatron_det"
        assert sorted(os.listdir(folder)) == ["rank-00000.json", "rank-00001.json"]
        return [path.read_bytes() for path in sorted(folder.iterdir())]

    return run


def test_ledger_and_background_saving_change_no_bit(states, tmp_path):
    plain = states("plain")
    assert states("recorded", "--det-ledger", str(tmp_path / "ledger")) == plain
    assert states("background", "--async-save") == plain
    other = states("control", "--weight-decay", "0.2")
    assert [a != b for a, b in zip(other, plain, strict=True)] == [True, True]
