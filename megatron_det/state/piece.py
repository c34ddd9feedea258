"""One piece of what the next step depends on, and the register in which users add theirs.

A piece says what stands in memory (``digest``), what Megatron does not carry by itself (``capture``, ``restore``), and
what it is (``describe``). Add one before training starts::

    class Sampler:
        name = "my sampler"
        def capture(self, here): return {"drawn": sampler.drawn}      # None: nothing of ours to restore
        def restore(self, here, state): sampler.drawn = state["drawn"]
        def digest(self, here): yield "drawn", value(sampler.drawn)   # entry name, exact ledger value
        def describe(self): return "the curriculum sampler; wrong when it was built anew"

    register(Sampler())
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_det.errors import CheckpointError

Item = tuple[str, Any]


@dataclass
class Here:
    """What stands in this process at a clean boundary between two steps. ``data`` is the training data loader."""

    model: list[Any]
    optimizer: Any
    scheduler: Any
    args: Any = None
    data: Any = None
    facts: dict[str, Any] = field(default_factory=dict)


class Piece(Protocol):
    """``capture`` gives plain values (numbers, text, lists, dictionaries, arrays, tensors: ``state.packing``), or None.
    ``digest`` yields entry names and tensors, scalars or ready ledger values; it reads and never draws.
    ``describe``: what it is and, after a semicolon, what a difference can mean."""

    @property
    def name(self) -> str: ...

    def capture(self, here: Here) -> Any: ...

    def restore(self, here: Here, state: Any) -> None: ...

    def digest(self, here: Here) -> Iterable[Item]: ...

    def describe(self) -> str: ...


class Seen:
    """Base of the pieces that Megatron saves and loads itself: looked at, never restored by us."""

    name = ""
    about = ""

    def capture(self, here: Here) -> Any:
        return None

    def restore(self, here: Here, state: Any) -> None:
        if state is not None:
            raise TypeError(f"piece {self.name} restores nothing")

    def digest(self, here: Here) -> Iterable[Item]:
        raise NotImplementedError

    def describe(self) -> str:
        return self.about


def cause(piece: Piece) -> str:
    """What a difference of this piece can mean."""
    return piece.describe().partition(";")[2].strip() or "not restored, or not all of it"


_own: list[Piece] = []


def register(piece: Piece) -> None:
    """Adds a piece to every checkpoint from now on. Raises: CheckpointError for a name that is taken."""
    if piece.name in {known.name for known in pieces()}:
        raise CheckpointError.of(
            "DET-PIECE-NAME", f"piece {piece.name!r}", found="a piece of that name", needed="another name",
            why="A receipt names each piece once.", do="choose another name, or unregister the first.",
        )  # fmt: skip
    _own.append(piece)


def unregister(name: str) -> None:
    _own[:] = [piece for piece in _own if piece.name != name]


def pieces() -> list[Piece]:
    """Built-in pieces and those of users, in the order in which they are captured and restored; RNG is last."""
    from megatron_det.state import builtin

    *rest, last = builtin.PIECES
    return [*rest, *_own, last]
