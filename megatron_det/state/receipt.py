"""Takes the receipt of this rank at a clean boundary, checks memory against one, and puts back what is ours.

Checked at three moments: when it was saved (memory against the file), when it was loaded (against the receipt), and
just before the first forward, after everything else has drawn its random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_det.errors import CheckpointError
from megatron_det.formats import receipt
from megatron_det.formats.receipt import Mismatch
from megatron_det.state import builtin, digests, model
from megatron_det.state.packing import pack, unpack
from megatron_det.state.piece import Here, Piece, cause, pieces

CLEAN = "clean"


def take(here: Here, head: dict[str, Any], only: Iterable[str] | None = None, states: bool = True) -> dict[str, Any]:
    """This rank's part, or some pieces of it. ``head``: iteration, rank, world_size, layout, environment, boundary.

    Raises: CheckpointError when two entries have one name, or a state would need pickle.
    """
    wanted = [piece for piece in pieces() if only is None or piece.name in only]
    states_of = {piece.name: pack(piece.capture(here)) if states else None for piece in wanted}
    flat = [(piece.name, name, one) for piece in wanted for name, one in piece.digest(here)]
    names = [name for _, name, _ in flat]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError.of(
            "DET-PIECE-TWICE", f"entry {twice}", found="two entries of that name", needed="one name for each",
            why="Which of them was restored could not be told.", do="report this model, or rename the piece's entry.",
        )  # fmt: skip
    found = digests.values((name, one) for _, name, one in flat)
    by_piece: dict[str, list[tuple[str, Any]]] = {piece.name: [] for piece in wanted}
    for (owner, _, _), item in zip(flat, found, strict=True):
        by_piece[owner].append(item)
    listed = [
        {"name": p.name, "about": p.describe(), "entries": by_piece[p.name], "state": states_of[p.name]} for p in wanted
    ]
    return receipt.plain({"schema": receipt.SCHEMA, **head, "pieces": listed})


def check(here: Here, document: dict[str, Any], only: Iterable[str] | None = None) -> list[Mismatch]:
    """Entries of memory that are not as the receipt says. Nothing is changed."""
    head = {key: document[key] for key in ("iteration", "rank", "world_size", "layout", "environment", "boundary")}
    wanted = None if only is None else set(only)
    causes = {piece.name: cause(piece) for piece in pieces()}
    wrong = receipt.compare(document, take(here, head, wanted, states=False), causes, wanted)
    return [_sharper(one, wrong, document) for one in wrong]


def _sharper(one: Mismatch, wrong: list[Mismatch], document: dict[str, Any]) -> Mismatch:
    """A kind that is wrong in every entry was not restored at all; one entry among many was damaged."""
    if one.piece not in ("model", "optimizer"):
        return one
    kind = one.name.partition("/")[0]
    every = [name for name, (piece, _) in receipt.entries(document).items() if name.partition("/")[0] == kind]
    bad = {each.name for each in wrong}
    if set(every) <= bad and len(every) > 1:
        what = {"main": "fp32 main parameters were not restored (rounded through 16 bits?)"}
        if kind in ("exp_avg", "exp_avg_sq", "step", "group_step"):
            what[kind] = "the optimizer's moments were not restored"
        return Mismatch(**{**one.as_dict(), "cause": what.get(kind, "nothing of this kind was restored")})
    return Mismatch(**{**one.as_dict(), "cause": "damaged, or not all of it was loaded"})


def restore(here: Here, document: dict[str, Any], leave: Iterable[str] = ()) -> None:
    """Puts back what Megatron does not carry, RNG last. ``leave``: pieces that the user asked not to load.

    Raises: CheckpointError (DET-PIECE-UNKNOWN) for a saved state whose piece is not registered here.
    """
    known = {piece.name: piece for piece in pieces()}
    saved = {piece["name"]: piece["state"] for piece in document["pieces"] if piece["state"] is not None}
    for name in saved:
        if name not in known:
            raise CheckpointError.of(
                "DET-PIECE-UNKNOWN", f"piece {name!r}", found="a saved state", needed="the piece that reads it",
                why="State that nobody restores is lost.", do="register the piece before training starts.",
            )  # fmt: skip
    for name, piece in known.items():
        if name in saved and name not in leave:
            _restore(piece, here, saved[name], document["rank"])


def _restore(piece: Piece, here: Here, state: Any, rank: int) -> None:
    try:
        piece.restore(here, unpack(state))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError.of(
            "DET-PIECE-RESTORE", f"piece {piece.name}, rank {rank}", found=f"{type(error).__name__}: {error}",
            needed="a state of this piece", why="A piece that cannot be put back would start from somewhere else.",
            do="resume with the model and the options that were saved.",
        ) from error  # fmt: skip


def replicas(here: Here, document: dict[str, Any], places: dict[str, str]) -> dict[str, tuple[str, str]]:
    """kind -> (place, digest) of the parameters that all ranks of one place must hold equally.

    ``places``: "dense" and "expert" -> the coordinates within the model-parallel split of this rank.
    """
    kinds: dict[str, list[tuple[str, Any]]] = {"dense": [], "expert": []}
    saved = receipt.entries(document)
    for name, parameter in model.parameters(here.model):
        kind = "dense" if getattr(parameter, "allreduce", True) else "expert"
        if not hasattr(parameter, "to_local"):  # sharded parameters have no replica here
            kinds[kind].append((name, saved[f"param/{name}"][1]))
    return {kind: (places[kind], receipt.values_seal(items)) for kind, items in kinds.items() if items}


def loaded_by_megatron(no_optimizer: bool) -> frozenset[str]:
    """The pieces that ``load_checkpoint`` itself brings back."""
    return builtin.WEIGHTS if no_optimizer else builtin.LOADED_BY_MEGATRON
