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

from megatron_det.errors import DetError
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
        manifest.write_json(manifest.refusal_path(Path(ledger), rank), document)
    sys.exit(error.exit_code)


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
                if run.recorder is not None:
                    run.recorder.end(how)

        return pretrain

    return make


def patches(run: Run) -> list[Patch]:
    return [Patch("pretrain", "megatron.training.training:pretrain", _make(run), "exit codes and the closing line")]
