"""The refusal as people read it: one table with every problem, at 80 columns, without need of colour."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from megatron_det.errors import Finding


def render(title: str, findings: Sequence[Finding], width: int = 100) -> str:
    """Columns: what, found, needed, why, how to fix."""
    table = Table(title=title, title_justify="left", show_lines=True, expand=True)
    for heading in ("what", "found", "needed", "why", "how to fix"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row(f"{finding.what}\n{finding.code}", finding.found, finding.needed, finding.why, finding.do)
    stream = io.StringIO()
    Console(file=stream, width=width, no_color=True).print(table)
    return stream.getvalue()
