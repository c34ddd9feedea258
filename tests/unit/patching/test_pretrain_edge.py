"""The edge of a run: one line, one exit code and a closing line, also when the disk is full."""

from __future__ import annotations

import os

import pytest

from megatron_det.contract.options import Options
from megatron_det.errors import GuaranteeBroken
from megatron_det.formats import ledger, manifest
from megatron_det.patching.inventory import pretrain
from megatron_det.patching.inventory.run import Run
from megatron_det.trace.recorder import Recorder


@pytest.fixture
def run(tmp_path):
    made = Run(Options(ledger=str(tmp_path)), rank=0, world_size=1)
    made.recorder = Recorder(tmp_path, 0, 1, "run")
    return made


def edge(run, body):
    replaced = pretrain.patches(run)[0].make(body, lambda: None)
    return replaced()


def closing(tmp_path):
    return ledger.read_rank(ledger.rank_path(tmp_path, 0)).end["exit"]


def full_disk(monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", refuse)
    monkeypatch.setattr(os, "replace", refuse)


@pytest.mark.parametrize(("stop", "how"), [(None, "done"), (SystemExit(0), "exit"), (SystemExit(7), "error")])
def test_the_closing_line_says_how_it_ended(run, tmp_path, stop, how):
    def body():
        if stop is not None:
            raise stop
        return "result"

    if stop is None:
        assert edge(run, body) == "result"
    else:
        with pytest.raises(SystemExit) as caught:
            edge(run, body)
        assert caught.value is stop
    assert closing(tmp_path) == how


def test_a_broken_guarantee_leaves_with_its_code_and_a_record(run, tmp_path, capsys):
    def body():
        raise GuaranteeBroken.of("DET-X", "a", found="b", needed="c", why="d", do="e")

    with pytest.raises(SystemExit) as caught:
        edge(run, body)
    assert caught.value.code == 3
    assert capsys.readouterr().err.splitlines() == ["megatron-det: rank 0: DET-X: a: found b; needed c. d Do: e"]
    assert manifest.refusal_path(tmp_path, 0).exists()
    assert closing(tmp_path) == "error"


def test_a_full_disk_in_the_middle_is_one_error_with_exit_code_2(run, monkeypatch, capsys):
    def body():
        full_disk(monkeypatch)
        run.recorder.commit(1, 8)

    with pytest.raises(SystemExit) as caught:
        edge(run, body)
    assert caught.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("megatron-det:")]
    assert "DET-LEDGER-WRITE" in lines[0]
    assert "rank-00000.jsonl" in lines[0]


def test_a_full_disk_at_the_very_end_is_no_success(run, monkeypatch, capsys):
    with pytest.raises(SystemExit) as caught:
        edge(run, lambda: full_disk(monkeypatch))
    assert caught.value.code == 2
    assert "DET-LEDGER-WRITE" in capsys.readouterr().err


def test_a_full_disk_does_not_hide_another_error(run, monkeypatch):
    def body():
        full_disk(monkeypatch)
        raise ValueError("the first error")

    with pytest.raises(ValueError, match="the first error"):
        edge(run, body)
