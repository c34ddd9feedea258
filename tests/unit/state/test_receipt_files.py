"""The receipt as files: whole or not at all, read without torch, refused when torn, edited, foreign or not for us."""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from megatron_det.errors import CheckpointError, FormatError
from megatron_det.formats import receipt as written
from megatron_det.formats import scalars
from megatron_det.patching.inventory import resume

LAYOUT = {
    "world_size": 2, "tensor": 1, "pipeline": 1, "virtual_pipeline": None, "context": 1, "expert": 1,
    "expert_tensor": 1, "global_batch_size": 8, "micro_batch_size": 2, "train_iters": 10, "seed": 1,
}  # fmt: skip
AROUND = {
    "versions": {"torch": "2.14.1"}, "device": {"device": "cuda", "gpu": "H200"}, "env": {"NCCL_ALGO": "Ring"},
    "threads": {"torch": 4}, "switches": {"tf32": False}, "args": {"lr": 0.1, "log_interval": 1, "ddp_bucket_size": 0},
}  # fmt: skip


def part(rank: int, iteration: int = 5, fill: int = 0, size: int = 2) -> dict:
    entries = [[f"param/w{n}", scalars.of_python(n + rank * 100 + fill)] for n in range(size)]
    pieces = [{"name": "model", "about": "weights", "entries": entries, "state": None}]
    return {
        "schema": written.SCHEMA, "iteration": iteration, "rank": rank, "world_size": 2, "layout": LAYOUT,
        "environment": AROUND, "boundary": "clean", "pieces": pieces,
    }  # fmt: skip


def save(folder, iteration: int = 5, fill: int = 0, size: int = 2) -> list[dict]:
    parts = [part(rank, iteration, fill, size) for rank in (0, 1)]
    for one in parts:
        written.write_sealed(written.rank_path(folder, one["rank"]), one)
    index = written.make_index(parts[0], [written.summary(one, {"dense": ("tp0", "x")}) for one in parts])
    written.write_sealed(written.index_path(folder), index)
    return parts


def read(folder, rank=1, layout=LAYOUT, around=AROUND, iteration=5, level="run"):
    return resume.read(folder, rank, 2, iteration, layout, around, level)


def refused(code, *args, **kwargs) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(*args, **kwargs)
    assert caught.value.finding.code == code
    return str(caught.value)


def test_what_was_written_is_read(tmp_path):
    parts = save(tmp_path)
    index, back = written.read_all(tmp_path)
    assert [{k: v for k, v in one.items() if k != "sha256"} for one in back] == parts
    assert written.unequal_replicas(index) == []
    assert read(tmp_path)["rank"] == 1


def test_torn_and_edited_files_are_refused(tmp_path):
    save(tmp_path)
    file = written.rank_path(tmp_path, 1)
    text = file.read_text()
    for cut in range(0, len(text) - 2, 97):
        file.write_text(text[:cut])
        refused("DET-CKPT-DAMAGED", tmp_path)
    for damaged in (text.replace('"rank": 1', '"rank": 3'), text.replace('"101"', '"103"'), "[]", "not json"):
        assert damaged != text
        file.write_text(damaged)
        refused("DET-CKPT-DAMAGED", tmp_path)
    file.unlink()
    refused("DET-CKPT-NO-STATE", tmp_path)


def test_edited_and_sealed_again_is_refused_by_the_index(tmp_path):
    parts = save(tmp_path)
    edited = copy.deepcopy(parts[1])
    edited["pieces"][0]["entries"][0][1] = scalars.of_python(7)
    written.write_sealed(written.rank_path(tmp_path, 1), edited)
    text = refused("DET-CKPT-FOREIGN", tmp_path)
    assert "rank 1, piece model" in text
    assert "edited after the save" in text


def test_files_of_another_rank_or_save_are_refused(tmp_path):
    save(tmp_path)
    own = written.rank_path(tmp_path, 1).read_bytes()
    written.rank_path(tmp_path, 1).write_bytes(written.rank_path(tmp_path, 0).read_bytes())
    refused("DET-CKPT-FOREIGN", tmp_path)
    written.rank_path(tmp_path, 1).write_bytes(own)
    refused("DET-CKPT-FOREIGN", tmp_path, iteration=6)
    written.index_path(tmp_path).unlink()
    refused("DET-CKPT-NO-STATE", tmp_path)


def test_the_index_of_another_save(tmp_path):
    save(tmp_path, fill=1)
    old = written.rank_path(tmp_path, 1).read_bytes()
    save(tmp_path, fill=2)
    written.rank_path(tmp_path, 1).write_bytes(old)
    assert "rank 1, piece model" in refused("DET-CKPT-FOREIGN", tmp_path)


@pytest.mark.parametrize("key", ["world_size", "tensor", "pipeline", "expert", "train_iters", "seed"])
def test_another_layout_is_refused_in_words(tmp_path, key):
    save(tmp_path)
    text = refused("DET-CKPT-LAYOUT", tmp_path, layout={**LAYOUT, key: 4})
    assert f"saved with {key} {LAYOUT[key]}" in text
    assert f"this run's {key} 4" in text


def test_a_rank_that_was_not_there_is_told_of_the_world_size(tmp_path):
    """A larger world has ranks without a file: the reason is the layout, not a missing file."""
    save(tmp_path)
    assert "world_size 2" in refused("DET-CKPT-LAYOUT", tmp_path, rank=3, layout={**LAYOUT, "world_size": 4})


