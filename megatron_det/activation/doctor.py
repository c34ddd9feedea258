"""``megatron-det doctor``: this machine's manifest, preflight and probes, without training."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from megatron_det.activation import apply, environment, manifest, switches
from megatron_det.collectives import probe
from megatron_det.contract.options import Options
from megatron_det.preflight import probes, rules
from megatron_det.preflight.table import render


def main(as_json: bool, device: str) -> int:
    """Prints what was found. Returns 0 when a run could start here, else 2."""
    options = Options(det=True, device=device)
    environment.prepare(os.environ, stand_in=device == "cpu")
    undo = switches.set_all(debug=False)
    try:
        document = manifest.gather(options, None, 0, {})
        findings = [*rules.findings(apply.context(options, None)), *probes.run()]
        findings += environment.findings(os.environ, device == "cpu", [])
    finally:
        undo()
    if as_json:
        print(json.dumps({"manifest": document, "findings": [f.as_dict() for f in findings]}, indent=1))
    else:
        show(document)
        print(render("preflight", findings) if findings else "preflight: no problem found; probes: all hold")
    return 2 if findings else 0


def show(document: dict) -> None:
    """The sections of the manifest as one table."""
    table = Table("section", "key", "value")
    for section, entries in document["sections"].items():
        if section != "info":
            for key, value in entries.items():
                table.add_row(section, key, "absent" if value is None else str(value))
    Console(width=100, no_color=True).print(table)


def collectives(ranks: int | None, as_json: bool, device: str) -> int:
    """Prints which sums keep their bits here. Returns 0 when all plans of the det backend do, else 1."""
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    vendor, many = ("nccl", ranks or gpus) if gpus else ("gloo", ranks or 4)
    console = Console(stderr=True, width=100)
    rows = probe.probe(many, vendor, lambda text: console.print(f"probing: {text}", markup=False))
    if as_json:
        print(json.dumps({"vendor": vendor, "ranks": many, "rows": rows}, indent=1))
    else:
        table = Table("all-reduce by", *"ABCDE", "ms", "of vendor")
        for row in rows:
            words = ["same" if row[question] else "DIFFERS" for question in probe.QUESTIONS]
            table.add_row(row["arm"], *words, f"{row['ms']:.2f}", spread(row))
        Console(width=100, no_color=True).print(table)
        print("; ".join(f"{letter}: {text}" for letter, text in zip("ABCDE", probe.QUESTIONS, strict=True)))
        print(f"{many} processes on this machine, vendor {vendor}; 4 MiB of fp32, arms in turn. Same: bit for bit.")
    ours = [row for row in rows if row["arm"] != "vendor"]
    kept = all(row[question] for row in ours for question in probe.QUESTIONS)
    return 0 if kept and all(row["equals the other plans"] is not False for row in ours) else 1


def spread(row: dict[str, Any]) -> str:
    """Median of the paired ratios and what most of them lie between."""
    return f"{row['of vendor']:.2f} ({row['spread'][0]:.2f} to {row['spread'][1]:.2f})"
