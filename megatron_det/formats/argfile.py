"""Argument files: ``@configs/gpt.args`` on a command line stands for the flags and values in that file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron_det.errors import FormatError


def expand_argument_files(tokens: Iterable[str]) -> list[str]:
    """Replaces each ``@FILE`` token by the whitespace-separated words of the file; ``#`` starts a comment.

    Raises: FormatError when a file cannot be read or itself names another argument file.
    """
    expanded: list[str] = []
    for token in tokens:
        if token.startswith("@") and len(token) > 1:
            expanded.extend(_words(Path(token[1:])))
        else:
            expanded.append(token)
    return expanded


def _words(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError.of(
            "DET-ARGFILE", f"argument file @{path}", found=str(error), needed="a readable text file",
            why="Its flags are part of the run.", do="correct the path after the @.",
        ) from error  # fmt: skip
    words = [word for line in text.splitlines() for word in line.split("#", 1)[0].split()]
    nested = [word for word in words if word.startswith("@")]
    if nested:
        raise FormatError.of(
            "DET-ARGFILE", f"argument file @{path}", found=f"{nested[0]} inside it", needed="flags and values only",
            why="Argument files do not nest.", do="put the flags of both into one file.",
        )  # fmt: skip
    return words
