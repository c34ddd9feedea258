"""The one place where an iteration begins and ends: checks, restores, injected faults, and the ledger's line.

Replaces      ``megatron.training.training.train_step``
Why           it is called through the module's global, once per iteration, after everything that draws random
              numbers before a step (iterators, warm-ups, evaluation) has drawn
Reaches       every training iteration; ``evaluate`` for the full-precision validation metrics
Leaves alone  arguments, result, RNG streams: recording reads, it never draws
Drop when     Megatron has callbacks at these two points
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.training import get_args

from megatron_det.formats import scalars
from megatron_det.kernels.fingerprint import value
from megatron_det.patching.engine import Patch
from megatron_det.patching.inventory.data import DataTap
from megatron_det.patching.inventory.run import Run
from megatron_det.state import closure

Item = tuple[str, dict[str, Any]]


class Step:
    """Wraps ``train_step`` for one run."""

    def __init__(self, run: Run, tap: DataTap) -> None:
        self.run = run
        self.tap = tap
        self.first = True

    def make(self, original: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
        def train_step(*args: Any, **kwargs: Any) -> Any:
            ran()
            _, data_iterator, model, optimizer, scheduler = args[:5]
            number = int(kwargs["iteration"]) + 1
            self._hooks(number, model, optimizer, scheduler)
            recorder = self.run.recorder
            if recorder is None:
                return original(*args, **kwargs)
            before = [*closure.rng_items(), *self._state("state", number, model, optimizer, scheduler)]
            self.tap.start(data_iterator)
            result = original(*args, **kwargs)
            data = self.tap.stop()
            if result[3]:  # should_exit: Megatron stops before the update; the iteration does not count
                return result
            recorder.extend([*data, *before, *_numbers(result)])
            recorder.extend(self._state("after", number, model, optimizer, scheduler))
            recorder.commit(number, _consumed())
            return result

        return train_step

    def _hooks(self, number: int, model: Any, optimizer: Any, scheduler: Any) -> None:
        if self.first:
            self.first = False
            for hook in self.run.before_first_forward:
                hook(number, model, optimizer, scheduler)
        for hook in self.run.before_step:
            hook(number, model, optimizer, scheduler)

    def _state(self, phase: str, number: int, model: Any, optimizer: Any, scheduler: Any) -> Iterator[Item]:
        yield from closure.option_items(phase, optimizer, scheduler)
        interval = self.run.options.digest_interval
        if interval and number % interval == 0:
            gathered = not getattr(get_args(), "overlap_param_gather", False)
            yield from closure.tensor_items(phase, model, optimizer, gathered)


def _consumed() -> int:
    """Samples consumed when this iteration is done, as Megatron counts them after ``train_step``."""
    args = get_args()
    batch = get_num_microbatches() * args.micro_batch_size * args.data_parallel_size
    return args.consumed_train_samples + batch


def _numbers(result: Any) -> Iterator[Item]:
    losses, skipped, _, _, _, grad_norm, zeros, logit = result
    for name, loss in losses.items():
        yield f"num/loss/{name}", value(loss)
    for name, entry in sorted(get_moe_metrics_tracker().metrics.items()):
        for layer, metric in enumerate(entry.values.detach().cpu()):
            yield f"num/metric/{name}/layer{layer + 1}", value(metric)
    yield "num/grad_norm", value(grad_norm)
    yield "num/num_zeros", value(zeros)
    yield "num/max_attention_logit", value(logit)
    yield "num/skipped", scalars.of_python(bool(skipped))


def _evaluate(run: Run) -> Callable[..., Any]:
    def make(original: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            ran()
            result = original(*args, **kwargs)
            if run.recorder is not None and result[0]:
                items = [(f"num/validation/{name}", value(loss)) for name, loss in result[0].items()]
                run.recorder.evaluation(run.recorder.last_iteration, items)
            return result

        return evaluate

    return make


def patches(run: Run, tap: DataTap) -> list[Patch]:
    module = "megatron.training.training"
    return [
        Patch("train-step", f"{module}:train_step", Step(run, tap).make, "begin and end of an iteration"),
        Patch("evaluate", f"{module}:evaluate", _evaluate(run), "validation metrics in full precision"),
    ]
