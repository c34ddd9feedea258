"""Evidence on a built model: which modules are ours, which should have been, and which never ran."""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron_det.errors import Finding
from megatron_det.modules.attention import DetAttention
from megatron_det.modules.cross_entropy import DetLoss
from megatron_det.modules.embedding import DetEmbedding, DetVocabParallelEmbedding, take_over
from megatron_det.modules.norm import DetNorm, take_over_norm

# What may not be left in a model, and what stands there instead. Classes by name where the package may be missing.
REPLACED: dict[str, type] = {
    "RMSNorm": DetNorm,
    "LayerNorm": DetNorm,
    "FusedLayerNorm": DetNorm,
    VocabParallelEmbedding.__name__: DetVocabParallelEmbedding,
    torch.nn.Embedding.__name__: DetEmbedding,
    DotProductAttention.__name__: DetAttention,
}
LOSS = "compute_language_model_loss"


def moe_classes() -> tuple[type, type] | None:
    """Our MoE layer and router; None as long as they are not part of the package (then Megatron's stay)."""
    if any(importlib.util.find_spec(f"megatron_det.modules.{name}") is None for name in ("moe_layer", "router")):
        return None
    layer = importlib.import_module("megatron_det.modules.moe_layer").DetMoELayer
    router = importlib.import_module("megatron_det.modules.router").DetTopKRouter
    return layer, router


def replaced() -> dict[str, type]:
    """``REPLACED``, with the experts where ours are there."""
    ours = moe_classes()
    return REPLACED if ours is None else {**REPLACED, "MoELayer": ours[0], "TopKRouter": ours[1]}


@dataclass(frozen=True)
class Seen:
    """One replacement in a model and how often each of its paths ran."""

    name: str
    kind: str
    runs: dict[str, int]


def adopt(model: list[Any]) -> list[Any]:
    """Puts in place what no layer spec reaches: embeddings, the loss, a final norm of
    torch's. A pre-wrap hook: takes and returns the chunks.

    Twice does nothing more. Raises: Refused from the modules.
    """
    for chunk in model:
        for module in chunk.modules():
            take_over(module) or take_over_norm(module, chunk.config)
            if isinstance(module, LanguageModule) and not isinstance(getattr(module, LOSS), DetLoss):
                setattr(module, LOSS, DetLoss(module.pg_collection.tp))
    return model


def seen(model: list[Any]) -> Iterator[Seen]:
    """Every replacement in the model."""
    for number, chunk in enumerate(model):
        for name, module in chunk.named_modules():
            where = f"chunk{number}.{name}" if len(model) > 1 else name
            runs = getattr(module, "runs", None)
            if isinstance(runs, Counter):
                yield Seen(where, type(module).__name__, dict(runs))
            loss = vars(module).get(LOSS)
            if isinstance(loss, DetLoss):
                yield Seen(f"{where}.{LOSS}", DetLoss.__name__, dict(loss.runs))


def absent(model: list[Any]) -> Iterator[Finding]:
    """Modules that the specs replace and that are still somebody else's."""
    table = replaced()
    for number, chunk in enumerate(model):
        for name, module in chunk.named_modules():
            ours = table.get(type(module).__name__)
            if ours is not None:
                yield _absent(f"chunk {number}, {name}", type(module).__qualname__, ours.__name__)
            if isinstance(module, LanguageModule) and not isinstance(getattr(module, LOSS), DetLoss):
                yield _absent(f"chunk {number}, {name or 'model'}.{LOSS}", "Megatron's loss", DetLoss.__name__)
    if not any(True for _ in seen(model)):
        yield _absent("model", "no module of megatron_det", "at least one")


def idle(model: list[Any]) -> Iterator[Finding]:
    """Replacements that never ran, to be asked after a forward and backward. A loss runs only on the last stage."""
    last = any(getattr(module, "post_process", False) for chunk in model for module in chunk.modules())
    for one in seen(model):
        if one.kind == DetLoss.__name__ and not last:
            continue
        if not sum(one.runs.values()):
            yield Finding(
                "DET-SPEC-IDLE", f"module {one.name} ({one.kind})", "it never ran", "at least one forward",
                "Something else computed in its place.", "report this model and its arguments.",
            )  # fmt: skip


def paths(model: list[Any]) -> dict[str, int]:
    """How often each path ran, over the model: ``{"DetAttention/flash": 8, …}``."""
    total: Counter[str] = Counter()
    for one in seen(model):
        total.update({f"{one.kind}/{path}": count for path, count in one.runs.items()})
    return dict(sorted(total.items()))


def _absent(where: str, found: str, needed: str) -> Finding:
    return Finding(
        "DET-SPEC-ABSENT", f"module {where}", found, needed,
        "Its order is not the one that the layer spec promises.",
        "use --spec megatron_det.specs gpt_layer_spec, or call megatron_det.specs.adopt on the model.",
    )  # fmt: skip
