"""Level placement on Megatron's own loop: bucket size, overlap and the placement of ranks do not change a bit; at level
run, where sums are gloo's, they do."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from conftest import BIN, ROOT, environment

pytestmark = [pytest.mark.distributed, pytest.mark.training]

SPLIT = "--overlap-grad-reduce --ddp-bucket-size 40000"
GATHER = "--overlap-grad-reduce --overlap-param-gather"
MOVED = "--det-placement 3,1,0,2"
QUICK = ["--iters", "3", "--resume-at", "2", "--runs", "1"]
TP2 = ("--tensor-model-parallel-size", "2")
EP2 = ("--expert-model-parallel-size", "2")
SP = (*TP2, "--sequence-parallel", "--spec", "megatron_det.specs", "gpt_layer_spec")  # stock local norms refuse it


def vary(*texts: str) -> list[str]:
    return [word for text in texts for word in ("--vary", text)]


@pytest.mark.parametrize(("config", "flags"), [("gpt", TP2), ("gpt", SP), ("moe", EP2)],
                         ids=["gpt-tp2-dp2", "gpt-tp2-dp2-sequence-parallel", "moe-ep2-dp2"])  # fmt: skip
def test_buckets_overlap_and_placement_do_not_matter(config, flags, launch, verify):
    verdict = verify([*QUICK, *vary(SPLIT, GATHER, MOVED)], launch(4, config, *flags))
    assert verdict.code == 0, verdict.output
    arms = verdict.arms()
    assert [arms[f"vary-{n}"] for n in (1, 2, 3)] == ["identical"] * 3
    assert "changed arguments: ddp_bucket_size, overlap_grad_reduce" in verdict.output


def test_optimizer_instances(launch, verify):
    """Two instances of the distributed optimizer: reduce-scatter, then all-reduce, on groups of their own."""
    flags = ("--num-distributed-optimizer-instances", "2", "--overlap-grad-reduce", "--ddp-bucket-size", "40000")
    verdict = verify([*QUICK, *vary(MOVED, "--ddp-bucket-size 90000")], launch(4, "gpt", *flags))
    assert verdict.code == 0, verdict.output


def test_the_control_gloo_follows_the_bucket_size(launch, verify):
    verdict = verify([*QUICK, *vary(SPLIT)], launch(4, "gpt", *TP2, "--det-level", "run"))
    assert verdict.code == 1, verdict.output
    assert verdict.json["first_difference"]["arm"] == "vary-1"
    assert verdict.json["first_difference"]["quantity"] == "num/grad_norm"


RECORDED = {
    "tp2": ("gpt", (*TP2, "--overlap-grad-reduce")),
    "ep2": ("moe", EP2),
    "inst2": ("gpt", ("--num-distributed-optimizer-instances", "2", *SPLIT.split())),
}


def test_every_reduction_of_megatron_is_in_the_table(launch, tmp_path):
    """``contract/reductions.json`` is what these runs record; ``scripts/record_reductions.py --write`` makes it."""
    for name, (config, flags) in RECORDED.items():
        command = launch(4, config, *flags, "--det", "--det-device", "cpu", "--exit-interval", "2",
                         "--det-collectives", str(tmp_path / name))  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, text=True, timeout=300,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:]
    folders = [str(tmp_path / name) for name in RECORDED]
    done = subprocess.run([sys.executable, "scripts/record_reductions.py", *folders], cwd=ROOT, text=True,
                          capture_output=True, timeout=60, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads((ROOT / "megatron_det" / "contract" / "reductions.json").read_text())
    assert all(row["how"] == "rank order" or "int" in row["dtype"] for row in table), "floats go in rank order"


def test_doctor_probes_the_collectives():
    done = subprocess.run([str(BIN / "megatron-det"), "doctor", "--collectives", "--device", "cpu", "--json"], cwd=ROOT,
                          env=environment(), text=True, capture_output=True, timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["arm"]: row for row in json.loads(done.stdout)["rows"]}
    assert len(rows) == 5 and "det tree, two nodes" in rows
    for name, row in rows.items():
        answers = [row[q] for q in ("split as fused", "slice of a longer one", "repeated in new processes",
                                    "ranks placed otherwise", "other groups made first")]  # fmt: skip
        assert all(answers) == (name != "vendor"), (name, row)
        assert row["ms"] > 0
