"""Our errors leave the process as one line, a record beside the ledger, and an exit code.

Replaces      ``megatron.training.training.pretrain`` (and the script's own copy of the name)
Why           it encloses set-up, training and evaluation; the script has nothing of ours in it
Reaches       refusals and broken guarantees; the ledger's closing line
Leaves alone  every other error and exit
Drop when     never: it is the edge of the plug-in
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_det.errors import DetError, FormatError
from megatron_det.formats import manifest
from megatron_det.patching.engine import Patch
from megatron_det.patching.inventory.run import Run


def leave(error: DetError, rank: int, ledger: str | None) -> None:
    """Says the error in one line, records it, and ends the process with its code."""
    if error.__cause__ is not None:
        traceback.print_exception(error.__cause__)
    print(f"megatron-det: rank {rank}: {error}", file=sys.stderr, flush=True)
    if ledger is not None:
        document = {"exit_code": error.exit_code, "rank": rank, "findings": [error.finding.as_dict()]}
        try:
            manifest.write_json(manifest.refusal_path(Path(ledger), rank), document)
        except FormatError as second:  # a full disk: the error itself must still leave as one line and its code
            print(f"megatron-det: rank {rank}: {second}", file=sys.stderr, flush=True)
    sys.exit(error.exit_code)


def close(run: Run, how: str) -> None:
    """The ledger's closing line. After an error, a line that cannot be written is said and hides nothing."""
    if run.recorder is None:
        return
    try:
        run.recorder.end(how)
    except FormatError as error:
        if how != "error":
            leave(error, run.rank, run.options.ledger)
        print(f"megatron-det: rank {run.rank}: {error}", file=sys.stderr, flush=True)


def _make(run: Run) -> Callable[..., Any]:
    def make(original: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
        def pretrain(*args: Any, **kwargs: Any) -> Any:
            ran()
            how = "error"
            try:
                result = original(*args, **kwargs)
                how = "done"
                return result
            except DetError as error:
                leave(error, run.rank, run.options.ledger)
            except SystemExit as stop:
                how = "exit" if not stop.code else "error"
                raise
            finally:
                close(run, how)

        return pretrain

    return make


def patches(run: Run) -> list[Patch]:
    return [Patch("pretrain", "megatron.training.training:pretrain", _make(run), "exit codes and the closing line")]
