"""Makes the table of Megatron's reductions from what runs recorded with ``--det-collectives DIR``.

python scripts/record_reductions.py out/coll-*            # prints what is new or gone
python scripts/record_reductions.py --write out/coll-*    # writes megatron_det/contract/reductions.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "megatron_det" / "contract" / "reductions.json"
Row = tuple[str, ...]
NAMES = ("site", "group", "operation", "reduction", "dtype", "how")


def recorded(folders: Iterable[Path]) -> set[Row]:
    """The reductions of all ranks of some runs; moves of bytes are left out."""
    files = [file for folder in folders for file in sorted(folder.glob("rank-*.json"))]
    rows = {tuple(row[name] for name in NAMES) for file in files for row in json.loads(file.read_text())}
    return {row for row in rows if row[3] != "-"}


def known() -> set[Row]:
    return {tuple(row[name] for name in NAMES) for row in json.loads(TABLE.read_text())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--write", action="store_true", help="replace the table by what was recorded")
    wish = parser.parse_args()
    rows = recorded(wish.folders)
    if wish.write:
        TABLE.write_text(json.dumps([dict(zip(NAMES, row, strict=True)) for row in sorted(rows)], indent=1) + "\n")
    before = known()
    for sign, some in (("+", rows - before), ("-", before - rows)):
        for row in sorted(some):
            print(sign, *row)
    return 0 if rows == before else 1


if __name__ == "__main__":
    sys.exit(main())
