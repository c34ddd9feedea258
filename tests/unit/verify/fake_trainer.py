"""A trainer of a few lines that understands the flags which ``verify`` adds. Its "training" is arithmetic on integers.

Faults, each a flag: --fail-in ARM, --silent (no ledger), --short, --no-checkpoint, --same-cold, --hang, --refuse.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from megatron_det.formats import manifest
from megatron_det.formats.ledger import LedgerWriter
from megatron_det.formats.scalars import of_python

parser = argparse.ArgumentParser(allow_abbrev=False)
for flag in ("--det", "--no-load-rng", "--no-load-optim", "--silent", "--short", "--no-checkpoint", "--same-cold",
             "--hang", "--refuse"):  # fmt: skip
    parser.add_argument(flag, action="store_true")
for flag in ("--det-ledger", "--save", "--load", "--det-chaos", "--fail-in", "--det-device"):
    parser.add_argument(flag)
for flag in ("--save-interval", "--exit-interval", "--train-iters"):
    parser.add_argument(flag, type=int)
parser.add_argument("--ranks", type=int, default=3)
args = parser.parse_args()

ledger = Path(args.det_ledger)
arm = ledger.parent.name
if args.hang:
    time.sleep(600)
if args.fail_in == arm:
    sys.exit("ValueError: it broke")
if args.refuse:
    finding = {"code": "DET-X", "what": "thing", "found": "a", "needed": "b", "why": "c.", "do": "d."}
    manifest.write_json(manifest.refusal_path(ledger, 0), {"exit_code": 2, "rank": 0, "findings": [finding]})
    sys.exit(2)
state, start = 0, 0
if args.load:
    start = int((Path(args.load) / "latest_checkpointed_iteration.txt").read_text())
    state = json.loads((Path(args.load) / f"iter_{start:07d}" / "state.json").read_text())
    if args.no_load_optim and not args.same_cold:
        state += 1
fault = dict(item.split("=") for item in (args.det_chaos or "").partition(":")[2].split(",") if item)
writers = [] if args.silent else [LedgerWriter(ledger, rank, args.ranks, "fake") for rank in range(args.ranks)]
for rank in range(len(writers)):
    sections = {"env": {"A": "1"}}
    document = {"active": True, "level": "run", "device": "cpu-standin", "waived": [], "chaos": args.det_chaos}
    manifest.write(ledger, rank, {**document, "sections": sections})
for iteration in range(start + 1, args.exit_interval + 1 - args.short):
    state = (state * 31 + iteration) % 1009
    for rank, writer in enumerate(writers):
        hit = args.det_chaos and iteration >= int(fault["iteration"]) and rank == int(fault["rank"])
        items = [("rng/python", of_python(7)), ("num/loss/lm loss", of_python(float(state + bool(hit))))]
        writer.step(iteration, 8 * iteration, items)
    if args.save and iteration % args.save_interval == 0 and not args.no_checkpoint:
        folder = Path(args.save) / f"iter_{iteration:07d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "state.json").write_text(json.dumps(state))
for writer in writers:
    writer.end(args.exit_interval, "done")
