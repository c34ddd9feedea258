"""Real gloo processes that serve many small jobs, so that a property test does not start processes per example."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_det.collectives import Settings, register

TIMEOUT = 90


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def serve(process: int, backend: str, placement: list[int], settings: list[dict], port: int, pipes: list[Any]) -> None:
    torch.set_num_threads(1)
    rank = placement[process]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if backend == "det":
        register(Settings(**settings[process]))
    dist.init_process_group(backend, rank=rank, world_size=len(placement))
    pipe = pipes[process]
    while (item := pipe.recv()) is not None:
        function, job = item
        try:
            pipe.send((function(job, rank, len(placement)), None))
        except Exception:  # noqa: BLE001  handed to the test
            pipe.send((None, traceback.format_exc()))
    dist.destroy_process_group()


class Pool:
    """``placement[p]`` is the logical rank of process p; ``settings[p]`` are its ``Settings`` (nodes may differ)."""

    def __init__(self, backend: str, placement: list[int], settings: list[dict] | None = None) -> None:
        context = mp.get_context("spawn")
        self.mine, theirs = zip(*(context.Pipe() for _ in placement), strict=True)
        arguments = (backend, placement, settings or [{}] * len(placement), free_port(), list(theirs))
        self.processes = [context.Process(target=serve, args=(p, *arguments)) for p in range(len(placement))]
        for process in self.processes:
            process.start()

    def run(self, function: Callable[[Any, int, int], Any], job: Any) -> list[Any]:
        """``function(job, rank, ranks)`` on all ranks; the answers, or an AssertionError."""
        for pipe in self.mine:
            pipe.send((function, job))
        answers = []
        for pipe in self.mine:
            assert pipe.poll(TIMEOUT), f"a worker hangs in {function.__name__} with {job}"
            answers.append(pipe.recv())
        for _, error in answers:
            assert error is None, error
        return [answer for answer, _ in answers]

    def close(self) -> None:
        for pipe in self.mine:
            try:
                pipe.send(None)
            except BrokenPipeError:
                continue
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()
