"""The ways in: the flag on an unmodified script, the launcher, the one-line import. Each gives the same ledger bits.
And the ways out: every bad input ends with one line and exit code 2 before anything is trained."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, environment

pytestmark = [pytest.mark.distributed, pytest.mark.training]

SCRIPT = "scripts/pretrain_gpt.py"
DET = ("--det", "--det-device", "cpu")
SHORT = ("--exit-interval", "2")


def alone() -> dict[str, str]:
    """What torchrun would set for one process. Without torchrun between, the exit code is the script's own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


@pytest.fixture
def train(corpus):
    """``train(words, flags)``: one process, as a user would start it."""

    def run(*flags: str, start: tuple[str, ...] = (SCRIPT,), expand: bool = False, **env: str):
        model = ["@configs/gpt.args"]
        if expand:  # for scripts that know no argument files
            lines = (ROOT / "configs" / "gpt.args").read_text().splitlines()
            model = [word for line in lines for word in line.split("#")[0].split()]
        data = ["--data-path", str(corpus), "--data-cache-path", str(corpus.parent / "cache")]
        command = [sys.executable, *start, *model, *data, *flags]
        return subprocess.run(
            command, cwd=ROOT, env={**environment(), **alone(), **env}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip

    return run


def same_ledgers(a: Path, b: Path) -> bool:
    command = [sys.executable, "-m", "megatron_det.cli", "compare", str(a), str(b)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode == 0


def test_three_ways_in_give_the_same_bits(train, tmp_path):
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    script = ROOT / SCRIPT
    one_line = tmp_path / "one_line.py"
    one_line.write_text(
        f"import megatron_det.activate\nimport runpy\nrunpy.run_path({str(script)!r}, run_name='__main__')\n"
    )
    ways = {
        "flag": train(*DET, *SHORT, "--det-ledger", str(tmp_path / "flag")),
        "launcher": train(*DET, *SHORT, "--det-ledger", str(tmp_path / "launcher"),
                          start=("-m", "megatron_det.run", SCRIPT), **off),
        "import": train(*DET, *SHORT, "--det-ledger", str(tmp_path / "import"), start=(str(one_line),), **off),
    }  # fmt: skip
    for name, done in ways.items():
        assert done.returncode == 0, f"{name}: {done.stderr[-2000:]}"
    assert same_ledgers(tmp_path / "flag", tmp_path / "launcher")
    assert same_ledgers(tmp_path / "flag", tmp_path / "import")


def test_megatrons_own_script_unmodified(train, tmp_path):
    """Set MEGATRON_LM to a checkout of Megatron-LM at core_v0.19.0 to run this."""
    checkout = os.environ.get("MEGATRON_LM")
    if not checkout:
        pytest.skip("MEGATRON_LM names no checkout of Megatron-LM (the wheel has no pretrain_gpt.py)")
    for name in ("pretrain_gpt.py", "gpt_builders.py", "model_provider.py"):
        shutil.copy(Path(checkout) / name, tmp_path / name)
    theirs = train(*DET, *SHORT, "--det-ledger", str(tmp_path / "theirs"),
                   start=(str(tmp_path / "pretrain_gpt.py"),), expand=True)  # fmt: skip
    assert theirs.returncode == 0, theirs.stderr[-2000:]
    ours = train(*DET, *SHORT, "--det-ledger", str(tmp_path / "ours"), expand=True)
    assert ours.returncode == 0, ours.stderr[-2000:]
    assert same_ledgers(tmp_path / "theirs", tmp_path / "ours")


def test_recording_changes_no_bit(train, tmp_path):
    """Digests on every iteration, and none at all: the scalars of both ledgers are the same."""
    for interval in ("1", "0"):
        done = train(*DET, *SHORT, "--det-digest-interval", interval, "--det-ledger", str(tmp_path / interval))
        assert done.returncode == 0, done.stderr[-2000:]

    def scalars(interval: str) -> list:
        lines = (tmp_path / interval / "rank-00000.jsonl").read_text().splitlines()
        steps = [record for record in map(json.loads, lines) if record["kind"] == "step"]
        return [[q for q in step["q"] if q[0].startswith(("num/", "data/", "rng/"))] for step in steps]

    assert len(scalars("1")) == 2
    assert scalars("1") == scalars("0")


def refused(done: subprocess.CompletedProcess, code: str) -> None:
    assert done.returncode == 2, done.stdout[-1500:] + done.stderr[-1500:]
    lines = [line for line in done.stderr.splitlines() if line.startswith("megatron-det: ") and code in line]
    assert len(lines) == 1, done.stderr[-3000:]
    assert "iteration        1/" not in done.stdout, "nothing was trained"


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--det-digest-interval", "2"), "DET-NEEDS-DET"),
        (("--det",), "DET-NO-GPU"),
        ((*DET, "--tensor-model-parallel-size", "2"), "DET-LAYOUT"),
        ((*DET, "--spec", "no.such.module", "spec"), "DET-SPEC"),
        ((*DET, "--moe-permute-fusion"), "DET-ARG-PERMUTE-FUSION"),
        ((*DET, "--load", "/nowhere", "--ckpt-step", "7"), "DET-CKPT-MISSING"),
        ((*DET, "--det-ledger", "/proc/nowhere"), "DET-LEDGER-WRITE"),
        ((*DET, "--det-chaos", "nonsense"), "DET-CHAOS"),
        ((*DET, "--num-attention-heads", "5"), "DET-MEGATRON-ASSERT"),
    ],
)
def test_bad_input_is_refused_before_training(train, flags, code):
    refused(train(*flags), code)


