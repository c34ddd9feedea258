"""The receipt of a checkpoint: what each rank's state was when it was saved, digest by digest. Schema 2.

``iter_0000005/megatron_det/rank-00003.json`` is one global rank's part: the layout and the environment that the bits
depend on, and a list of pieces, each with its entries ``[name, exact value]`` and, where Megatron does not carry the
piece itself, its state. ``iter_0000005/megatron_det.json`` is the index: a checksum of every rank's part and of each
of its pieces, and what replicas must have in common. Both appear whole or not at all, before Megatron's tracker file
names the checkpoint. JSON with SHA-256; nothing is unpickled; neither torch nor Megatron is needed to read them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_det.errors import CheckpointError, FormatError
from megatron_det.formats import scalars
from megatron_det.formats.manifest import canonical

SCHEMA = 2
FOLDER = "megatron_det"
INDEX = "megatron_det.json"
TRACKER = "latest_checkpointed_iteration.txt"
DO = "resume from another checkpoint (--ckpt-step N)."
ABSENT = scalars.of_python(None)


@dataclass(frozen=True)
class Mismatch:
    """One entry that is not what the receipt says. ``saved`` and ``found`` are as people read them."""

    piece: str
    rank: int
    name: str
    saved: str
    found: str
    cause: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def folder(checkpoint: Path) -> Path:
    return Path(checkpoint) / FOLDER


def rank_path(checkpoint: Path, rank: int) -> Path:
    return folder(checkpoint) / f"rank-{rank:05d}.json"


def index_path(checkpoint: Path) -> Path:
    return Path(checkpoint) / INDEX


def plain(document: dict[str, Any]) -> dict[str, Any]:
    """The document as it comes back from JSON (tuples become lists)."""
    return json.loads(json.dumps(document))


def seal(document: dict[str, Any]) -> str:
    """SHA-256 of a document's canonical text without its own seal."""
    body = {key: value for key, value in document.items() if key != "sha256"}
    return hashlib.sha256(canonical(body).encode()).hexdigest()


def piece_seal(piece: dict[str, Any]) -> str:
    """16 hex digits over one piece's entries and state."""
    return hashlib.sha256(canonical([piece["entries"], piece["state"]]).encode()).hexdigest()[:16]


def values_seal(values: Iterable[tuple[str, Any]]) -> str:
    """16 hex digits over named values: what replicas must have in common."""
    return hashlib.sha256(canonical([list(item) for item in values]).encode()).hexdigest()[:16]


