"""Live progress of the arms: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Arm(Protocol):
    name: str
    result: str
    seconds: float


class ArmProgress:
    """Shows how far each arm is. ``update`` is cheap; it may be called several times a second."""

    def __init__(self, console: Console, iterations: int) -> None:
        self.console = console
        self.iterations = iterations
        self.tasks: dict[str, TaskID] = {}
        self.live: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self.live = Progress(*columns, console=console, transient=True)

    def __enter__(self) -> ArmProgress:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.live is not None:
            self.live.stop()

    def update(self, arm: Arm, iteration: int, seconds: float) -> None:
        if arm.name not in self.tasks:
            self.tasks[arm.name] = TaskID(len(self.tasks))
            if self.live is None:
                self.console.print(f"arm {arm.name}: started", markup=False)
            else:
                self.tasks[arm.name] = self.live.add_task(f"arm {arm.name}", total=self.iterations)
        if self.live is not None:
            self.live.update(self.tasks[arm.name], completed=iteration)

    def finished(self, arm: Arm) -> None:
        if self.live is not None and arm.name in self.tasks:
            self.live.remove_task(self.tasks[arm.name])
        self.console.print(f"arm {arm.name}: {arm.result} ({arm.seconds:.1f} s)", markup=False, highlight=False)
