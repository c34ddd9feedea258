"""Contract levels, and the links of the chain that a run hangs on. A run is as strong as its weakest link."""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = ("observe", "run", "placement", "elastic", "layout")


@dataclass(frozen=True)
class Link:
    """One part of a training step: the level up to which its bits are vouched for, and why not higher."""

    name: str
    level: str
    why: str


LINKS = (
    Link("data order", "placement", "made from the seed, the files and the logical ranks"),
    Link("RNG streams", "placement", "one per logical rank, saved and restored per global rank"),
    Link("optimizer and checkpoint", "placement", "what is loaded is compared with what was saved"),
    Link("local operations", "placement", "torch's deterministic implementations, one process each"),
)
ORDERED = Link("collectives", "placement", "sums are made in logical-rank order by the det backend")
VENDOR = Link(
    "collectives", "run", "at level run sums are the vendor's: they may follow ring, message size and buckets"
)


def strength(level: str) -> int:
    """Position of a level; higher keeps the bits through more changes."""
    return LEVELS.index(level)


def links(level: str) -> tuple[Link, ...]:
    """The chain of a run at this level."""
    return (*LINKS, ORDERED if strength(level) >= strength("placement") else VENDOR)


def weakest(level: str) -> Link:
    return min(links(level), key=lambda link: strength(link.level))
