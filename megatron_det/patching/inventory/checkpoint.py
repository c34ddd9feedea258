"""The receipt of every checkpoint: written before it is named, checked when loaded, and again before the first forward.

Replaces      ``save_checkpoint``, ``maybe_save_dataloader_state``, ``load_checkpoint`` of
              ``megatron.training.checkpointing``, ``megatron.core.dist_checkpointing.save``, and
              ``build_train_valid_test_data_loaders`` (to know the training loader)
Why           ``maybe_save_dataloader_state`` (formats other than ``torch_dist``) and the return of
              ``dist_checkpointing.save`` (sync and async) are reached by all ranks before the tracker file names it
Upstream      the ``rng_state`` object has the key (pp, tp): expert-parallel ranks get the stream of their peer
              (0.19.2 and main of 2026-08); the CPU stream moves when iterators are built after the load
Reaches       all formats of ``--ckpt-format``; tried with ``torch_dist`` and ``torch``
Leaves alone  Megatron's own files: stock Megatron loads the checkpoint as before
Drop when     upstream saves RNG per global rank, restores it last, and checks what it loaded
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core import mpu
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
from megatron.training import get_args
from megatron.training.checkpointing import get_checkpoint_name

from megatron_det.errors import CheckpointError, DetError, Finding, GuaranteeBroken
from megatron_det.formats import receipt as written
from megatron_det.formats.receipt import Mismatch
from megatron_det.patching.engine import Patch
from megatron_det.patching.inventory import resume, tracker
from megatron_det.patching.inventory.run import Run
from megatron_det.state import receipt
from megatron_det.state.piece import Here

MODULE = "megatron.training.checkpointing"
OPTIMIZER = {"optimizer", "groups", "loss_scaler", "schedule"}
RANDOM = {"rng", "generators"}


class Checkpoints:
    """Saving and loading of one run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.pending: dict[str, Any] | None = None
        self.index: dict[str, Any] = {}
        self.folder: Path | None = None
        self.loaded: dict[str, Any] | None = None
        self.data: Any = None
        run.before_first_forward.append(self.check_and_restore)

    # --- saving

    def save(self, original: Any, ran: Callable[[], None]) -> Any:
        def save_checkpoint(
            iteration: int, model: Any, optimizer: Any, opt_param_scheduler: Any, *args: Any, **kwargs: Any
        ) -> Any:
            ran()
            here = self._here(model, optimizer, opt_param_scheduler)
            self.pending, self.folder = self._take(iteration, here), None
            document = self.pending
            try:
                result = savable(original, get_args().save, (iteration, model, optimizer, opt_param_scheduler, *args),
                                 kwargs)  # fmt: skip
            finally:
                self.pending = None
            self._check_saved(here, document)
            return result

        return save_checkpoint

    def _here(self, model: Any, optimizer: Any, scheduler: Any) -> Here:
        chunks = model if isinstance(model, list) else [model]
        return Here(chunks, optimizer, scheduler, get_args(), self.data)

    def _take(self, iteration: int, here: Here) -> dict[str, Any]:
        """This rank's part, and with the other ranks' summaries the index. Raises on all ranks or on none."""
        machine = get_rerun_state_machine()
        between = machine.state == RerunState.NOT_RUNNING_YET
        head = {
            "iteration": iteration, "rank": self.run.rank, "world_size": self.run.world_size,
            "layout": resume.layout(here.args), "environment": resume.environment(self.run.manifest),
            "boundary": receipt.CLEAN if between else f"in the middle of a step ({machine.state.name})",
        }  # fmt: skip
        document: dict[str, Any] = {}

        def mine() -> dict[str, Any]:
            document.update(receipt.take(here, head))
            return written.summary(document, receipt.replicas(here, document, places()))

        summaries = resume.together(mine)
        self.index = written.make_index(document, summaries)
        drifted = written.unequal_replicas(self.index)
        if drifted and between:
            self._broken(drifted, "replicas at the save", len(written.entries(document)))
        return document

    def write_early(self, original: Any, ran: Callable[[], None]) -> Any:
        def maybe_save_dataloader_state(iterator: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
            result = original(iterator, iteration, *args, **kwargs)
            now = get_args()
            if self.pending is not None and now.ckpt_format != "torch_dist":
                ran()
                self._write(Path(get_checkpoint_name(now.save, iteration, return_base_dir=True)))
            return result

        return maybe_save_dataloader_state

    def write_sharded(self, original: Any, ran: Callable[[], None]) -> Any:
        def save(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
            if self.pending is not None:
                ran()
                self._write(Path(checkpoint_dir))
            return result

        return save

    def _write(self, folder: Path) -> None:
        assert self.pending is not None
        written.write_sealed(written.rank_path(folder, self.run.rank), self.pending)
        if self.run.rank == 0:
            written.write_sealed(written.index_path(folder), self.index)
        self.folder, self.pending = folder, None

    def _check_saved(self, here: Here, document: dict[str, Any]) -> None:
        """The first moment: the file reads back as it was meant, and saving moved nothing in memory."""
        if self.folder is None:
            print(f"megatron-det: NO RECEIPT for this checkpoint: the format {here.args.ckpt_format} is not reached",
                  file=sys.stderr, flush=True)  # fmt: skip
            return
        back = written.read_rank(self.folder, self.run.rank, document["iteration"])
        wrong = receipt.check(here, back)
        if wrong:
            self._broken(wrong, "memory after the save", len(written.entries(back)), alone=True)

    # --- loading

    def load(self, original: Any, ran: Callable[[], None]) -> Any:
        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            ran()
            now = get_args()
            directory = getattr(now, kwargs.get("load_arg", "load"))
            step = resume.iteration_to_load(directory, now)
            document = None
            if step is not None and not now.finetune:
                folder = Path(get_checkpoint_name(directory, step, return_base_dir=True))
                document = self._recognise(folder, step, now)
            result = readable(original, directory, args, kwargs)
            if document is not None and int(result[0]) == step:
                self.loaded = document
                self._check_loaded(document, args, kwargs)
            return result

        return load_checkpoint

    def _recognise(self, folder: Path, iteration: int, now: Any) -> dict[str, Any] | None:
        """Before anything is loaded: is this checkpoint whole, ours, and of this layout and environment?"""
        if now.no_load_rng and now.no_load_optim and not written.folder(folder).is_dir():
            return None  # a checkpoint of stock Megatron, taken as a start and not as a resume
        head = resume.layout(now), resume.environment(self.run.manifest), self.run.options.level

        def mine() -> dict[str, Any]:
            return resume.read(folder, self.run.rank, self.run.world_size, iteration, *head)

        if self.run.options.resume == "strict":
            return resume.together(mine, own=True)
        try:
            return mine()
        except CheckpointError as error:
            self._withdraw(str(error))
            return resume.readable_state(folder, self.run.rank, iteration, head[0])

    def _check_loaded(self, document: dict[str, Any], args: Any, kwargs: Any) -> None:
        """The second moment: what Megatron loaded is what was saved."""
        model, optimizer, scheduler = (*args, *(None,) * 3)[:3]
        here = self._here(kwargs.get("ddp_model", model), kwargs.get("optimizer", optimizer),
                          kwargs.get("opt_param_scheduler", scheduler))  # fmt: skip
        only = receipt.loaded_by_megatron(here.args.no_load_optim or here.optimizer is None)
        self._verdict(receipt.check(here, document, only), "loaded state", document)

    def check_and_restore(self, iteration: int, model: Any, optimizer: Any, scheduler: Any) -> None:
        """The third moment, just before the first forward: put back what is ours, RNG last, and look at everything."""
        if self.loaded is None:
            return
        here = self._here(model, optimizer, scheduler)
        left = (OPTIMIZER if here.args.no_load_optim else set()) | (RANDOM if here.args.no_load_rng else set())
        document, self.loaded = self.loaded, None
        resume.together(lambda: receipt.restore(here, document, left))
        only = {piece["name"] for piece in document["pieces"]} - left
        self._verdict(receipt.check(here, document, only), "loaded state", document)

    def _verdict(self, mine: list[Mismatch], what: str, document: dict[str, Any]) -> None:
        everyone = [one for part in resume.gather([m.as_dict() for m in mine]) for one in part]
        if everyone:
            self._broken([Mismatch(**one) for one in everyone], what, len(written.entries(document)))

    def _broken(self, wrong: list[Mismatch], what: str, total: int, alone: bool = False) -> None:
        """One table; exit code 3, or with ``--det-resume warn`` the claim is withdrawn. ``alone``: only this rank."""
        if self.run.rank == 0 or alone:
            print(f"megatron-det: {what} is not what the receipt says\n{written.table(wrong)}", file=sys.stderr,
                  flush=True)  # fmt: skip
        mine = [one for one in wrong if one.rank == self.run.rank]
        first = (mine or wrong)[0]
        finding = Finding(
            "DET-CKPT-STATE" if mine else "DET-CKPT-PEER",
            f"{what}, rank {first.rank}, state/{first.name} ({len(mine or wrong)} of {total} entries differ)",
            first.found, first.saved,
            f"{first.cause[:1].upper()}{first.cause[1:]}. The run would differ from one that never stopped.",
            "resume from another checkpoint; if it repeats, report the piece that is named here.",
        )  # fmt: skip
        if self.run.options.resume == "strict":
            raise GuaranteeBroken(finding)
        self._withdraw(finding.one_line())

    def _withdraw(self, text: str) -> None:
        print(f"megatron-det: resumed WITHOUT the claim of exactness: {text}", file=sys.stderr, flush=True)

    def loaders(self, original: Any, ran: Callable[[], None]) -> Any:
        def build_train_valid_test_data_loaders(*args: Any, **kwargs: Any) -> Any:
            ran()
            result = original(*args, **kwargs)
            self.data = result[0]
            return result

        return build_train_valid_test_data_loaders


def places() -> dict[str, str]:
    """Where in the model-parallel split this rank stands: ranks of one place hold the same parameters."""
    tensor, stage = mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank()
    expert, inner = mpu.get_expert_model_parallel_rank(), mpu.get_expert_tensor_parallel_rank()
    return {"dense": f"tp{tensor} pp{stage}", "expert": f"ep{expert} etp{inner} pp{stage}"}


def savable(original: Any, directory: Any, args: Any, kwargs: Any) -> Any:
    """``save_checkpoint`` with whatever goes wrong inside as one error; the tracker still names the last good one."""
    try:
        return original(*args, **kwargs)
    except (DetError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        raise CheckpointError.of(
            "DET-CKPT-SAVE", f"checkpoint in {directory}", found=first_line(error), needed="a save that ends well",
            why="The last checkpoint that was saved whole is still the one that is named.",
            do="make room or correct --save, and resume from it; the traceback is above.",
        ) from error  # fmt: skip


def readable(original: Any, directory: Any, args: Any, kwargs: Any) -> Any:
    """``load_checkpoint`` with whatever goes wrong inside as one error that names the checkpoint."""
    try:
        return original(*args, **kwargs)
    except (DetError, KeyboardInterrupt):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception; Megatron exits with 0 here
        raise CheckpointError.of(
            "DET-CKPT-READ", f"checkpoint in {directory}", found=first_line(error),
            needed="a checkpoint that can be read whole", why="Training on with half a state would not be a resume.",
            do="resume from another checkpoint (--ckpt-step N), or see the traceback above.",
        ) from error  # fmt: skip


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no text'}"


def patches(run: Run) -> list[Patch]:
    mine = Checkpoints(run)
    why = "exact resume: the receipt of what was saved, and checks of what was loaded"
    loaders = "megatron.training.training:build_train_valid_test_data_loaders"
    return [
        Patch("checkpoint-save", f"{MODULE}:save_checkpoint", mine.save, why),
        Patch("checkpoint-write-early", f"{MODULE}:maybe_save_dataloader_state", mine.write_early, why),
        Patch("checkpoint-write-torch-dist", "megatron.core.dist_checkpointing:save", mine.write_sharded, why),
        Patch("checkpoint-load", f"{MODULE}:load_checkpoint", mine.load, why, stack=True),
        Patch("checkpoint-loaders", loaders, mine.loaders, why),
        *tracker.patches(),
    ]
