"""Verdicts as text: a table per arm and the first difference in words. Readable at 80 columns and without colour."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

SHOWN = 8


def arms_table(verdict: dict[str, Any]) -> Table:
    table = Table("arm", "against", "iterations", "ranks", "seconds", "result")
    for arm in verdict["arms"]:
        span = "-" if arm["iterations"] is None else f"{arm['iterations'][0]}..{arm['iterations'][1]}"
        style = {"identical": "green", "differs, as it must": "green", "differs": "red"}.get(arm["result"], "yellow")
        table.add_row(
            arm["name"], arm["against"] or "-", span, str(arm["ranks"] or "-"), f"{arm['seconds']:.0f}",
            f"[{style}]{arm['result']}[/]",
        )  # fmt: skip
    return table


def show_difference(console: Console, first: dict[str, Any]) -> None:
    """The headline: where, what, both values, distance, what it can mean."""
    arm = f"arm {first['arm']} against {first['against']}, " if first.get("arm") else ""
    place = "before the first step" if first["iteration"] is None else f"iteration {first['iteration']}"
    rank = "" if first["rank"] is None else f", rank {first['rank']}"
    console.print(f"first difference: {arm}{place}{rank}: {first['quantity']}", markup=False, style="bold")
    console.print(f"  a     {first['a']}", markup=False, highlight=False)
    console.print(f"  b     {first['b']}", markup=False, highlight=False)
    if first["ulp"] is not None:
        console.print(f"  apart {first['ulp']} ulp", markup=False)
    if first["note"]:
        console.print(f"  note  {first['note']}", markup=False)
    console.print(f"  cause {first['cause']}. {first['meaning']}", markup=False)
    names = first["all_quantities"]
    if len(names) > 1:
        rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        console.print(f"  in this iteration {len(names)} quantities of this rank differ: ", markup=False, end="")
        console.print(", ".join(names[:SHOWN]) + rest, markup=False)


def show_verdict(console: Console, verdict: dict[str, Any], log_lines: list[str]) -> None:
    """What ``verify`` found."""
    console.print(arms_table(verdict))
    for line in log_lines:
        console.print(f"  | {line}", markup=False, highlight=False)
    if verdict["first_difference"]:
        show_difference(console, verdict["first_difference"])
    for notice in verdict["notices"]:
        console.print(f"note: {notice}", markup=False)
    console.print(f"verdict: {verdict['verdict']}", style="bold")


def show_comparison(console: Console, comparison: dict[str, Any]) -> None:
    """What ``compare`` found."""
    first, last = comparison["iterations"]
    console.print(f"iterations {first}..{last}: {comparison['verdict']}", style="bold")
    if comparison["first_difference"]:
        show_difference(console, comparison["first_difference"])
    for other in comparison["other_ranks"]:
        line = f"  rank {other['rank']} differs in the same iteration, first at {other['quantity']}"
        console.print(line, markup=False)
    for d in comparison["environment"]:
        console.print(f"  environment: {d['section']}/{d['key']}: {d['a']!r} and {d['b']!r}", markup=False)
    for notice in comparison["notices"]:
        console.print(f"note: {notice}", markup=False)
