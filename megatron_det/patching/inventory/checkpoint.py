"""Per-rank state beside every checkpoint; what was loaded is checked, and RNG is restored last.

Replaces      ``save_checkpoint``, ``maybe_save_dataloader_state``, ``load_checkpoint`` of
              ``megatron.training.checkpointing`` and ``megatron.core.dist_checkpointing.save``
Why           ``maybe_save_dataloader_state`` (format ``torch``) and the return of ``dist_checkpointing.save``
              (``torch_dist``, sync and async) are reached by all ranks before the tracker file names the checkpoint
Upstream      the ``rng_state`` object has the key (pp, tp): expert-parallel ranks get the stream of their peer
              (0.19.2 and main of 2026-08); the CPU stream moves when iterators are built after the load
Reaches       ``torch_dist`` and ``torch`` formats
Leaves alone  Megatron's own files: stock Megatron loads the checkpoint as before
Drop when     upstream saves RNG per global rank and restores it last
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.training import get_args
from megatron.training.checkpointing import get_checkpoint_name

from megatron_det.errors import CheckpointError, DetError
from megatron_det.patching.engine import Patch
from megatron_det.patching.inventory.run import Run
from megatron_det.state import rng, sidecar

MODULE = "megatron.training.checkpointing"
Make = Callable[[Any, Callable[[], None]], Any]


def layout(args: Any) -> dict[str, Any]:
    """What must be equal for the bits to be: the split, and what the order of the data is made from."""
    return {
        "world_size": args.world_size,
        "tensor": args.tensor_model_parallel_size,
        "pipeline": args.pipeline_model_parallel_size,
        "virtual_pipeline": args.virtual_pipeline_model_parallel_size,
        "context": args.context_parallel_size,
        "expert": args.expert_model_parallel_size,
        "expert_tensor": args.expert_tensor_parallel_size,
        "global_batch_size": args.global_batch_size,
        "micro_batch_size": args.micro_batch_size,
        "train_iters": args.train_iters,
        "seed": args.seed,
    }


class Checkpoints:
    """Saving and loading of one run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.pending: dict[str, Any] | None = None
        self.loaded: dict[str, Any] | None = None
        self.args: Any = None
        run.before_first_forward.append(self.check_and_restore)

    def save(self, original: Any, ran: Callable[[], None]) -> Any:
        def save_checkpoint(
            iteration: int, model: Any, optimizer: Any, opt_param_scheduler: Any, *args: Any, **kwargs: Any
        ) -> Any:
            ran()
            layout_now = layout(get_args())
            self.pending = sidecar.capture(iteration, self.run.rank, layout_now, model, optimizer, opt_param_scheduler)
            try:
                return original(iteration, model, optimizer, opt_param_scheduler, *args, **kwargs)
            finally:
                self.pending = None

        return save_checkpoint

    def write_legacy(self, original: Any, ran: Callable[[], None]) -> Any:
        def maybe_save_dataloader_state(iterator: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
            result = original(iterator, iteration, *args, **kwargs)
            args_now = get_args()
            if self.pending is not None and args_now.ckpt_format == "torch":
                ran()
                folder = get_checkpoint_name(args_now.save, iteration, return_base_dir=True)
                sidecar.write(Path(folder), self.pending)
            return result

        return maybe_save_dataloader_state

    def write_sharded(self, original: Any, ran: Callable[[], None]) -> Any:
        def save(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
            if self.pending is not None:
                ran()
                sidecar.write(Path(checkpoint_dir), self.pending)
                self.pending = None
            return result

        return save

    def load(self, original: Any, ran: Callable[[], None]) -> Any:
        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            ran()
            self.args = get_args()
            directory = getattr(self.args, kwargs.get("load_arg", "load"))
            result = readable(original, directory, args, kwargs)
            iteration = int(result[0])
            if iteration and directory and not self.args.finetune:
                self._read(Path(get_checkpoint_name(directory, iteration, return_base_dir=True)), iteration)
            return result

        return load_checkpoint

    def _read(self, folder: Path, iteration: int) -> None:
        weights_only = self.args.no_load_rng and self.args.no_load_optim
        if weights_only and not sidecar.folder(folder).is_dir():
            return  # a checkpoint of stock Megatron, taken as a start and not as a resume
        try:
            self.loaded = sidecar.read(folder, self.run.rank, iteration, layout(self.args))
        except CheckpointError as error:
            if self.run.options.resume == "strict" and self.run.options.level != "observe":
                raise
            print(f"megatron-det: resumed WITHOUT the claim of exactness: {error}", file=sys.stderr, flush=True)

    def check_and_restore(self, iteration: int, model: Any, optimizer: Any, scheduler: Any) -> None:
        """Just before the first forward: loaded state against what was saved, then RNG, last of all."""
        if self.loaded is None:
            return
        sidecar.check(self.loaded, model, optimizer, scheduler, not self.args.no_load_optim)
        if not self.args.no_load_rng:
            rng.restore(self.loaded["rng"])


def readable(original: Any, directory: Any, args: Any, kwargs: Any) -> Any:
    """``load_checkpoint`` with whatever goes wrong inside as one error that names the checkpoint."""
    try:
        return original(*args, **kwargs)
    except (DetError, KeyboardInterrupt):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception; Megatron exits with 0 here
        found = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no text'}"
        raise CheckpointError.of(
            "DET-CKPT-READ", f"checkpoint in {directory}", found=found, needed="a checkpoint that can be read whole",
            why="Training on with half a state would not be a resume.",
            do="resume from another checkpoint (--ckpt-step N), or see the traceback above.",
        ) from error  # fmt: skip


def patches(run: Run) -> list[Patch]:
    mine = Checkpoints(run)
    why = "exact resume: per-rank RNG and a check of what was loaded"
    return [
        Patch("checkpoint-save", f"{MODULE}:save_checkpoint", mine.save, why),
        Patch("checkpoint-write-torch", f"{MODULE}:maybe_save_dataloader_state", mine.write_legacy, why),
        Patch("checkpoint-write-torch-dist", "megatron.core.dist_checkpointing:save", mine.write_sharded, why),
        Patch("checkpoint-load", f"{MODULE}:load_checkpoint", mine.load, why, stack=True),
    ]