def entries(document: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """entry name -> (piece, value), in the order of the receipt."""
    return {name: (piece["name"], value) for piece in document["pieces"] for name, value in piece["entries"]}


def write_sealed(path: Path, document: dict[str, Any]) -> None:
    """Writes whole or not at all, and on the disk when it returns. What a failed write left is removed.

    Raises: FormatError (DET-WRITE): disk full, read-only directory.
    """
    text = json.dumps({**document, "sha256": seal(document)}, sort_keys=True)
    name = path.with_name(f".new-{path.name}-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with name.open("w") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        finally:
            name.unlink(missing_ok=True)
    except OSError as error:
        raise FormatError.of(
            "DET-WRITE", str(path), found=str(error), needed="room in a directory that can be written",
            why="A checkpoint without its receipt could not be vouched for; the last good one is still named.",
            do="make room, or choose another --save directory.",
        ) from error  # fmt: skip


def read_sealed(path: Path) -> dict[str, Any]:
    """Raises: CheckpointError (DET-CKPT-NO-STATE missing, -DAMAGED torn or edited, -FOREIGN another schema)."""
    try:
        document = json.loads(path.read_text())
        if not isinstance(document, dict) or document.get("sha256") != seal(document):
            raise ValueError("the checksum does not match")
    except FileNotFoundError as error:
        raise problem(
            "DET-CKPT-NO-STATE", path, "no such file", "the receipt that --det saves with a checkpoint",
            "Without it RNG streams cannot be exact, and nothing says that the state is the saved one.",
            "save with --det, or pass --det-resume warn to load it without the claim.",
        ) from error  # fmt: skip
    except (OSError, ValueError) as error:
        raise problem(
            "DET-CKPT-DAMAGED", path, str(error), "the file as it was saved", "A damaged state cannot be restored.", DO
        ) from error
    if document.get("schema") != SCHEMA:
        raise problem(
            "DET-CKPT-FOREIGN", path, f"schema {document.get('schema')}", f"schema {SCHEMA}",
            "Another schema means other things.", "resume with the version of megatron-det that saved it.",
        )  # fmt: skip
    return document


def problem(code: str, where: Any, found: str, needed: str, why: str, do: str = DO) -> CheckpointError:
    return CheckpointError.of(code, str(where), found=found, needed=needed, why=why, do=do)


def read_rank(checkpoint: Path, rank: int, iteration: int | None = None) -> dict[str, Any]:
    """One rank's part. Raises: CheckpointError, also when it is another rank's or another iteration's."""
    path = rank_path(checkpoint, rank)
    document = read_sealed(path)
    found = document["rank"], document["iteration"]
    if found != (rank, found[1] if iteration is None else iteration):
        raise problem(
            "DET-CKPT-FOREIGN", path, f"rank {found[0]}, iteration {found[1]}", f"rank {rank}, iteration {iteration}",
            "Another rank's state draws other numbers.", "restore the checkpoint's own files.",
        )  # fmt: skip
    return document


def summary(document: dict[str, Any], replicas: dict[str, Any]) -> dict[str, Any]:
    """What the index keeps of one rank's part."""
    return {
        "rank": document["rank"],
        "sha256": seal(document),
        "entries": sum(len(piece["entries"]) for piece in document["pieces"]),
        "pieces": {piece["name"]: piece_seal(piece) for piece in document["pieces"]},
        "replicas": replicas,
    }


def make_index(document: dict[str, Any], summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """The index of a checkpoint from the summaries of all ranks (each the same, whoever makes it)."""
    kept = ("schema", "iteration", "world_size", "layout")
    return {**{key: document[key] for key in kept}, "ranks": sorted(summaries, key=lambda one: one["rank"])}


def against_index(index: dict[str, Any], document: dict[str, Any]) -> list[Mismatch]:
    """Pieces of this rank's part that are not those that the index saw: swapped between ranks, or edited."""
    rank = document["rank"]
    known = next((one for one in index["ranks"] if one["rank"] == rank), None)
    if known is None or index["iteration"] != document["iteration"]:
        found = f"iteration {document['iteration']}"
        return [Mismatch("receipt", rank, "index", f"iteration {index['iteration']}", found, "files of two saves")]
    if known["sha256"] == seal(document):
        return []
    mine = {piece["name"]: piece_seal(piece) for piece in document["pieces"]}
    owners = {seal: (one["rank"], name) for one in index["ranks"] for name, seal in one["pieces"].items()}
    wrong = []
    for name in {**known["pieces"], **mine}:
        saved, found = known["pieces"].get(name, "absent"), mine.get(name, "absent")
        if saved != found:
            whose = owners.get(found)
            cause = f"this is the piece of rank {whose[0]}" if whose and whose[0] != rank else "edited after the save"
            wrong.append(Mismatch(name, rank, name, saved, found, cause))
    return wrong or [Mismatch("receipt", rank, "head", known["sha256"][:16], seal(document)[:16], "edited")]


def unequal_replicas(index: dict[str, Any]) -> list[Mismatch]:
    """Ranks that must hold the same tensors, and do not."""
    first: dict[str, tuple[int, str]] = {}
    wrong = []
    for one in index["ranks"]:
        for kind, (place, digest) in one["replicas"].items():
            rank, expected = first.setdefault(f"{kind} {place}", (one["rank"], digest))
            if digest != expected:
                cause = f"replicas drifted apart: not equal to rank {rank}"
                wrong.append(Mismatch("model", one["rank"], f"{kind} parameters", expected, digest, cause))
    return wrong


def compare(
    saved: dict[str, Any], found: dict[str, Any], causes: dict[str, str] | None = None, pieces: set[str] | None = None
) -> list[Mismatch]:
    """Entries that differ between two parts, in the order of ``saved``. ``causes``: piece -> what it can mean."""
    a, b = entries(saved), entries(found)
    wrong = []
    for name in {**a, **b}:
        piece = (a.get(name) or b[name])[0]
        if pieces is not None and piece not in pieces:
            continue
        left, right = a.get(name, (piece, ABSENT))[1], b.get(name, (piece, ABSENT))[1]
        if left != right:
            cause = (causes or {}).get(piece, "")
            wrong.append(Mismatch(piece, found["rank"], name, scalars.show(left), scalars.show(right), cause))
    return wrong


def changed(saved: dict[str, Any], found: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(key, saved, found) of two nested dictionaries, in a fixed order."""
    for key in sorted({*saved, *found}):
        left, right = saved.get(key), found.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            yield from changed(left, right, f"{path}{key}/")
        elif canonical(left) != canonical(right):
            yield f"{path}{key}", left, right


def newest(directory: Path) -> int | None:
    """The newest iteration whose receipts are all there and whole; None where there is none."""
    for path in sorted(Path(directory).glob("iter_*"), reverse=True):
        try:
            read_all(path)
        except CheckpointError:
            continue
        return int(path.name.removeprefix("iter_"))
    return None


def read_all(checkpoint: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(index, all ranks' parts). Raises: CheckpointError for what is missing, torn or does not belong together."""
    index = read_sealed(index_path(checkpoint))
    parts = [read_rank(checkpoint, rank, index["iteration"]) for rank in range(index["world_size"])]
    for part in parts:
        for one in against_index(index, part):
            raise problem(
                "DET-CKPT-FOREIGN", rank_path(checkpoint, part["rank"]), f"piece {one.piece}: {one.found}", one.saved,
                f"The index of this checkpoint saw another one: {one.cause}.",
            )  # fmt: skip
    return index, parts


def locate(path: Path) -> Path:
    """The checkpoint's folder: itself, or the newest in a --save directory. Raises: CheckpointError."""
    path = Path(path)
    tracker = path / TRACKER
    if tracker.is_file():
        text = tracker.read_text().strip()
        if not text.isdigit():
            raise problem("DET-CKPT-TRACKER", tracker, repr(text), "an iteration", "It names the newest checkpoint.")
        return path / f"iter_{int(text):07d}"
    return path


HEADINGS = ("piece", "rank", "entry", "saved", "found", "likely cause")
WIDEST = 46


def table(mismatches: list[Mismatch], shown: int = 24) -> str:
    """One mismatch a line: piece, rank, entry, saved, found, likely cause."""
    rows = [(m.piece, str(m.rank), m.name, m.saved, m.found, m.cause) for m in mismatches[:shown]]
    cut = [[row[0], row[1], tail(row[2]), start(row[3]), start(row[4]), row[5]] for row in rows]
    lines = [list(HEADINGS), *cut]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    text.insert(1, "  ".join("-" * width for width in widths))
    if len(mismatches) > shown:
        text.append(f"and {len(mismatches) - shown} more")
    return "\n".join(text)


def start(text: str) -> str:
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"


def tail(text: str) -> str:
    return text if len(text) <= WIDEST else "…" + text[1 - WIDEST :]
