"""Every way in which ``verify`` can end, through the command line, with a trainer that takes no time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent
TRAINER = [sys.executable, str(HERE / "fake_trainer.py")]


def call(*words: str, out: Path | None = None, options: tuple[str, ...] = ("--iters", "6", "--resume-at", "3")):
    where = ["--out", str(out)] if out is not None else []
    command = [sys.executable, "-m", "megatron_det.cli", "verify", *where, *options, "--", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)


def verdict(out: Path) -> dict:
    return json.loads((out / "verify.json").read_text())


def one_line(done: subprocess.CompletedProcess, code: str) -> str:
    assert done.returncode == 2, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("megatron-det: ")]
    assert len(lines) == 1, done.stderr
    assert code in lines[0]
    assert "Traceback" not in done.stderr
    return lines[0]


def test_identical(tmp_path):
    done = call(*TRAINER, out=tmp_path / "v")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "differs, as it must" in done.stdout
    result = verdict(tmp_path / "v")
    assert result["verdict"] == "identical"
    assert [a["result"] for a in result["arms"]] == ["identical"] * 4 + ["differs, as it must"]
    assert [a["iterations"] for a in result["arms"]][2:] == [[1, 6], [4, 6], [4, 6]]
    assert "CPU stand-in: says nothing about GPU kernels" in result["notices"]
    assert max(len(line) for line in done.stdout.splitlines()) <= 100


def test_three_runs(tmp_path):
    assert call(*TRAINER, out=tmp_path / "v", options=("--runs", "3", "--iters", "4")).returncode == 0
    assert [a["name"] for a in verdict(tmp_path / "v")["arms"]] == ["a", "b", "c", "continued", "resumed", "cold"]


@pytest.mark.parametrize(("arm", "iteration"), [("b", 2), ("continued", 1), ("resumed", 5)])
def test_difference_is_named(tmp_path, arm, iteration):
    chaos = ("--chaos", f"{arm}:x:iteration={iteration},rank=2", "--iters", "6", "--resume-at", "3")
    done = call(*TRAINER, out=tmp_path / "v", options=chaos)
    assert done.returncode == 1, done.stdout + done.stderr
    first = verdict(tmp_path / "v")["first_difference"]
    assert (first["arm"], first["iteration"], first["rank"]) == (arm, iteration, 2)
    assert first["quantity"] == "num/loss/lm loss"
    assert first["ulp"] > 0
    assert "0x" in first["a"] and "(" in first["a"], "hex and decimal"
    assert first["cause"] == "numbers differ"


def test_fail_fast_leaves_the_rest_out(tmp_path):
    chaos = ("--chaos", "b:x:iteration=1,rank=0", "--fail-fast", "--iters", "4")
    assert call(*TRAINER, out=tmp_path / "v", options=chaos).returncode == 1
    assert [a["result"] for a in verdict(tmp_path / "v")["arms"]][2:] == ["not run"] * 3


def test_control_that_does_not_differ_proves_nothing(tmp_path):
    done = call(*TRAINER, "--same-cold", out=tmp_path / "v")
    assert done.returncode == 2
    assert "identical, though it must differ" in done.stdout


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--fail-in", "b"), "DET-ARM"),
        (("--silent",), "DET-NOT-ACTIVE"),
        (("--short",), "DET-ARM-SHORT"),
        (("--no-checkpoint",), "DET-CKPT-MISSING"),
        (("--refuse",), "DET-X"),
        (("--unknown-flag",), "DET-ARM"),
    ],
)
def test_an_arm_that_cannot_run(tmp_path, flags, code):
    one_line(call(*TRAINER, *flags, out=tmp_path / "v"), code)
    assert verdict(tmp_path / "v")["verdict"] == "could not run"


def test_bad_input(tmp_path):
    one_line(call(out=tmp_path / "v"), "DET-NO-COMMAND")
    one_line(call("@nowhere.args", out=tmp_path / "v"), "DET-ARGFILE")
    one_line(call("no-such-program-at-all", out=tmp_path / "v"), "DET-START")
    one_line(call(*TRAINER, out=tmp_path / "w", options=("--iters", "4", "--resume-at", "4")), "DET-RESUME-STEP")
    one_line(call(*TRAINER, out=tmp_path / "w", options=("--chaos", "z:x")), "DET-CHAOS")
    (tmp_path / "file").write_text("")
    one_line(call(*TRAINER, out=tmp_path / "file" / "v"), "DET-OUT")
    assert "--no-such-option" in one_line(
        call(*TRAINER, out=tmp_path / "w", options=("--no-such-option",)), "DET-USAGE"
    )
    one_line(call(*TRAINER, out=tmp_path / "w", options=("--runs", "0")), "DET-USAGE")
    one_line(call(*TRAINER, out=tmp_path / "w", options=("--device", "tpu")), "DET-USAGE")


def test_never_deletes_what_it_did_not_make(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    one_line(call(*TRAINER, out=tmp_path / "mine", options=("--overwrite",)), "DET-OUT")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


def test_overwrite_of_its_own_directory(tmp_path):
    quick = ("--iters", "2", "--resume-at", "1")
    assert call(*TRAINER, out=tmp_path / "v", options=quick).returncode == 0
    one_line(call(*TRAINER, out=tmp_path / "v", options=quick), "DET-OUT")
    assert call(*TRAINER, out=tmp_path / "v", options=(*quick, "--overwrite")).returncode == 0


def test_users_own_flags_are_taken_out_and_said(tmp_path):
    done = call(*TRAINER, "--save", str(tmp_path / "precious"), "--load=x", out=tmp_path / "v")
    assert done.returncode == 0, done.stderr
    assert verdict(tmp_path / "v")["removed"] == [f"--save {tmp_path / 'precious'}", "--load=x"]
    assert not (tmp_path / "precious").exists()
    assert "taken out of the command" in done.stderr


def test_timeout_ends_what_was_started(tmp_path):
    start = time.monotonic()
    one_line(call(*TRAINER, "--hang", out=tmp_path / "v", options=("--timeout", "2", "--iters", "4")), "DET-TIMEOUT")
    assert time.monotonic() - start < 60
    mine = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    assert mine == []


def test_json(tmp_path):
    done = call(*TRAINER, out=tmp_path / "v", options=("--json", "--iters", "2"))
    assert json.loads(done.stdout) == verdict(tmp_path / "v")


def running(mark: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        gone = process.info["status"] == psutil.STATUS_ZOMBIE
        if str(mark) in " ".join(process.info["cmdline"] or []) and not gone:
            found.append(process)
    return found


@pytest.mark.parametrize("own_session", [False, True])
def test_a_launcher_that_ends_leaves_nothing_behind(tmp_path, own_session):
    started = tmp_path / "started"
    child = f"import pathlib, time; pathlib.Path({str(started)!r}).write_text(''); time.sleep(600)"
    launcher = (
        "import pathlib, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session={own_session})\n"
        f"while not pathlib.Path({str(started)!r}).exists(): time.sleep(0.05)\n"
        f"time.sleep({own_session}); sys.exit(1)"
    )
    one_line(call(sys.executable, "-c", launcher, out=tmp_path / "v"), "DET-ARM")
    assert started.exists(), "the control: the child ran"
    assert running(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_was_started(tmp_path, number):
    words = [sys.executable, "-m", "megatron_det.cli", "verify", "--out", str(tmp_path / "v"), "--iters", "4", "--"]
    verifier = subprocess.Popen([*words, *TRAINER, "--hang"], stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 30
    while len(running(tmp_path)) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    assert len(running(tmp_path)) == 2, "the control: verify and its arm run"
    verifier.send_signal(number)
    _, said = verifier.communicate(timeout=60)
    assert verifier.returncode == 2
    assert "interrupted" in said
    assert running(tmp_path) == []


def test_a_damaged_refusal_is_said(tmp_path):
    code = (
        "import pathlib, sys; d = pathlib.Path(sys.argv[sys.argv.index('--det-ledger') + 1]); d.mkdir(parents=True); "
        "(d / 'rank-00000.refusal.json').write_text('{'); sys.exit(2)"
    )
    one_line(call(sys.executable, "-c", code, out=tmp_path / "v"), "DET-REFUSAL-DAMAGED")
