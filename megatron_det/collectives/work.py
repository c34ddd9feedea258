"""Work objects: what a collective returns, and the order in which the operations of one group run.

CPU    at once in the calling thread, or, when asynchronous, one after another on the group's own thread
CUDA   on the current stream, or, when asynchronous, on the group's own stream: the host never waits
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work
from torch.futures import Future

Action = Callable[[], None]
Tensors = list[torch.Tensor]


class DetWork(Work):
    """A started collective on CPU tensors. ``wait`` raises what went wrong."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self._tensors = tensors
        self.over = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._future: Future[Any] | None = None
        self._trigger: Future[None] | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Called once by whoever ran it."""
        with self._lock:
            self._error = error
            self.over.set()
            trigger = self._trigger
        if trigger is not None:
            trigger.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout is not None and timeout.total_seconds() > 0 else None
        if not self.over.wait(seconds):
            raise TimeoutError(f"a det collective did not finish within {timeout}")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Future[Any]:
        """Gives the tensors. An error raised inside ``then`` is one that C++ sees too; ``set_exception`` is not."""
        with self._lock:
            if self._future is None:
                self._trigger = Future()
                self._future = self._trigger.then(self._value)
                if self.over.is_set():
                    self._trigger.set_result(None)
            return self._future

    def _value(self, _: Any) -> Tensors:
        if self._error is not None:
            raise self._error
        return self._tensors

    def is_completed(self) -> bool:
        return self.over.is_set()

    def is_success(self) -> bool:
        return self.over.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """What went wrong, once it is over; None before."""
        return self._error

    def result(self) -> Tensors:
        self.wait()
        return self._tensors

    def synchronize(self) -> None:
        self.wait()


class StreamWork(Work):
    """A collective that was put on a CUDA stream. ``wait`` makes the current stream wait, not the host."""

    def __init__(self, tensors: Tensors, stream: Any) -> None:
        super().__init__()
        self._tensors, self._stream = tensors, stream
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.cuda.current_stream(self._stream.device).wait_event(self.event)
        return True

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future(devices=[self._stream.device])
        with torch.cuda.stream(self._stream):
            future.set_result(self._tensors)
        return future

    def is_completed(self) -> bool:
        return bool(self.event.query())

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> Tensors:
        return self._tensors

    def synchronize(self) -> None:
        self.wait()


class Several(Work):
    """Some works as one, for a coalescing manager."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        return True

    def get_future(self) -> Future[Any]:
        futures = torch.futures.collect_all([work.get_future() for work in self._works])
        return futures.then(lambda all_of: [t for f in all_of.value() for t in (f.value() or [])])

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((e for e in (work.exception() for work in self._works) if e is not None), None)

    def synchronize(self) -> None:
        self.wait()


def _outside_of_modes(action: Action, tensors: Tensors) -> Action:
    """Like a vendor's call: invisible to autograd and to function modes; inference tensors may be written to."""
    inference = torch.is_inference_mode_enabled() or any(tensor.is_inference() for tensor in tensors)

    def run() -> None:
        with torch.inference_mode(inference), torch.no_grad(), torch._C.DisableTorchFunction():
            action()

    return run


class Lane:
    """Runs the operations of one group in the order in which they were issued.

    Plans of several steps stay in step between ranks only when no two of them interleave.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Action, DetWork] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._busy: threading.Event | None = None  # set once the newest submitted operation is over
        self._turn = threading.RLock()  # held while an operation runs, its callbacks included
        self._streams: dict[torch.device, Any] = {}
        self._events: dict[torch.device, Any] = {}

    def run(self, action: Action, tensors: Tensors, asynchronous: bool) -> Any:
        """Starts one operation. An error is raised here when it runs at once, else by the work's ``wait``."""
        if tensors and tensors[0].is_cuda:
            return self._on_stream(_outside_of_modes(action, tensors), tensors, asynchronous)
        action = _outside_of_modes(action, tensors)
        work = DetWork(tensors)
        inside = threading.current_thread() is self._thread  # a callback: waiting for the queue would be for ever
        if not inside and (asynchronous or not (self._busy is None or self._busy.is_set())):
            self._submit(action, work)
            return work
        with self._turn:
            self._carry_out(action, work)
        if not asynchronous:
            work.wait()
        return work

    @staticmethod
    def _carry_out(action: Action, work: DetWork) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001  handed to whoever waits
            work.finish(error)
        else:
            work.finish()

    def _on_stream(self, action: Action, tensors: Tensors, asynchronous: bool) -> StreamWork:
        device = tensors[0].device
        current = torch.cuda.current_stream(device)
        own = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream = own if asynchronous else current
        if asynchronous:
            stream.wait_stream(current)
        if device in self._events:  # one operation after another, whatever streams they came on: scratch is shared
            stream.wait_event(self._events[device])
        with torch.cuda.stream(stream):
            action()
        if asynchronous:
            for tensor in tensors:
                tensor.record_stream(stream)
        work = StreamWork(tensors, stream)
        self._events[device] = work.event
        return work

    def _submit(self, action: Action, work: DetWork) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"det-{self._name}", daemon=True)
            self._thread.start()
        self._busy = work.over
        self._queue.put((action, work))

    def stop(self) -> None:
        """Ends the thread after what was issued."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._queue.put(None)
            self._thread.join(timeout=30)
            self._thread = None

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            action, work = item
            with self._turn:
                self._carry_out(action, work)
            del item, action, work  # the tensors belong to the caller again
