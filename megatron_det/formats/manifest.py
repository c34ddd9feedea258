"""The manifest: what a rank's run stood on. Compared before any number is. Schema 1.

``sections`` maps section -> key -> JSON value. Everything in it is compared, except the section ``info`` (output
paths, host names: what cannot change bits). ``chaos`` (an injected fault) is never compared and always shown.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_det.errors import FormatError

SCHEMA = 1
UNCOMPARED = ("info",)


@dataclass(frozen=True)
class Difference:
    """One key on which two manifests disagree; ``None`` where a side lacks it."""

    section: str
    key: str
    a: Any
    b: Any


def manifest_path(directory: Path, rank: int) -> Path:
    return Path(directory) / f"rank-{rank:05d}.manifest.json"


def refusal_path(directory: Path, rank: int) -> Path:
    return Path(directory) / f"rank-{rank:05d}.refusal.json"


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def checksum(manifest: dict[str, Any]) -> str:
    body = {key: value for key, value in manifest.items() if key != "crc"}
    return f"{zlib.crc32(canonical(body).encode()):08x}"


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Writes a small JSON document: whole or not at all. Raises: FormatError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        name = path.with_name(f".new-{path.name}-{os.getpid()}")
        name.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
        os.replace(name, path)
    except OSError as error:
        raise FormatError.of(
            "DET-WRITE", str(path), found=str(error), needed="a directory that can be written",
            why="The record is part of the proof.", do="choose another directory.",
        ) from error  # fmt: skip


def write(directory: Path, rank: int, manifest: dict[str, Any]) -> None:
    document = {**manifest, "schema": SCHEMA}
    write_json(manifest_path(directory, rank), {**document, "crc": checksum(document)})


def read(directory: Path, rank: int) -> dict[str, Any]:
    """Raises: FormatError (DET-MANIFEST-MISSING, -DAMAGED, -SCHEMA)."""
    path = manifest_path(directory, rank)
    try:
        manifest = json.loads(path.read_text())
        if not isinstance(manifest, dict) or manifest.get("crc") != checksum(manifest):
            raise ValueError("the checksum does not match")
    except FileNotFoundError as error:
        raise _problem("DET-MANIFEST-MISSING", path, "no such file") from error
    except (OSError, ValueError) as error:
        raise _problem("DET-MANIFEST-DAMAGED", path, str(error)) from error
    if manifest.get("schema") != SCHEMA:
        raise _problem("DET-MANIFEST-SCHEMA", path, f"schema {manifest.get('schema')}, this reads {SCHEMA}")
    return manifest


def _problem(code: str, path: Path, found: str) -> FormatError:
    return FormatError.of(
        code, str(path), found=found, needed="the manifest that was written beside the ledger",
        why="Numbers are compared only after what they stood on.", do="copy the whole directory, or record again.",
    )  # fmt: skip


def compare(a: dict[str, Any], b: dict[str, Any]) -> list[Difference]:
    """Differences of two manifests, in a fixed order."""
    found = []
    for key in ("active", "level", "device", "waived"):
        if a.get(key) != b.get(key):
            found.append(Difference("run", key, a.get(key), b.get(key)))
    sections_a, sections_b = a.get("sections", {}), b.get("sections", {})
    for section in sorted({*sections_a, *sections_b} - set(UNCOMPARED)):
        one, other = sections_a.get(section, {}), sections_b.get(section, {})
        for key in sorted({*one, *other}):
            if canonical(one.get(key)) != canonical(other.get(key)):
                found.append(Difference(section, key, one.get(key), other.get(key)))
    return found
