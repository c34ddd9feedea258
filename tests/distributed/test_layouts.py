"""The main job on every layout: twice in fresh processes, continued, resumed, and a cold arm that must differ."""

from __future__ import annotations

import pytest
from conftest import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.training]

TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
EP2 = ("--expert-model-parallel-size", "2")

LAYOUTS = {
    "gpt-dp2": (2, "gpt", ()),
    "gpt-dp4": (4, "gpt", ()),
    "gpt-tp2": (2, "gpt", TP2),
    "gpt-pp2": (2, "gpt", PP2),
    "gpt-tp2-pp2": (4, "gpt", TP2 + PP2),
    "moe-ep2": (2, "moe", EP2),
    "moe-ep2-dp2": (4, "moe", EP2),
    "moe-ep2-forced-balance": (2, "moe", (*EP2, "--moe-router-force-load-balancing")),
}
SAME = ("a", "b", "continued", "resumed")


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_repeats_and_resumes(name, launch, verify):
    nproc, config, flags = LAYOUTS[name]
    verdict = verify(["--iters", "4", "--resume-at", "2"], launch(nproc, config, *flags))
    assert verdict.code == 0, verdict.output
    arms = verdict.arms()
    assert {arm: arms[arm] for arm in SAME} == dict.fromkeys(SAME, "identical"), verdict.output
    assert arms["cold"] == "differs, as it must", verdict.output
    assert verdict.json["verdict"] == "identical"
    assert {arm["ranks"] for arm in verdict.json["arms"]} == {nproc}


def test_distributed_optimizer_in_fp32_resumes(tmp_path, launch, verify):
    """0.19.2 crashes here without TE and Apex: in-place copy into a view of a leaf."""
    text = (ROOT / "configs" / "gpt.args").read_text()
    fp32 = tmp_path / "gpt-fp32.args"
    fp32.write_text("\n".join(line for line in text.splitlines() if line.split("#")[0].strip() != "--bf16"))
    assert "--use-distributed-optimizer" in fp32.read_text()
    assert fp32.read_text() != text, "the control: configs/gpt.args is bf16"
    command = [f"@{fp32}" if word == "@configs/gpt.args" else word for word in launch(2, "gpt")]
    verdict = verify(["--iters", "4", "--resume-at", "2"], command)
    assert verdict.code == 0, verdict.output


OBSERVE = ("--det-level", "observe")
RESUME_ONLY = ["--iters", "4", "--resume-at", "2", "--runs", "1"]
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
WAYS_OF_RUNNING = {
    "torch format": ("--ckpt-format", "torch"),
    "overlapped gather": ("--overlap-grad-reduce", "--overlap-param-gather"),
    "cyclic data, started in the first step": ("--dataloader-type", "cyclic", "--num-workers", "2"),
    "evaluation in between, recompute": ("--eval-interval", "2", "--eval-iters", "2", *RECOMPUTE),
}


@pytest.mark.parametrize("name", WAYS_OF_RUNNING)
def test_ways_of_running_resume(name, launch, verify):
    """Each of these once differed, or would without its patch: see the docstrings in patching/inventory."""
    verdict = verify(RESUME_ONLY, launch(2, "gpt", *WAYS_OF_RUNNING[name]))
    assert verdict.code == 0, verdict.output


def test_stock_megatron_cannot_resume_torch_adam(launch, verify):
    """The control of the distributed optimizer's patch: the same arms at level ``observe``, which changes nothing."""
    verdict = verify(RESUME_ONLY, launch(2, "gpt", *OBSERVE))
    assert verdict.code == 2, verdict.output
    assert verdict.arms()["continued"] == "identical"
    assert verdict.arms()["resumed"] == "could not run"
    assert "AssertionError" in verdict.output


def test_stock_megatron_gives_experts_the_stream_of_their_peer(tmp_path, launch, verify):
    """The control of the per-rank RNG, on forced load balancing and without the distributed optimizer."""
    text = (ROOT / "configs" / "moe.args").read_text().replace("--use-distributed-optimizer\n", "")
    plain = tmp_path / "moe-plain.args"
    plain.write_text(text)
    flags = (*EP2, "--moe-router-force-load-balancing", *OBSERVE)
    command = [f"@{plain}" if word == "@configs/moe.args" else word for word in launch(2, "moe", *flags)]
    verdict = verify(RESUME_ONLY, command)
    assert verdict.code == 1, verdict.output
    first = verdict.json["first_difference"]
    assert (first["arm"], first["iteration"]) == ("resumed", 3)
    assert "rng/tracker/expert-parallel-rng" in first["all_quantities"] or first["quantity"].startswith("rng/")
    others = [d["quantity"] for arm in verdict.json["arms"] if arm["name"] == "resumed"
              for d in arm["comparison"]["other_ranks"]]  # fmt: skip
    assert any("rng/" in name for name in [first["quantity"], *others])
