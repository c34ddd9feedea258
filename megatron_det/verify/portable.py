"""What of a ledger must stay equal when only bucket size, overlap or placement changes: everything but who holds which
shard of the optimizer's state. Shards of one quantity are folded over all ranks into one value.

The fold is the xor of the order-blind digests, which is what the order-blind digest of the whole would be; quantities
without a dimension (a step count) are folded to the set of their values, since more ranks may hold them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_det.formats.ledger import RunLedger

WHOLE = ("param", "buffer", "lr", "weight_decay", "scheduler", "group_step", "loss_scale", "grad_scaler")
Item = tuple[str, dict[str, Any]]


def is_sharded(name: str) -> bool:
    """main parameters and moments; not what every rank holds whole."""
    phase, _, rest = name.partition("/")
    return phase in ("state", "after") and rest.partition("/")[0] not in WHOLE


def pair(a: RunLedger, b: RunLedger) -> tuple[RunLedger, RunLedger, list[str]]:
    """Both runs in this form, and notices. Weights that only one side records (overlapped gather) are left out."""
    one, other = _names(a), _names(b)
    missing = sorted(name for name in one ^ other if not is_sharded(name) and "/param/" in name)
    notices = ["shards of the optimizer's state are compared folded over all ranks"]
    if missing:
        notices.append(f"{len(missing)} weights are in one ledger only (overlapped gather) and were not compared")
    return _folded(a, set(missing)), _folded(b, set(missing)), notices


def _names(run: RunLedger) -> set[str]:
    return {name for ledger in run.ranks.values() for items in ledger.steps.values() for name, _ in items}


def _folded(run: RunLedger, left_out: set[str]) -> RunLedger:
    first = min(run.ranks)
    ranks = {}
    for rank, ledger in run.ranks.items():
        steps: dict[int, list[Item]] = {}
        for iteration, items in ledger.steps.items():
            kept = [(name, value) for name, value in items if not is_sharded(name) and name not in left_out]
            steps[iteration] = kept + (list(_fold(run, iteration)) if rank == first else [])
        ranks[rank] = replace(ledger, steps=steps)
    return replace(run, ranks=ranks)


def _fold(run: RunLedger, iteration: int) -> Iterator[Item]:
    """One item per sharded quantity, in the order in which the ranks name them."""
    found: dict[str, list[dict[str, Any]]] = {}
    for rank in sorted(run.ranks):
        for name, value in run.ranks[rank].steps.get(iteration, []):
            if is_sharded(name):
                found.setdefault(name, []).append(value)
    for name, values in sorted(found.items()):
        yield f"{name} (all ranks)", _union(values)


def _union(values: list[dict[str, Any]]) -> dict[str, Any]:
    if all(value.get("t") == "digest" and value["shape"] for value in values):
        blind, elements = 0, 0
        for value in values:
            blind ^= int(value["blind"], 16)
            count = 1
            for size in value["shape"]:
                count *= size
            elements += count
        return {"t": "digest", "dtype": values[0]["dtype"], "shape": [elements], "blind": f"{blind:016x}",
                "ordered": f"{blind:016x}"}  # fmt: skip
    different = sorted({repr(sorted(value.items())) for value in values})
    return {"t": "str", "text": "; ".join(different)}
