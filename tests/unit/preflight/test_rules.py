"""Every rule fires on what it is for, and stays silent on a sound configuration; all problems come at once."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import pytest

from megatron_det.contract.options import Options
from megatron_det.preflight import rules
from megatron_det.preflight.arguments import RULES as ARGUMENT_RULES
from megatron_det.preflight.context import Context
from megatron_det.preflight.table import render

SOUND_ARGS = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "global_batch_size": 8,
    "micro_batch_size": 2,
    "cross_entropy_loss_fusion": False,
    "optimizer": "adam",
    "ckpt_format": "torch_dist",
    "moe_token_dispatcher_type": "alltoall",
    "dataloader_type": "single",
    "cuda_graph_impl": "none",
}
SOUND = Context(
    options=Options(det=True),
    args=Namespace(**SOUND_ARGS),
    environment={},
    rank=0,
    world_size=4,
    gpu_visible=True,
    versions={"megatron-core": "0.19.2", "torch": "2.14.1+cu130"},
    required_args={"cross_entropy_loss_fusion": False},
    accepted_env={"CUBLAS_WORKSPACE_CONFIG": frozenset({":4096:8"})},
    accepted_nccl=frozenset({"Ring", "^NVLS"}),
)


def codes(context: Context) -> list[str]:
    return [finding.code for finding in rules.findings(context)]


def with_args(**changes) -> Context:
    return replace(SOUND, args=Namespace(**{**SOUND_ARGS, **changes}))


def test_a_sound_configuration_has_no_findings():
    assert codes(SOUND) == []
    assert codes(replace(SOUND, args=None)) == [], "doctor has no arguments"


BAD_VALUES = {
    "moe_token_dispatcher_type": "flex", "fp8": "hybrid", "fp4": "nvfp4", "context_parallel_size": 2,
    "cuda_graph_impl": "local", "optimizer": "muon", "rampup_batch_size": ["1"], "yaml_cfg": "x.yaml",
    "ckpt_format": "fsdp_dtensor", "non_persistent_ckpt_type": "local", "dataloader_type": "external",
}  # fmt: skip


@pytest.mark.parametrize("rule", ARGUMENT_RULES, ids=lambda rule: rule.code)
def test_every_argument_rule_fires(rule):
    found = rules.findings(with_args(**{rule.argument: BAD_VALUES.get(rule.argument, True)}))
    assert [f.code for f in found] == [rule.code]
    assert rule.flag in found[0].what
    assert all((found[0].found, found[0].needed, found[0].why, found[0].do))


@pytest.mark.parametrize(
    ("code", "context"),
    [
        ("DET-NEEDS-DET", replace(SOUND, options=Options(ledger=None))),
        ("DET-LEVEL", replace(SOUND, options=Options(det=True, level="elastic"))),
        ("DET-VERSION", replace(SOUND, versions={"megatron-core": "0.20.0", "torch": "2.14.1"})),
        ("DET-VERSION", replace(SOUND, versions={"megatron-core": None, "torch": "2.14.1"})),
        ("DET-VERSION", replace(SOUND, versions={"megatron-core": "0.19.2", "torch": "2.9.0"})),
        ("DET-NO-GPU", replace(SOUND, gpu_visible=False)),
        ("DET-MEGATRON-ARG", with_args(cross_entropy_loss_fusion=True)),
        ("DET-MEGATRON-ENV", replace(SOUND, environment={"CUBLAS_WORKSPACE_CONFIG": ":0:0"})),
        ("DET-MEGATRON-ENV", replace(SOUND, environment={"NCCL_ALGO": "Tree"})),
        ("DET-MEGATRON-ENV", replace(SOUND, environment={"NCCL_ALGO": ""})),
        ("DET-MEGATRON-ENV", replace(SOUND, environment={"MAMBA_DETERMINISTIC": "0"})),
        ("DET-LAYOUT", with_args(tensor_model_parallel_size=3)),
        ("DET-LAYOUT", with_args(expert_model_parallel_size=8)),
        ("DET-LAYOUT", with_args(global_batch_size=6)),
        ("DET-SPEC", with_args(spec=["no.such.module", "x"])),
        ("DET-SPEC", with_args(spec=["json", "no_such_attribute"])),
        ("DET-DATA", with_args(data_path=["0.5", "/nowhere/text"])),
        ("DET-LEDGER-WRITE", replace(SOUND, options=Options(det=True, ledger="/proc/nowhere/below"))),
    ],
)
def test_every_other_rule_fires_alone(code, context):
    assert codes(context) == [code]


@pytest.mark.parametrize(
    "context",
    [
        replace(SOUND, environment={"NCCL_ALGO": "Ring, ^NVLS", "MAMBA_DETERMINISTIC": "1"}),
        replace(SOUND, gpu_visible=False, options=Options(det=True, device="cpu")),
        with_args(spec=["json", "dumps"]),
        with_args(expert_model_parallel_size=4),
    ],
)
def test_what_is_allowed_is_let_through(context):
    assert codes(context) == []


def test_ledger_of_another_run(tmp_path):
    (tmp_path / "rank-00000.jsonl").write_text("x")
    assert codes(replace(SOUND, options=Options(det=True, ledger=str(tmp_path)))) == ["DET-LEDGER-FOREIGN"]
    assert codes(replace(SOUND, rank=1, options=Options(det=True, ledger=str(tmp_path)))) == []


def checkpoint(directory, iteration=2):
    folder = directory / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    (directory / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")
    for name in ("metadata.json", ".metadata", "__0_0.distcp"):
        (folder / name).write_text("x")
    return folder


def test_checkpoint(tmp_path):
    load = str(tmp_path)
    assert codes(with_args(load=load)) == [], "an empty directory is Megatron's way to start fresh"
    assert codes(with_args(load=load, exit_on_missing_checkpoint=True)) == ["DET-CKPT-MISSING"]
    folder = checkpoint(tmp_path)
    assert codes(with_args(load=load)) == []
    assert codes(with_args(load=load, ckpt_step=7)) == ["DET-CKPT-MISSING"]
    checkpoint(tmp_path, 3)
    assert codes(with_args(load=load, ckpt_step=2)) == []
    assert codes(with_args(load=load, ckpt_step=2, ckpt_format="torch")) == ["DET-CKPT-STEP"]
    assert codes(with_args(load=load, ckpt_step=3, ckpt_format="torch")) == []
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    (folder / "__0_0.distcp").write_text("")
    assert codes(with_args(load=load)) == ["DET-CKPT-DAMAGED"]
    (folder / "__0_0.distcp").write_text("x")
    (folder / ".metadata").unlink()
    assert codes(with_args(load=load)) == ["DET-CKPT-DAMAGED"]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("two")
    assert codes(with_args(load=load)) == ["DET-CKPT-DAMAGED"]


def test_all_problems_at_once_and_waivers():
    many = with_args(fp8="hybrid", sft=True, moe_permute_fusion=True)
    assert len(codes(many)) == 3
    found = rules.findings(many)
    assert len(rules.standing(found, ())) == 3
    left = [f.code for f in rules.standing(found, ("DET-ARG-FP8",))]
    assert left == [f.code for f in found if f.code != "DET-ARG-FP8"]


def test_what_cannot_be_waived():
    found = rules.findings(with_args(data_path=["/nowhere/text"]))
    left = [f.code for f in rules.standing(found, ("DET-DATA", "NONSENSE"))]
    assert left == ["DET-ALLOW", "DET-ALLOW", "DET-DATA"]


def test_the_table_shows_every_problem_at_80_columns():
    found = rules.findings(with_args(fp8="hybrid", sft=True))
    text = render("refused", found, width=80)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "DET-ARG-FP8" in text.replace("\n", "")
    assert "\x1b" not in text
