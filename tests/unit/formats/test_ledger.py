"""The ledger survives kill -9, and refuses whatever is not whole, ours and of this run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from megatron_det.errors import FormatError
from megatron_det.formats.ledger import LedgerWriter, rank_path, read_rank, read_run, sealed
from megatron_det.formats.scalars import of_python


def write(directory: Path, rank: int = 0, world: int = 1, run: str = "run", steps: int = 3) -> Path:
    writer = LedgerWriter(directory, rank, world, run)
    for iteration in range(1, steps + 1):
        writer.step(iteration, 8 * iteration, [("num/loss/lm loss", of_python(1.0 / iteration))])
    writer.end(steps, "done")
    writer.close()
    return rank_path(directory, rank)


def refused(code: str, action) -> FormatError:
    with pytest.raises(FormatError) as caught:
        action()
    assert caught.value.finding.code == code
    assert "\n" not in str(caught.value), "one line"
    return caught.value


def test_round_trip(tmp_path):
    ledger = read_rank(write(tmp_path))
    assert sorted(ledger.steps) == [1, 2, 3]
    assert ledger.steps[2] == [("num/loss/lm loss", of_python(0.5))]
    assert (ledger.consumed[3], ledger.end["exit"], ledger.torn) == (24, "done", None)


def test_readable_after_kill(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from megatron_det.formats.ledger import LedgerWriter\n"
        "w = LedgerWriter(Path(sys.argv[1]), 0, 1, 'x')\n"
        "for i in range(1, 10**9): w.step(i, i, [['num/a', {'t': 'none'}]] * 50); print(i, flush=True)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    last = [int(child.stdout.readline()) for _ in range(20)][-1]
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert max(read_rank(rank_path(tmp_path, 0)).steps) >= last


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_torn_last_line_is_reported_not_fatal(tmp_path, cut):
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:-cut])
    ledger = read_rank(path)
    assert "incomplete" in ledger.torn
    assert sorted(ledger.steps) == [1, 2, 3]


def test_every_flipped_byte_in_the_middle_is_found(tmp_path):
    path = write(tmp_path)
    whole = path.read_bytes()
    lines = whole.split(b"\n")
    start = len(lines[0]) + 1
    for at in range(start, start + len(lines[1]), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        refused("DET-LEDGER-DAMAGED", lambda: read_rank(path))


def test_never_appends_to_another_runs_file(tmp_path):
    path = write(tmp_path)
    before = path.read_bytes()
    refused("DET-LEDGER-FOREIGN", lambda: LedgerWriter(tmp_path, 0, 1, "other"))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "no temporary file stays"


def test_unwritable_directory(tmp_path):
    (tmp_path / "file").write_text("")
    refused("DET-LEDGER-WRITE", lambda: LedgerWriter(tmp_path / "file" / "below", 0, 1, "x"))


def test_full_disk_stops_the_run(tmp_path):
    writer = LedgerWriter(tmp_path, 0, 1, "x")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, writer._file)
    os.close(full)
    refused("DET-LEDGER-WRITE", lambda: writer.step(1, 1, []))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "DET-LEDGER-FOREIGN"),
        ("hello\n", "DET-LEDGER-FOREIGN"),
        ('{"kind":"step"}\n', "DET-LEDGER-FOREIGN"),
        (sealed({"kind": "step", "iteration": 1}), "DET-LEDGER-FOREIGN"),
        (sealed({"kind": "header", "schema": 99}), "DET-LEDGER-SCHEMA"),
        (sealed({"kind": "header", "schema": 1}), "DET-LEDGER-FOREIGN"),
        ("é\n", "DET-LEDGER-FOREIGN"),
    ],
)
def test_foreign_files(tmp_path, text, code):
    rank_path(tmp_path, 0).write_text(text)
    refused(code, lambda: read_run(tmp_path))


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "step", "iteration": 2, "consumed_samples": 0, "q": []},
        {"kind": "odd", "iteration": 9},
        {"kind": "step"},
    ],
)
def test_records_that_do_not_belong(tmp_path, record):
    path = write(tmp_path)
    path.write_text(path.read_text() + sealed(record))
    refused("DET-LEDGER-DAMAGED", lambda: read_rank(path))


def test_missing_ledger_and_missing_rank(tmp_path):
    refused("DET-LEDGER-MISSING", lambda: read_run(tmp_path / "nowhere"))
    refused("DET-LEDGER-MISSING", lambda: read_rank(tmp_path / "rank-00000.jsonl"))
    write(tmp_path, rank=0, world=3)
    write(tmp_path, rank=2, world=3)
    assert "rank 1" in str(refused("DET-LEDGER-MISSING", lambda: read_run(tmp_path)))


def test_files_of_two_runs(tmp_path):
    write(tmp_path, rank=0, world=2, run="one")
    write(tmp_path, rank=1, world=2, run="two")
    refused("DET-LEDGER-FOREIGN", lambda: read_run(tmp_path))


def test_a_whole_last_line_that_is_damaged_is_not_torn(tmp_path):
    path = write(tmp_path)
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(bytes(data))
    refused("DET-LEDGER-DAMAGED", lambda: read_rank(path))


def test_a_right_checksum_over_what_is_no_json(tmp_path):
    path = write(tmp_path)
    path.write_text(path.read_text() + '{odd,"crc":"' + f"{zlib.crc32(b'{odd}'):08x}" + '"}\n')
    refused("DET-LEDGER-DAMAGED", lambda: read_rank(path))


def step(directory: Path, rank: int, iterations) -> None:
    writer = LedgerWriter(directory, rank, 2, "run")
    for iteration in iterations:
        writer.step(iteration, iteration, [])
    writer.close()


def test_a_gap_that_other_ranks_do_not_have(tmp_path):
    step(tmp_path, 0, (1, 2, 3, 4))
    step(tmp_path, 1, (1, 2, 4))
    assert "no iteration 3" in str(refused("DET-LEDGER-DAMAGED", lambda: read_run(tmp_path)))


@pytest.mark.parametrize("iterations", [(1, 2, 3), (1, 2, 3, 4)])
def test_ranks_of_a_killed_run_may_end_apart(tmp_path, iterations):
    step(tmp_path, 0, (1, 2, 3, 4))
    step(tmp_path, 1, iterations)
    assert read_run(tmp_path).iterations() == list(iterations)


def test_a_rank_under_another_name_or_beyond_the_world(tmp_path):
    path = write(tmp_path)
    path.rename(rank_path(tmp_path, 1))
    refused("DET-LEDGER-FOREIGN", lambda: read_run(tmp_path))
    write(tmp_path / "x", rank=0, world=2)
    write(tmp_path / "x", rank=1, world=2)
    write(tmp_path / "x", rank=5, world=2)
    assert "rank 5" in str(refused("DET-LEDGER-FOREIGN", lambda: read_run(tmp_path / "x")))


def test_a_file_where_the_directory_should_be(tmp_path):
    (tmp_path / "file").write_text("")
    refused("DET-LEDGER-WRITE", lambda: LedgerWriter(tmp_path / "file", 0, 1, "x"))
