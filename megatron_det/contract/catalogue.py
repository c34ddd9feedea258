"""The catalogue of operations: which level each one keeps, why, and what proves it. Pure data and its loader."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources

from megatron_det.contract.levels import LEVELS, strength
from megatron_det.errors import FormatError

SCHEMA = 1
KEYS = {"id", "what", "level", "why", "refused", "test", "aten"}


@dataclass(frozen=True)
class Operation:
    """One entry. ``level`` is empty where the operation is ``refused``. ``test``: file::function."""

    id: str
    what: str
    test: str
    level: str = ""
    why: str = ""
    refused: str = ""
    aten: tuple[str, ...] = ()


def read(text: str) -> dict[str, Operation]:
    """Raises: FormatError for another schema, unknown or missing words, and names that occur twice."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _broken(str(error)) from error
    if data.get("schema") != SCHEMA:
        raise _broken(f"schema {data.get('schema')}")
    found: dict[str, Operation] = {}
    owners: dict[str, str] = {}
    for entry in data.get("operation", []):
        operation = _operation(entry)
        if operation.id in found:
            raise _broken(f"{operation.id} twice")
        for name in operation.aten:
            if owners.setdefault(name, operation.id) != operation.id:
                raise _broken(f"aten {name} in {owners[name]} and in {operation.id}")
        found[operation.id] = operation
    return found


def _operation(entry: dict[str, object]) -> Operation:
    name = entry.get("id", "an entry without id")
    if extra := set(entry) - KEYS:
        raise _broken(f"{name}: unknown {', '.join(sorted(extra))}")
    if missing := {"id", "what", "test"} - set(entry):
        raise _broken(f"{name}: no {', '.join(sorted(missing))}")
    served, refused = {"level", "why"} <= set(entry), "refused" in entry
    if served == refused or (served and entry["level"] not in LEVELS):
        raise _broken(f"{name}: needs a known level and why, or refused")
    words = {key: str(value) for key, value in entry.items() if key != "aten"}
    aten = entry.get("aten", [])
    return Operation(**words, aten=tuple(aten) if isinstance(aten, list) else ())


def _broken(found: str) -> FormatError:
    return FormatError.of(
        "DET-CATALOGUE",
        "contract/catalogue.toml",
        found=found,
        needed=f"schema {SCHEMA}: one entry per operation, each torch operation in one entry",
        why="A level that cannot be read is a level that nobody vouches for.",
        do="correct the file, or install the package again.",
    )


@functools.cache
def operations() -> dict[str, Operation]:
    """The packaged catalogue, by id."""
    return read((resources.files("megatron_det.contract") / "catalogue.toml").read_text(encoding="utf-8"))


def explain(id: str) -> str:
    """What the catalogue says of one operation, by its id or by the name of a torch operation.

    Raises: FormatError with the known ids for a name that it does not have.
    """
    known = operations()
    entry = known.get(id) or next((op for op in known.values() if id.removeprefix("aten.") in op.aten), None)
    if entry is None:
        raise FormatError.of(
            "DET-CATALOGUE-ID",
            f"operation {id}",
            found="no entry of this name",
            needed="one of " + ", ".join(sorted(known)),
            why="An operation that nobody has looked at has no level.",
            do="choose a known name, or report the operation.",
        )
    verdict = f"refused: {entry.refused}" if entry.refused else f"level {entry.level}: {entry.why}"
    lines = [f"{entry.id}: {entry.what}", verdict, f"shown by tests/{entry.test}"]
    if entry.aten:
        lines.append("torch: " + ", ".join(entry.aten))
    return "\n".join(lines)


def unknown(aten: Iterable[str]) -> list[str]:
    """The names among those seen by a recording (``aten.`` left out) that no entry answers for."""
    triaged = {name for operation in operations().values() for name in operation.aten}
    return sorted(set(aten) - triaged)


def weakest(ids: Iterable[str]) -> Operation:
    """The entry with the lowest level; one that is refused is below all. Raises: KeyError for an unknown id."""
    return min((operations()[id] for id in ids), key=lambda op: strength(op.level) if op.level else -1)
