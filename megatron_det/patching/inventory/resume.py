"""Whether a checkpoint is one that this run may call its own: recognised before anything is loaded, in words.

Used by ``checkpoint.py``. What the bits depend on: the layout (split, batch, seed, train iterations) and the
environment (versions, device, threads, switches, variables, arguments).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_det.errors import CheckpointError, DetError, Finding
from megatron_det.formats import receipt as written
from megatron_det.formats.receipt import problem
from megatron_det.state import receipt

SECTIONS = ("versions", "device", "env", "threads", "switches", "args")
# What may change between the save and the resume: names, paths, logs, intervals, evaluation, and how checkpoints are
# kept. Evaluation moves no stream of training (RNG is restored last) and the order of the data is compared by digest.
FREE = (
    "wandb", "tensorboard", "log_", "exit_", "save", "load", "profile", "timing_", "eval_", "non_persistent", "ckpt_",
    "dist_ckpt", "async_", "logging_", "record_memory", "digest", "result_rejected",
)  # fmt: skip
FREE_EXACTLY = ("env/CUDA_VISIBLE_DEVICES",)
PLACEMENT = ("args/ddp_bucket_size", "args/overlap_grad_reduce", "args/overlap_param_gather")


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


def environment(manifest: dict[str, Any]) -> dict[str, Any]:
    sections = manifest.get("sections", {})
    return {name: sections.get(name, {}) for name in SECTIONS}


def differences(saved: dict[str, Any], found: dict[str, Any], level: str) -> Iterator[tuple[str, Any, Any]]:
    """(key, saved, found) of the environment keys that can change bits."""
    for key, left, right in written.changed(saved, found):
        section, _, name = key.partition("/")
        free = section == "args" and name.startswith(FREE)
        if not (free or key in FREE_EXACTLY or (level != "run" and key in PLACEMENT)):
            yield key, left, right


def iteration_to_load(directory: Any, args: Any) -> int | None:
    """The iteration that ``load_checkpoint`` will take, or None when it will take none (or a release)."""
    if not directory:
        return None
    if args.ckpt_step is not None:
        return int(args.ckpt_step)
    tracker = Path(directory) / written.TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text().strip()
    if text == "release":
        return None
    if not text.isdigit():
        whole = written.newest(Path(directory))
        raise problem(
            "DET-CKPT-TRACKER", tracker, repr(text), "the iteration of the newest checkpoint",
            "The process that wrote it was ended in the middle: nothing says which checkpoint is the newest.",
            f"write {whole} into it: iteration {whole} is the newest whole one." if whole else "choose another --load.",
        )  # fmt: skip
    return int(text)


def read(
    folder: Path, rank: int, world_size: int, iteration: int, split: dict[str, Any], around: dict[str, Any], level: str
) -> dict[str, Any]:
    """This rank's part of the receipt, when it is whole and of this layout and environment.

    Raises: CheckpointError (DET-CKPT-NO-STATE, -DAMAGED, -FOREIGN, -BOUNDARY, -LAYOUT, -ENVIRONMENT).
    """
    index = written.index_path(folder)
    if index.is_file():  # another world size has other files, so the index is looked at first
        same_layout(index, written.read_sealed(index)["layout"], split)
    document = written.read_rank(folder, rank, iteration)
    same_layout(written.rank_path(folder, rank), document["layout"], split)
    for one in written.against_index(written.read_sealed(index), document):
        raise problem(
            "DET-CKPT-FOREIGN", f"{written.rank_path(folder, rank)}, rank {rank}, piece {one.piece}", one.found,
            one.saved, f"The index of this checkpoint saw another one: {one.cause}.",
            "restore the checkpoint's own files.",
        )  # fmt: skip
    if document["boundary"] != receipt.CLEAN:
        raise problem(
            "DET-CKPT-BOUNDARY", folder, f"saved {document['boundary']}", "a save between two steps",
            "Gradients of half a step are in no checkpoint.", "resume from an earlier one (--ckpt-step N).",
        )  # fmt: skip
    other = list(differences(document["environment"], around, level))
    if other:
        raise problem(
            "DET-CKPT-ENVIRONMENT", folder, "; ".join(f"{key} {right!r}" for key, _, right in other),
            "; ".join(f"{key} {left!r}" for key, left, _ in other),
            "Other versions, devices, threads or arguments compute other bits.",
            "resume as it was saved, or pass --det-resume warn to go on without the claim.",
        )  # fmt: skip
    return document


def same_layout(where: Path, saved: dict[str, Any], mine: dict[str, Any]) -> None:
    other = [key for key in {**saved, **mine} if saved.get(key) != mine.get(key)]
    if other:
        raise problem(
            "DET-CKPT-LAYOUT", where, "saved with " + ", ".join(f"{key} {saved.get(key)}" for key in other),
            "this run's " + ", ".join(f"{key} {mine.get(key)}" for key in other),
            "Another layout adds in another order and has other RNG streams: the bits would differ.",
            "resume with the saved layout, or pass --det-resume warn: the state is resharded, the RNG streams are "
            "those that Megatron derives from --seed and the new ranks, and nothing is claimed.",
        )  # fmt: skip


def readable_state(folder: Path, rank: int, iteration: int, split: dict[str, Any]) -> dict[str, Any] | None:
    """With ``--det-resume warn``: this rank's part, when it can still be put back (same layout, whole)."""
    try:
        document = written.read_rank(folder, rank, iteration)
    except CheckpointError:
        return None  # said already by the caller
    return document if document["layout"] == split and document["boundary"] == receipt.CLEAN else None


def gather(mine: Any) -> list[Any]:
    """Everybody's value, by rank. Order: by logical rank."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return [mine]
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    return everyone


def together(action: Callable[[], Any], own: bool = False) -> Any:
    """Does ``action`` on all ranks; when one fails, all raise (a rank that waits for a dead one would hang).

    Returns everybody's results, or with ``own`` this rank's. Raises: this rank's own error, or the first one's.
    """
    result, error = None, None
    try:
        result = action()
    except DetError as caught:
        error = caught
    told = gather((None if own else result, error.finding.as_dict() if error is not None else None))
    if error is not None:
        raise error
    for rank, (_, finding) in enumerate(told):
        if finding is not None:
            raise CheckpointError(Finding(**{**finding, "what": f"{finding['what']} (seen by rank {rank})"}))
    return result if own else [value for value, _ in told]
