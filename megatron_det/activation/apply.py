"""The late half of an activation, when Megatron validates its arguments: refuse, or carry out the plan."""

from __future__ import annotations

import os
import sys
import traceback
import uuid
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.training import determinism

from megatron_det import devices
from megatron_det.activation import built, environment, flags, manifest, switches
from megatron_det.activation.start import Activation
from megatron_det.collectives import record
from megatron_det.contract.levels import weakest
from megatron_det.contract.options import Options
from megatron_det.errors import DetError, Finding
from megatron_det.formats import manifest as manifest_format
from megatron_det.patching import engine, inventory
from megatron_det.patching.inventory.run import Run
from megatron_det.preflight import rules
from megatron_det.preflight.context import Context
from megatron_det.preflight.table import render
from megatron_det.testing import chaos
from megatron_det.trace.recorder import Recorder


@dataclass
class Activated:
    """An activated run and its undo."""

    run: Run
    applied: engine.Applied
    undo_switches: Callable[[], None] | None = None

    def undo(self) -> None:
        self.applied.undo()
        if self.undo_switches is not None:
            self.undo_switches()


_activated: Activated | None = None


def context(options: Options, args: Namespace | None) -> Context:
    return Context(
        options=options,
        args=args,
        environment=os.environ,
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        gpu_visible=torch.cuda.is_available() and not devices.installed(),
        versions=manifest.versions(),
        required_args=determinism.ARG_VALUES_REQUIRED_FOR_DETERMINISM,
        accepted_env=determinism.ACCEPTED_ENV_VAR_VALUES,
        accepted_nccl=determinism.ACCEPTED_NCCL_ALGO_TOKENS,
    )


def validate(activation: Activation, original: Callable[..., Any], args: Namespace, defaults: dict[str, Any]) -> Any:
    """Stands in front of Megatron's ``validate_args``: preflight, the switch, Megatron's own checks, then the plan."""
    global _activated
    if _activated is not None:
        return original(args, defaults)
    options = flags.from_namespace(args)
    options = options if options.det else Options(**{**vars(options), "det": activation.options.det})
    here = context(options, args)
    observe = options.level == "observe"
    found = list(activation.problems)
    found += rules.needs_det(here) if observe else rules.findings(here)
    if options.det and not observe:
        found += environment.findings(os.environ, options.device == "cpu", activation.late)
        args.deterministic_mode = True
    found = rules.standing(found, options.allow)
    if found:
        refuse(found, here)
    try:
        result = original(args, defaults)
    except AssertionError as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).strip() or f"the assertion '{where.line}' in {where.name}, line {where.lineno}"
        refuse(
            [
                Finding(
                    "DET-MEGATRON-ASSERT", "arguments", text.splitlines()[0], "arguments that Megatron accepts",
                    "Megatron's own check failed.", "correct the argument that it names.",
                )
            ],
            here,
        )  # fmt: skip
    try:
        _activated = carry_out(options, result if result is not None else args, here)
    except DetError as error:
        refuse([error.finding], here)
    return result


def carry_out(options: Options, args: Namespace, here: Context) -> Activated:
    """Applies the plan: switches, patches, injected fault, manifest, ledger. All or nothing."""
    run = Run(options=options, rank=here.rank, world_size=here.world_size)
    observe = options.level == "observe"
    undo_switches = None if observe else switches.set_all(options.debug)
    plan = inventory.patches(run)
    run.manifest = manifest.gather(options, args, run.rank, {p.id: p.why for p in plan})
    if options.chaos is not None:
        plan += chaos.install(options.chaos, run)
    result = Activated(run, engine.Applied(), undo_switches)
    try:
        engine.apply(plan, result.applied)
        if not observe:
            run.before_first_forward.insert(0, built.check(result.applied, args))
            run.before_step.append(switches.check(options.debug))
            run.before_first_forward.append(inventory.check_groups(options.level))
        if options.collectives is not None:
            record.write_at_exit(Path(options.collectives) / f"rank-{run.rank:05d}.json")
        if options.ledger is not None:
            directory = Path(options.ledger)
            run.recorder = Recorder(directory, run.rank, run.world_size, run_id())
            manifest_format.write(directory, run.rank, run.manifest)
    except BaseException:
        result.undo()
        raise
    if run.rank == 0:
        announce(options, run, plan)
    return result


def run_id() -> str:
    """The same on all ranks of one launch: torchrun's id with its port, else this machine's own."""
    parts = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID")]
    text = "-".join(part for part in parts if part)
    return text or uuid.uuid4().hex


def announce(options: Options, run: Run, plan: list[engine.Patch]) -> None:
    """What changed, and the weakest link, on rank 0."""
    device, link = run.manifest["device"], weakest(options.level)
    print(f"megatron-det: level {options.level}, device {device}, {len(plan)} patches", flush=True)
    print(f"megatron-det: weakest link: {link.name} ({link.level}): {link.why}", flush=True)
    for patch in plan:
        print(f"megatron-det:   {patch.id}: {patch.why}", flush=True)
    for code in options.allow:
        print(f"megatron-det: WAIVED {code}: the claim does not cover it", flush=True)
    if options.chaos is not None:
        print(f"megatron-det: CHAOS {options.chaos}: a fault is injected on purpose", flush=True)


def refuse(found: list[Finding], here: Context) -> None:
    """One table on rank 0, one line elsewhere, a record beside the ledger, exit code 2."""
    if here.rank == 0:
        print(render("megatron-det refuses this run", found), file=sys.stderr, flush=True)
        for finding in found:
            print(f"megatron-det: {finding.one_line()}", file=sys.stderr, flush=True)
    else:
        codes = ", ".join(finding.code for finding in found)
        print(f"megatron-det: rank {here.rank}: refused ({codes})", file=sys.stderr, flush=True)
    writable = not any(f.code == "DET-LEDGER-WRITE" for f in found)
    if here.options.ledger is not None and writable:
        document = {"exit_code": 2, "rank": here.rank, "findings": [finding.as_dict() for finding in found]}
        manifest_format.write_json(manifest_format.refusal_path(Path(here.options.ledger), here.rank), document)
    sys.exit(2)
