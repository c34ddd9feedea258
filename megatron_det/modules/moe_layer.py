"""The mixture-of-experts layer with our router, dispatcher and experts.

Replaces  the token dispatcher that ``MoELayer`` picks by name; its ``forward`` stays
Why       the names are an ``if`` in Megatron's constructor: another dispatcher cannot be named in a spec
Level     that of its parts: ``modules/router.py``, ``modules/dispatchers.py``, ``modules/experts.py``
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

from megatron_det.errors import Finding, Refused
from megatron_det.modules import experts
from megatron_det.modules.dispatchers import dispatcher


def refusals(config: Any) -> Iterator[Finding]:
    """What this layer does not serve, by the name of the flag. ``config``: a ``TransformerConfig``."""
    unexamined = "It replays recorded work; what was planned for another batch would move the rows."
    cases = [
        (config.cuda_graph_impl not in (None, "none"), "--cuda-graph-impl", config.cuda_graph_impl, unexamined),
        (bool(config.overlap_moe_expert_parallel_comm), "--overlap-moe-expert-parallel-comm", "on",
         "The order in which it adds the gradients of router and experts is not examined."),
    ]  # fmt: skip
    for found, what, value, why in cases:
        if found:
            yield Finding("DET-MOE", what, str(value), "off", why, "leave the flag out.")
    yield from experts.refusals(config)


class DetMoELayer(MoELayer):
    """Shapes: [s / tp, b, H] -> [s / tp, b, H].

    ``dispatcher_name``: one of ``register_dispatcher``, from the layer spec; else ``--moe-token-dispatcher-type``.
    ``runs`` counts what its dispatcher did. Raises: Refused from ``refusals`` and for an unknown dispatcher.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
        dispatcher_name: str | None = None,
    ) -> None:
        findings = list(refusals(config))
        if findings:
            raise Refused(*findings)
        cls: Any = dispatcher(dispatcher_name or config.moe_token_dispatcher_type)
        groups = pg_collection or get_default_pg_collection()
        super().__init__(config, submodules, layer_number, groups, is_mtp_layer, name)
        self.token_dispatcher = cls(
            self.num_local_experts, self.local_expert_indices, config=config, pg_collection=groups
        )
        self.runs = self.token_dispatcher.runs
        if self.use_shared_expert and self.shared_expert_overlap:
            self.token_dispatcher.set_shared_experts(self.shared_experts)
