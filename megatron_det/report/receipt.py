"""Receipts as people read them: what a checkpoint holds, and where two checkpoints differ. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_det.formats import receipt, scalars

DIGEST = "digest"
SHOWN = 40


def describe(checkpoint: Path) -> dict[str, Any]:
    """One checkpoint: head, pieces over all ranks, cross-rank facts. Raises: CheckpointError."""
    index, parts = receipt.read_all(checkpoint)
    pieces = []
    for piece in parts[0]["pieces"]:
        everywhere = [one for part in parts for one in part["pieces"] if one["name"] == piece["name"]]
        seals = {receipt.piece_seal(one) for one in everywhere}
        values = [value for one in everywhere for _, value in one["entries"]]
        pieces.append(
            {
                "name": piece["name"],
                "about": piece["about"].partition(";")[0],
                "entries": len(values),
                "bytes": sum(size(value) for value in values if value["t"] == DIGEST),
                "restored": any(one["state"] is not None for one in everywhere),
                "ranks": "all equal" if len(seals) == 1 else f"{len(seals)} of {len(parts)} differ",
                "seal": receipt.values_seal((one["name"], receipt.piece_seal(one)) for one in everywhere),
            }
        )
    drifted = receipt.unequal_replicas(index)
    head = {key: index[key] for key in ("iteration", "world_size", "layout")}
    facts = {"whole": True, "boundary": parts[0]["boundary"], "replicas": [one.as_dict() for one in drifted]}
    small = [
        {"piece": piece["name"], "name": name, "value": scalars.show(value)}
        for piece in parts[0]["pieces"]
        for name, value in piece["entries"]
        if value["t"] not in (DIGEST, "list") and piece["name"] not in ("optimizer", "groups", "kernels")
    ]
    return {**head, "path": str(checkpoint), "pieces": pieces, "facts": facts, "small": small}


WIDTHS = {"bool": 1, "uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "int32": 4}


def size(value: dict[str, Any]) -> int:
    """Bytes behind a digest."""
    count = 1
    for extent in value["shape"]:
        count *= extent
    return count * WIDTHS.get(value["dtype"].split(" ")[0], 8)


def difference(a: Path, b: Path) -> dict[str, Any]:
    """Two checkpoints: layout, environment, and every entry that differs, rank by rank. Raises: CheckpointError."""
    (index_a, parts_a), (index_b, parts_b) = receipt.read_all(a), receipt.read_all(b)
    left_head, right_head = ({key: index[key] for key in ("iteration", "layout")} for index in (index_a, index_b))
    around: dict[str, Any] = {}
    wrong: list[receipt.Mismatch] = []
    for one, other in zip(parts_a, parts_b, strict=False):
        for key, left, right in receipt.changed(one["environment"], other["environment"]):
            around.setdefault(key, [left, right])
        abouts = {piece["name"]: piece["about"].partition(";")[0] for piece in one["pieces"]}
        wrong += receipt.compare(one, other, abouts)
    head = [[key, left, right] for key, left, right in receipt.changed(left_head, right_head)]
    same = not wrong and not head and not around and len(parts_a) == len(parts_b)
    return {
        "verdict": "identical" if same else "differs",
        "head": head,
        "environment": [[key, *values] for key, values in around.items()],
        "entries": [one.as_dict() for one in wrong],
    }


def show(console: Console, found: dict[str, Any]) -> None:
    """What ``megatron-det receipt PATH`` says."""
    split = ", ".join(f"{key} {value}" for key, value in found["layout"].items() if value not in (None, 1))
    console.print(f"iteration {found['iteration']}, {found['world_size']} ranks: {split}", markup=False, style="bold")
    table = Table("piece", "entries", "MB", "state kept", "ranks", "seal", "what")
    for piece in found["pieces"]:
        table.add_row(
            piece["name"], str(piece["entries"]), f"{piece['bytes'] / 1e6:.1f}", "yes" if piece["restored"] else "",
            piece["ranks"], piece["seal"], piece["about"],
        )  # fmt: skip
    console.print(table)
    for one in found["small"][:SHOWN]:
        console.print(f"  {one['piece']}: {one['name']} = {one['value']}", markup=False, highlight=False)
    for one in found["facts"]["replicas"]:
        console.print(f"replicas differ: rank {one['rank']}: {one['cause']}", markup=False, style="red")
    console.print(
        f"boundary: {found['facts']['boundary']}; all {found['world_size']} ranks' parts are whole", markup=False
    )


def show_difference(console: Console, found: dict[str, Any]) -> None:
    """What ``megatron-det receipt A B`` says."""
    for kind in ("head", "environment"):
        for key, left, right in found[kind]:
            console.print(f"{key}: {left!r} and {right!r}", markup=False, highlight=False)
    if found["entries"]:
        text = receipt.table([receipt.Mismatch(**one) for one in found["entries"]])
        text = text.replace("saved", "a    ", 1).replace("found", "b    ", 1).replace("likely cause", "what", 1)
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(f"verdict: {found['verdict']}", style="bold")
