"""The tracker file names one checkpoint at every moment: the old one, or the new one.

Replaces      ``MaybeMultiStorageClient.__getattr__`` of ``megatron.core.msc_utils``, for ``open`` of the tracker file
Why           megatron-core 0.19.2 opens ``latest_checkpointed_iteration.txt`` for writing and then writes: a process
              killed in between leaves it empty, and every earlier checkpoint is unnamed
Reaches       the tracker file on file systems that this machine sees
Leaves alone  every other file; remote storage through the multi-storage client
Drop when     upstream replaces the file instead of truncating it
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_det.formats.receipt import TRACKER
from megatron_det.patching.engine import Patch


class Whole(io.StringIO):
    """A text file that appears, with all that was written and on the disk, when it is closed without an error."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is not None:
            super().close()  # what was there stays
        else:
            self.close()

    def close(self) -> None:
        if self.closed:
            return
        text = self.getvalue()
        super().close()
        name = self.path.with_name(f".new-{self.path.name}-{os.getpid()}")
        try:
            with name.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path)
        finally:
            name.unlink(missing_ok=True)


def opener(ran: Callable[[], None]) -> Callable[..., Any]:
    def open_whole(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode == "w" and isinstance(file, (str, Path)) and Path(file).name == TRACKER:
            ran()
            return Whole(Path(file))
        return open(file, mode, *args, **kwargs)

    return open_whole


def _make(original: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
    def __getattr__(self: Any, name: str) -> Any:
        found = original(self, name)
        return opener(ran) if found is open else found

    return __getattr__


def patches() -> list[Patch]:
    target = "megatron.core.msc_utils:MaybeMultiStorageClient.__getattr__"
    return [Patch("checkpoint-tracker", target, _make, "a save that is killed must not unname the earlier checkpoint")]
