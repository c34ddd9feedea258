"""``megatron-det receipt``: shows a checkpoint, names where two differ, and needs no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from test_receipt_files import AROUND, part, save

from megatron_det.formats import receipt as written
from megatron_det.report import receipt as receipts


def command(*words: object) -> subprocess.CompletedProcess:
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.partition('.')[0] in ('torch', 'megatron'): raise AssertionError('imported ' + name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from megatron_det.cli import main\n"
        "main()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "receipt", *map(str, words)], capture_output=True, text=True, timeout=60,
        check=False,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "COLUMNS": "140"},
    )  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    for iteration, fill in ((2, 0), (4, 1)):
        save(tmp_path / f"iter_{iteration:07d}", iteration, fill)
    (tmp_path / written.TRACKER).write_text("4")
    return tmp_path


def test_shows_the_newest_checkpoint(saved):
    done = command(saved)
    assert done.returncode == 0, done.stderr
    assert "iteration 4, 2 ranks" in done.stdout
    assert "model" in done.stdout
    assert "all 2 ranks' parts are whole" in done.stdout
    found = json.loads(command(saved / "iter_0000002", "--json").stdout)
    assert found["iteration"] == 2
    assert [(piece["name"], piece["entries"]) for piece in found["pieces"]] == [("model", 4)]


def test_compares_two(saved):
    same = command(saved / "iter_0000004", saved)
    assert same.returncode == 0
    assert "verdict: identical" in same.stdout
    done = command(saved / "iter_0000002", saved)
    assert done.returncode == 1
    assert "iteration: 2 and 4" in done.stdout
    assert "param/w0" in done.stdout
    found = receipts.difference(saved / "iter_0000002", saved / "iter_0000004")
    assert {(one["rank"], one["name"]) for one in found["entries"]} == {
        (r, f"param/w{n}") for r in (0, 1) for n in (0, 1)
    }


def test_another_environment_is_named(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    save(a)
    parts = [{**part(rank), "environment": {**AROUND, "threads": {"torch": 9}}} for rank in (0, 1)]
    for one in parts:
        written.write_sealed(written.rank_path(b, one["rank"]), one)
    written.write_sealed(written.index_path(b), written.make_index(parts[0], [written.summary(p, {}) for p in parts]))
    assert receipts.difference(a, b)["environment"] == [["threads/torch", 4, 9]]
    assert receipts.difference(a, b)["verdict"] == "differs"


def test_drifted_replicas_are_an_exit_code(tmp_path):
    parts = [part(0), part(1)]
    for one in parts:
        written.write_sealed(written.rank_path(tmp_path, one["rank"]), one)
    told = [written.summary(one, {"dense": ("tp0", str(one["rank"]))}) for one in parts]
    written.write_sealed(written.index_path(tmp_path), written.make_index(parts[0], told))
    done = command(tmp_path)
    assert done.returncode == 1
    assert "replicas differ: rank 1" in done.stdout


def test_what_cannot_be_read_is_one_line(saved, tmp_path):
    done = command(tmp_path / "nowhere")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "DET-CKPT-NO-STATE" in done.stderr
    (saved / written.TRACKER).write_text("")
    assert "DET-CKPT-TRACKER" in command(saved).stderr
