"""The one dataclass of ``--det`` options. ``activation.flags`` turns it into argparse flags."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


def option(default: Any, flag: str, help_text: str, **extra: Any) -> Any:
    """A dataclass field that knows its flag, its help, and what argparse needs (``choices``, ``metavar``)."""
    metadata = {"flag": flag, "help": help_text, **extra}
    if isinstance(default, (list, tuple)):
        return field(default=tuple(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Options:
    """What the user asked for. Defaults are what ``--det`` alone means."""

    det: bool = option(False, "--det", "train bitwise reproducibly and resumably; refuse what cannot be vouched for")
    level: str = option(
        "placement",
        "--det-level",
        "contract level: 'placement' (same bits again, wherever the ranks are placed and whatever the bucket size and "
        "overlap), 'run' (same bits again on the same placement; sums stay the vendor's), or 'observe' (change "
        "nothing, promise nothing, only record)",
        choices=("observe", "run", "placement"),
    )
    order: str = option(
        "tree",
        "--det-order",
        "order of sums over ranks at level placement: 'tree' (balanced, may go node by node) or 'linear'",
        choices=("tree", "linear"),
    )
    placement: str | None = option(
        None,
        "--det-placement",
        "an experiment: the process that the launcher gave rank p becomes rank Pp, on the device that it has; the "
        "bits must not change at level placement",
        metavar="P0,P1,…",
    )
    ledger: str | None = option(
        None, "--det-ledger", "write the full-precision ledger and the manifest of this run here", metavar="DIR"
    )
    device: str = option(
        "auto",
        "--det-device",
        "'cuda'; 'cpu' runs the real loop on the CPU stand-in over gloo; 'auto' is cuda and refuses without a GPU",
        choices=("auto", "cuda", "cpu"),
    )
    digest_interval: int = option(
        1,
        "--det-digest-interval",
        "digest parameters and optimizer state every N iterations (0: never; the scalars are always recorded)",
        metavar="N",
    )
    resume: str = option(
        "strict",
        "--det-resume",
        "'strict' refuses a checkpoint that lacks our per-rank state; 'warn' loads it and withdraws the claim",
        choices=("strict", "warn"),
    )
    allow: tuple[str, ...] = option(
        (),
        "--det-allow",
        "waive findings by code; the waiver is printed and recorded, and the claim no longer covers it",
        metavar="CODE",
    )
    collectives: str | None = option(
        None,
        "--det-collectives",
        "write what each rank reduced, where in the code, in which group and how (one JSON file per rank) here",
        metavar="DIR",
    )
    debug: bool = option(
        False, "--det-debug", "debug profile: also fill fresh memory with NaN, so that reads of it show (slower)"
    )
    chaos: str | None = option(
        None,
        "--det-chaos",
        "inject one fault on purpose, to see that it is caught, e.g. 'flip-bit:iteration=3,rank=1'",
        metavar="SPEC",
    )

    @classmethod
    def flags(cls) -> tuple[str, ...]:
        """All flags, in the order in which help shows them."""
        return tuple(f.metadata["flag"] for f in fields(cls))
