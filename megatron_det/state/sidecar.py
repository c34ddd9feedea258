"""What each global rank keeps beside a checkpoint, and how it is checked when the run goes on.

``iter_0000005/megatron_det/rank-00003.json`` holds the RNG streams of that rank, and digests of the parameters,
main parameters, optimizer state and schedules that the checkpoint was made from. The file is written, whole or not at
all, before Megatron's tracker file names the checkpoint. JSON with a checksum; nothing is unpickled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_det.errors import CheckpointError, Finding, GuaranteeBroken
from megatron_det.formats import manifest, scalars
from megatron_det.state import closure, rng

SCHEMA = 1
FOLDER = "megatron_det"
LAYOUT = ("world_size", "tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")


def folder(checkpoint: Path) -> Path:
    return Path(checkpoint) / FOLDER


def path(checkpoint: Path, rank: int) -> Path:
    return folder(checkpoint) / f"rank-{rank:05d}.json"


def capture(
    iteration: int, rank: int, layout: dict[str, Any], model: list[Any], optimizer: Any, scheduler: Any
) -> dict[str, Any]:
    """The document for this rank, taken at the clean boundary after an optimizer step."""
    items = [*closure.option_items("state", optimizer, scheduler), *closure.tensor_items("state", model, optimizer)]
    return {
        "schema": SCHEMA,
        "iteration": iteration,
        "rank": rank,
        "layout": layout,
        "rng": rng.capture(),
        "items": items,
    }


def write(checkpoint: Path, document: dict[str, Any]) -> None:
    """Raises: FormatError when the checkpoint's directory cannot be written."""
    manifest.write_json(path(checkpoint, document["rank"]), {**document, "crc": manifest.checksum(_plain(document))})


def _plain(document: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(document))


def read(checkpoint: Path, rank: int, iteration: int, layout: dict[str, Any]) -> dict[str, Any]:
    """Raises: CheckpointError (DET-CKPT-NO-STATE missing, -DAMAGED, -FOREIGN, -LAYOUT)."""
    file = path(checkpoint, rank)
    try:
        document = json.loads(file.read_text())
        if not isinstance(document, dict) or document.get("crc") != manifest.checksum(document):
            raise ValueError("the checksum does not match")
    except FileNotFoundError as error:
        raise _problem(
            "DET-CKPT-NO-STATE", file, "no such file", "the per-rank state that --det saves with a checkpoint",
            "Without it RNG streams cannot be exact.",
            "save with --det, or pass --det-resume warn to load it without the claim.",
        ) from error  # fmt: skip
    except (OSError, ValueError) as error:
        raise _problem(
            "DET-CKPT-DAMAGED", file, str(error), "the file as it was saved", "A damaged state cannot be restored.",
            "resume from another checkpoint.",
        ) from error  # fmt: skip
    if document.get("schema") != SCHEMA or (document["rank"], document["iteration"]) != (rank, iteration):
        found = f"schema {document.get('schema')}, rank {document.get('rank')}, iteration {document.get('iteration')}"
        raise _problem(
            "DET-CKPT-FOREIGN", file, found, f"schema {SCHEMA}, rank {rank}, iteration {iteration}",
            "Another rank's state draws other numbers.", "restore the checkpoint's own files.",
        )  # fmt: skip
    if document["layout"] != layout:
        found = ", ".join(
            f"{key} {document['layout'].get(key)}" for key in layout if document["layout"].get(key) != layout[key]
        )
        needed = ", ".join(f"{key} {layout[key]}" for key in layout if document["layout"].get(key) != layout[key])
        raise _problem(
            "DET-CKPT-LAYOUT", file, f"saved with {found}", f"this run's {needed}",
            "Another layout adds in another order and has other RNG streams: the bits would differ.",
            "resume with the saved layout, or pass --det-resume warn to go on without the claim.",
        )  # fmt: skip
    return document


def _problem(code: str, file: Path, found: str, needed: str, why: str, do: str) -> CheckpointError:
    return CheckpointError.of(code, str(file), found=found, needed=needed, why=why, do=do)


MODEL_KINDS = ("param", "buffer")


def check(
    document: dict[str, Any], model: list[Any], optimizer: Any, scheduler: Any, optimizer_loaded: bool = True
) -> None:
    """Compares what was loaded with what was saved, before the first step.

    ``optimizer_loaded`` is False with --no-load-optim: then only parameters and buffers are compared.
    Raises: GuaranteeBroken with the first piece that differs and how many do.
    """
    saved = dict(document["items"])
    found = dict(
        [*closure.option_items("state", optimizer, scheduler), *closure.tensor_items("state", model, optimizer)]
    )
    if not optimizer_loaded:
        saved, found = ({n: v for n, v in part.items() if kind(n) in MODEL_KINDS} for part in (saved, found))
    wrong = [name for name in {**saved, **found} if saved.get(name) != found.get(name)]
    if not wrong:
        return
    name = wrong[0]
    nothing = scalars.of_python(None)
    raise GuaranteeBroken(
        Finding(
            "DET-CKPT-STATE",
            f"loaded state, rank {document['rank']}, {name} ({len(wrong)} of {len(saved)} pieces differ)",
            scalars.show(found.get(name, nothing)),
            scalars.show(saved.get(name, nothing)),
            f"{likely(wrong, list(saved))} The run would differ from one that never stopped.",
            "resume from another checkpoint; if it repeats, report the piece that is named here.",
        )
    )


def kind(name: str) -> str:
    return name.split("/")[1]


def likely(wrong: list[str], saved: list[str]) -> str:
    """What it can mean that these pieces differ: a kind that is wrong in every piece was not restored at all."""
    kinds = {kind(name) for name in wrong}
    whole = {name for name in saved if kind(name) in kinds} <= set(wrong)
    if kinds <= {"lr", "weight_decay", "scheduler"}:
        return "The learning-rate schedule was not restored."
    if whole and kinds <= {"exp_avg", "exp_avg_sq", "step", "group_step"}:
        return "The optimizer's moments were not restored."
    if whole and kinds <= {"main"}:
        return "The fp32 main parameters were not restored (rounded through 16 bits?)."
    return "The checkpoint was damaged, or not all of it was loaded."
