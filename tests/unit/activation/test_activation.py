"""Flags, environment, launchers; inert without --det; what goes wrong early is refused late, never swallowed."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

import pytest

from megatron_det.activation import environment, flags, start
from megatron_det.contract.options import Options


def python(code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if k not in ("MEGATRON_DET", "MEGATRON_DET_STARTED", "PYTHONHASHSEED")}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env={**clean, **env}, capture_output=True, text=True, timeout=120
    )


def test_flags_are_exact_names():
    words = ["--det-twice", "--deterministic-mode", "--det", "--det-ledger=x", "--detx", "det"]
    assert flags.present(words) == ["--det", "--det-ledger=x"]


def test_round_trip_through_argparse():
    parser = flags.add(argparse.ArgumentParser(allow_abbrev=False))
    assert flags.from_namespace(parser.parse_args([])) == Options()
    given = ["--det", "--det-level", "observe", "--det-ledger", "d", "--det-allow", "A", "--det-allow", "B"]
    wanted = Options(det=True, level="observe", ledger="d", allow=("A", "B"))
    assert flags.from_namespace(parser.parse_args(given)) == wanted
    assert flags.early(["train", *given, "--other"], {}) == wanted
    assert flags.HEADING in parser.format_help()
    for flag in Options.flags():
        assert flag in parser.format_help()


def test_early_reading_never_raises():
    assert flags.early(["--det", "--det-level", "nonsense"], {}).det
    assert flags.early(["--det-digest-interval", "x"], {}) == Options()
    assert flags.early([], {"MEGATRON_DET": "1"}).det


@pytest.mark.parametrize(
    ("orig", "argv0", "launcher"),
    [
        (["python", "/env/bin/torchrun", "x.py"], "/env/bin/torchrun", True),
        (["python", "-m", "torch.distributed.run", "x.py"], "-m", True),
        (["python", "x.py", "--det"], "x.py", False),
        (["python", "-u", "-m", "megatron_det.run", "x.py"], "-m", False),
        (["python", "-m"], "x.py", False),
    ],
)
def test_launchers(orig, argv0, launcher):
    assert start.is_launcher(orig, argv0) is launcher


def test_environment_is_filled_kept_or_refused():
    variables: dict[str, str] = {"OMP_NUM_THREADS": "4"}
    late = environment.prepare(variables, stand_in=True)
    assert (variables["PYTHONHASHSEED"], variables["OMP_NUM_THREADS"]) == ("0", "4"), "the user's value is kept"
    assert late == ["PYTHONHASHSEED"]
    assert environment.findings(variables, True, []) == []
    assert [f.code for f in environment.findings(variables, True, late)] == ["DET-ENV-LATE"]
    for name, bad in {"PYTHONHASHSEED": "random", "OMP_NUM_THREADS": "0", "TORCHDYNAMO_DISABLE": "0"}.items():
        found = environment.findings({**variables, name: bad}, True, [])
        assert [(f.code, f.what) for f in found] == [("DET-ENV", name)]


def test_stand_in_variables_stay_off_a_gpu_run():
    variables: dict[str, str] = {}
    environment.prepare(variables, stand_in=False)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in variables


SNAPSHOT = """
import os, sys
before = dict(os.environ), list(sys.argv)
import torch, torch.distributed, torch.optim
state = {n: id(v) for m in (torch, torch.cuda, torch.distributed) for n, v in vars(m).items() if callable(v)}
print(before == (dict(os.environ), list(sys.argv)), torch.are_deterministic_algorithms_enabled(),
      torch.get_num_threads(), torch.initial_seed() == torch.default_generator.initial_seed(),
      sorted(m for m in sys.modules if m.startswith(("megatron", "wrapt"))), torch.cuda.is_available.__module__)
"""


HOOK_ONLY = ["megatron_det", "megatron_det.activation", "megatron_det.activation.autoload"]


def test_inert_without_the_flag():
    """Same argv, environment, switches, threads, seed and functions; nothing of ours but the hook is imported."""
    plain = python(SNAPSHOT, "train", "--deterministic-mode").stdout
    without = python(SNAPSHOT, "train", "--deterministic-mode", TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout
    assert str(HOOK_ONLY) in plain
    assert plain.replace(str(HOOK_ONLY), "[]") == without
    assert plain.startswith("True False")


def test_inert_with_flags_that_only_look_like_ours():
    """``pytest --det-twice``: the names are read, and nothing else happens."""
    alike = python(SNAPSHOT, "train", "--det-twice").stdout
    without = python(SNAPSHOT, "train", "--det-twice", TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout
    assert alike.split("[")[0] == without.split("[")[0]
    assert alike.split("]")[1] == without.split("]")[1]
    assert "megatron_det.devices" not in alike
    assert "wrapt" not in alike


def test_the_hook_costs_a_few_milliseconds():
    """Measured inside fresh processes, the import of the hook included; printed with its spread."""
    code = (
        "import time, sys; t = time.perf_counter()\n"
        "from megatron_det.activation.autoload import autoload; autoload()\n"
        "print(1000 * (time.perf_counter() - t))"
    )
    times = [float(python(code).stdout) for _ in range(7)]
    print(f"hook: median {statistics.median(times):.2f} ms, {min(times):.2f} to {max(times):.2f} ms")
    assert min(times) < 5, "the least disturbed of seven"


def test_set_before_the_interpreter_starts():
    """A worker whose hash seed was not fixed is started again, once, with the same command line."""
    code = (
        "import os, sys\nimport torch\nprint(os.environ['PYTHONHASHSEED'], sys.flags.hash_randomization, sys.argv[1:])"
    )
    done = python(code, "--det", "--det-device", "cpu")
    assert done.stdout == "0 0 ['--det', '--det-device', 'cpu']\n", done.stderr
    assert "MEGATRON_DET_STARTED" not in os.environ


def test_a_failing_start_never_breaks_import_torch_and_is_refused_later(monkeypatch):
    monkeypatch.setattr(start, "_current", None)
    monkeypatch.setattr(start, "_begin", lambda *_: 1 / 0)
    start.begin(["train.py", "--det"])
    problems = start.current().problems
    assert [p.code for p in problems] == ["DET-START"]
    assert "ZeroDivisionError" in problems[0].found


def test_import_torch_stays_fast():
    """Interleaved: ``import torch`` with and without the entry point, medians and spread."""
    arms: dict[str, list[float]] = {"0": [], "1": []}
    for _ in range(4):
        for autoload, times in arms.items():
            begin = time.perf_counter()
            assert python("import torch", TORCH_DEVICE_BACKEND_AUTOLOAD=autoload).returncode == 0
            times.append(time.perf_counter() - begin)
    medians = {arm: statistics.median(times) for arm, times in arms.items()}
    print(f"import torch: {medians['0']:.3f} s without, {medians['1']:.3f} s with autoload; all {arms}")
    assert min(arms["1"]) < 1.3 * min(arms["0"]), "the least disturbed of each"
