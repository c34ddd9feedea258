"""Work objects: what a collective returns. An operation runs at once, or in order on the group's own thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work
from torch.futures import Future


class DetWork(Work):
    """A started collective. ``get_future`` gives the tensors; ``wait`` raises what went wrong."""

    def __init__(self, future: Future[Any]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None:
            end = time.monotonic() + timeout.total_seconds()
            while not self._future.done():
                if time.monotonic() > end:
                    raise TimeoutError(f"a det collective did not finish within {timeout}")
                time.sleep(0.0005)
        self._future.wait()
        return True

    def get_future(self) -> Future[Any]:
        return self._future

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What went wrong, once it is over; None before."""
        if not self._future.done():
            return None
        try:
            self._future.value()
        except RuntimeError as error:
            return error
        return None

    def result(self) -> list[torch.Tensor]:
        return self._future.wait()

    def synchronize(self) -> None:
        self.wait()


def run_now(action: Callable[[], None], tensors: list[torch.Tensor]) -> DetWork:
    """Runs the whole plan in the calling thread; errors are raised here."""
    future: Future[Any] = Future()
    action()
    future.set_result(tensors)
    return DetWork(future)


class Lane:
    """Runs the operations of one group one after another, in the order in which they were issued, on one thread.

    Plans of several steps stay in step between ranks only when no two of them interleave.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], list[torch.Tensor], Future[Any]] | None]
        self._queue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Future[Any] | None = None

    def idle(self) -> bool:
        return self._last is None or self._last.done()

    def submit(self, action: Callable[[], None], tensors: list[torch.Tensor]) -> DetWork:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"det-{self._name}", daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        self._last = future
        self._queue.put((action, tensors, future))
        return DetWork(future)

    def stop(self) -> None:
        """Ends the thread after what was issued."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout=30)
            self._thread = None

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            action, tensors, future = item
            try:
                action()
            except Exception as error:  # noqa: BLE001  handed to whoever waits
                future.set_exception(error)
            else:
                future.set_result(tensors)