def test_unknown_flag(train):
    done = train(*DET, "--det-unknown", "1")
    assert done.returncode == 2
    assert "--det-unknown" in done.stderr


def test_help_shows_our_flags_under_their_own_heading(train):
    done = train("--det", "--help")
    assert done.returncode == 0
    assert "deterministic training (megatron-det)" in done.stdout
    assert "--det-ledger DIR" in done.stdout
    assert "--det-ledger" not in train("--help").stdout, "without --det the script's help is the script's"


def test_without_the_flag_nothing_is_accepted(train):
    done = train("--det", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 2, "an un-activated script refuses --det; it does not train without it"
    assert "--det" in done.stderr


def test_checkpoints_that_cannot_be_vouched_for(train, tmp_path):
    saved = train(*DET, *SHORT, "--save", str(tmp_path / "ckpt"), "--save-interval", "1")
    assert saved.returncode == 0, saved.stderr[-2000:]
    assert (tmp_path / "ckpt" / "iter_0000001" / "megatron_det" / "rank-00000.json").is_file()

    def resume(name: str, *flags: str):
        return train(*DET, *SHORT, "--load", str(tmp_path / name), *flags)

    def damaged(name: str) -> Path:
        shutil.copytree(tmp_path / "ckpt", tmp_path / name)
        return tmp_path / name / "iter_0000002"

    shard = next(p for p in sorted(damaged("torn").glob("*.distcp")))
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    refused(resume("torn"), "DET-CKPT-READ")

    (damaged("bare") / "megatron_det" / "rank-00000.json").unlink()
    refused(resume("bare"), "DET-CKPT-NO-STATE")
    assert "WITHOUT the claim" in resume("bare", "--det-resume", "warn").stderr

    sidecar = damaged("edited") / "megatron_det" / "rank-00000.json"
    sidecar.write_text(sidecar.read_text().replace('"iteration": 2', '"iteration": 3'))
    refused(resume("edited"), "DET-CKPT-DAMAGED")

    longer = resume("ckpt", "--train-iters", "20", "--override-opt_param-scheduler")
    refused(longer, "DET-CKPT-LAYOUT")
    assert "train_iters" in longer.stderr


def test_a_switch_turned_in_the_middle_stops_the_run(train, tmp_path):
    ledger = tmp_path / "ledger"
    done = train(*DET, "--det-chaos", "switch-off:iteration=2", "--det-ledger", str(ledger))
    assert done.returncode == 3, done.stderr[-2000:]
    assert "DET-SWITCH" in done.stderr
    record = json.loads((ledger / "rank-00000.refusal.json").read_text())
    assert record["findings"][0]["code"] == "DET-SWITCH"