@pytest.mark.parametrize(
    ("section", "key", "other"),
    [("threads", "torch", 8), ("versions", "torch", "2.15"), ("device", "gpu", "B200"), ("env", "NCCL_ALGO", "Tree"),
     ("switches", "tf32", True), ("args", "lr", 0.2)],
)  # fmt: skip
def test_another_environment_is_refused_in_words(tmp_path, section, key, other):
    save(tmp_path)
    text = refused("DET-CKPT-ENVIRONMENT", tmp_path, around={**AROUND, section: {**AROUND[section], key: other}})
    assert f"found {section}/{key} {other!r}; needed {section}/{key} {AROUND[section][key]!r}" in text


def test_what_cannot_change_bits_may_change(tmp_path):
    save(tmp_path)
    args = {**AROUND["args"], "log_interval": 9, "save_interval": 4, "ddp_bucket_size": 7}
    read(tmp_path, around={**AROUND, "args": args}, level="placement")
    assert "ddp_bucket_size" in refused("DET-CKPT-ENVIRONMENT", tmp_path, around={**AROUND, "args": args})


def test_a_save_in_the_middle_of_a_step_is_no_resume(tmp_path):
    parts = [{**part(rank), "boundary": "in the middle of a step"} for rank in (0, 1)]
    for one in parts:
        written.write_sealed(written.rank_path(tmp_path, one["rank"]), one)
    written.write_sealed(
        written.index_path(tmp_path), written.make_index(parts[0], [written.summary(p, {}) for p in parts])
    )
    assert "in the middle of a step" in refused("DET-CKPT-BOUNDARY", tmp_path)


def test_replicas_that_drifted_are_named(tmp_path):
    parts = [part(0), part(1)]
    told = [{"dense": ("tp0", "aa"), "expert": ("ep0", "cc")}, {"dense": ("tp0", "bb"), "expert": ("ep1", "dd")}]
    index = written.make_index(parts[0], [written.summary(p, r) for p, r in zip(parts, told, strict=True)])
    assert [(one.rank, one.name) for one in written.unequal_replicas(index)] == [(1, "dense parameters")]


def test_the_tracker_that_a_kill_left_empty_is_refused_with_the_way_out(tmp_path):
    for iteration in (2, 4):
        save(tmp_path / f"iter_{iteration:07d}", iteration)
    (tmp_path / "iter_0000006" / "megatron_det").mkdir(parents=True)  # begun, never finished
    args = SimpleNamespace(ckpt_step=None)
    assert resume.iteration_to_load(str(tmp_path), args) is None, "no tracker: a fresh start"
    (tmp_path / written.TRACKER).write_text("")
    with pytest.raises(CheckpointError, match=r"DET-CKPT-TRACKER.*write 4 into it"):
        resume.iteration_to_load(str(tmp_path), args)
    (tmp_path / written.TRACKER).write_text("4\n")
    assert resume.iteration_to_load(str(tmp_path), args) == 4
    assert resume.iteration_to_load(str(tmp_path), SimpleNamespace(ckpt_step=2)) == 2


def in_child(action) -> int:
    """Runs ``action`` in a forked process; its exit code (negative: killed)."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(action() or 0)
        except BaseException:  # noqa: BLE001  a child must never come back into the test runner
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_disk_full_is_one_clear_error_and_leaves_the_last_good_one(tmp_path):
    save(tmp_path, fill=1)
    before = written.rank_path(tmp_path, 0).read_bytes()

    def full() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))
        try:
            save(tmp_path, fill=2)
        except FormatError as error:
            return 3 if error.finding.code == "DET-WRITE" and "File too large" in str(error) else 98
        return 97

    assert in_child(full) == 3
    assert written.rank_path(tmp_path, 0).read_bytes() == before
    assert sorted(p.name for p in tmp_path.rglob("*.json")) == [
        "megatron_det.json",
        "rank-00000.json",
        "rank-00001.json",
    ]
    assert not list(tmp_path.rglob(".new-*")), "what a failed write left is removed"


def test_a_directory_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FormatError, match="DET-WRITE"):
        save(tmp_path / "file" / "iter_0000005")


def test_kill_9_at_50_moments_never_leaves_half_a_receipt(tmp_path):
    """Two saves of other content, one after another, killed anywhere: each file is the old one or the new one, and a
    mixture of two saves is refused by the index."""
    save(tmp_path, fill=0, size=300)
    states = {"whole": 0, "mixed": 0}
    for seed in range(50):
        child = os.fork()
        if child == 0:
            for fill in range(1, 10_000):
                save(tmp_path, fill=fill, size=300)
            os._exit(0)
        time.sleep(random.Random(seed).uniform(0.001, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for rank in (0, 1):
            one = written.read_rank(tmp_path, rank, 5)  # raises when torn
            assert len(one["pieces"][0]["entries"]) == 300
        try:
            written.read_all(tmp_path)
            states["whole"] += 1
        except CheckpointError as error:
            assert error.finding.code == "DET-CKPT-FOREIGN"
            states["mixed"] += 1
    assert states["mixed"] > 0, "the control: some kills fell between the files of one save"


def test_the_read_side_needs_no_torch(tmp_path):
    code = "import sys; from megatron_det.formats import receipt; assert not {'torch', 'megatron'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, check=False
    )
    assert done.returncode == 0


def test_json_only(tmp_path):
    """Nothing is unpickled: the files are plain JSON."""
    save(tmp_path)
    for path in tmp_path.rglob("*.json"):
        json.loads(path.read_text())
