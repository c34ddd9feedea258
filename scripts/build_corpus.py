"""Makes a Megatron indexed dataset (PREFIX.bin, PREFIX.idx) from text files. Bytes are the tokens.

By default the text is the Python sources inside the installed torch wheel: several MB of real text that is on every
machine. Token ids are 0..255 for bytes and 256 ends a document (NullTokenizer with --vocab-size 257).
The same input gives the same files: their SHA-256 is printed.

Examples:
    scripts/build_corpus.py --out out/corpus/torch-sources
    scripts/build_corpus.py --out out/corpus/mine --max-bytes 0 notes/*.txt
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import files
from pathlib import Path

END_OF_DOCUMENT = 256


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="build_corpus.py"
    )
    parser.add_argument("texts", nargs="*", type=Path, help="text files (default: torch's Python sources)")
    parser.add_argument("--out", type=Path, required=True, metavar="PREFIX")
    parser.add_argument("--max-bytes", type=int, default=4_000_000, help="stop after so many bytes; 0: no limit")
    parser.add_argument("--overwrite", action="store_true", help="replace files that hold something else")
    return parser.parse_args(arguments)


def torch_sources() -> list[Path]:
    """The wheel's own Python files in a fixed order, shortest path first, so that a cap keeps a broad mix."""
    found = [f for f in files("torch") or [] if f.suffix == ".py" and f.parts[0] == "torch"]
    return [Path(str(f.locate())) for f in sorted(found, key=lambda f: (len(f.parts), str(f)))]


def documents(paths: list[Path], max_bytes: int) -> Iterator[bytes]:
    total = 0
    for path in paths:
        text = path.read_bytes()
        if max_bytes:
            text = text[: max_bytes - total]
        if text:
            yield text
        total += len(text)
        if max_bytes and total >= max_bytes:
            return


def write(prefix: Path, texts: Iterator[bytes]) -> tuple[int, int]:
    """Writes PREFIX.bin and PREFIX.idx with Megatron's own builder. Returns (documents, tokens)."""
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    count = tokens = 0
    for text in texts:
        row = numpy.append(numpy.frombuffer(text, dtype=numpy.uint8).astype(numpy.int64), END_OF_DOCUMENT)
        builder.add_document(torch.from_numpy(row), [len(row)])
        count, tokens = count + 1, tokens + len(row)
    builder.finalize(f"{prefix}.idx")
    return count, tokens


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    missing = [str(p) for p in options.texts if not p.is_file()]
    if missing:
        print(f"build_corpus: no such file: {', '.join(missing)}", file=sys.stderr)
        return 2
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out.parent) as directory:
        fresh = Path(directory) / "corpus"
        count, tokens = write(fresh, documents(options.texts or torch_sources(), options.max_bytes))
        print(f"corpus: {count} documents, {tokens} tokens")
        for suffix in (".bin", ".idx"):
            new, place = Path(f"{fresh}{suffix}"), Path(f"{options.out}{suffix}")
            same = place.exists() and digest(place) == digest(new)
            if place.exists() and not same and not options.overwrite:
                print(f"build_corpus: {place} holds something else; use --overwrite", file=sys.stderr)
                return 2
            print(f"{place} sha256 {digest(new)}{' (unchanged)' if same else ''}")
            if not same:
                os.replace(new, place)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
