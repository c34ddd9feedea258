"""``megatron-det doctor``: this machine's manifest, preflight and probes, without training."""

from __future__ import annotations

import json
import os

from rich.console import Console
from rich.table import Table

from megatron_det.activation import apply, environment, manifest, switches
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
