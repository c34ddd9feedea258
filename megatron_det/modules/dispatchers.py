"""Token dispatchers: who computes which token, and how the experts' rows find back to it.

Replaces  ``MoEAlltoAllTokenDispatcher`` and ``MoEAllGatherTokenDispatcher`` of Megatron 0.19.2; DeepEP, HybridEP and
          NCCL-EP (``flex``) are refused
Why       ``unpermute`` adds with ``scatter_add_``, or ``index_add_`` in bf16; all-gather adds a token's rows first
          over the experts of a rank and then over the ranks, so its value follows the expert-parallel size
Order     a row's place at its expert: source tensor rank, source expert rank, token. A token's k rows come back to the
          rank that has the token and are added there by rising expert id in fp32 (``kernels/combine.py``)
Level     placement. A token's value does not follow the expert-parallel size where an expert sees the same rows.
          With expert tensor parallelism a row is first summed over its ranks by a reduce-scatter
Reaches   the rows and their probabilities. Counting, splits and copies to the host are inherited from Megatron
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_utils import (
    get_align_size_for_quantization,
    pad_routing_map,
    sort_chunks_by_idxs,
)
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoETokenDispatcher

from megatron_det.errors import Refused
from megatron_det.kernels.combine import Combine, gather_sum, take_rows
from megatron_det.kernels.permute import Permute, PermuteProbs, placement

_known: dict[str, type[MoETokenDispatcher]] = {}


def register_dispatcher(name: str, cls: type[MoETokenDispatcher]) -> None:
    """Makes ``cls`` known to ``DetMoELayer`` as ``name``; it must have Megatron's constructor and a ``runs`` Counter.

    The same class again changes nothing. Raises: Refused when the name belongs to another class.
    """
    if _known.setdefault(name, cls) is not cls:
        raise Refused.of(
            "DET-DISPATCHER",
            f"token dispatcher {name}",
            found=f"{cls.__qualname__}, and {_known[name].__qualname__} before it",
            needed="one class for a name",
            why="Which of them would run depends on the order of imports.",
            do="register it under another name.",
        )


def dispatcher(name: str) -> type[MoETokenDispatcher]:
    """Raises: Refused for a name that nobody registered."""
    if name not in _known:
        raise Refused.of(
            "DET-DISPATCHER",
            "--moe-token-dispatcher-type",
            found=name,
            needed=" or ".join(sorted(_known)),
            why="DeepEP, HybridEP and NCCL-EP add a token's rows in kernels of their own, in no written-down order."
            if name == "flex"
            else "Nobody registered it.",
            do="--moe-token-dispatcher-type alltoall, or megatron_det.modules.dispatchers.register_dispatcher.",
        )
    return _known[name]


def is_known(cls: type) -> bool:
    return cls in _known.values()


@dataclass(frozen=True)
class Exchange:
    """How the rows of one micro-batch travel, as it was when they left; the backward of later ones does not touch it.

    ``sent`` and ``received``: rows per expert-parallel rank, None for equal parts. ``by_tensor_rank``: rows per rank of
    the expert tensor group. ``chunks``: rows per (source rank, local expert).
    """

    owner: DetAlltoAllTokenDispatcher
    sent: Any
    received: Any
    by_tensor_rank: list[int] | None
    chunks: torch.Tensor

    def sort(self, rows: torch.Tensor) -> torch.Tensor:
        """From every source rank's rows to every local expert's. [R, ...] -> [R, ...]."""
        if self.owner.num_local_experts == 1:
            return rows
        return sort_chunks_by_idxs(rows, self.chunks.ravel(), self.owner.sort_input_by_local_experts)[0]

    def unsort(self, rows: torch.Tensor) -> torch.Tensor:
        if self.owner.num_local_experts == 1:
            return rows
        return sort_chunks_by_idxs(rows, self.chunks.T.ravel(), self.owner.restore_output_by_local_experts)[0]

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """All rows of the expert tensor group, by its ranks. The backward is ``scatter``."""
        if self.owner.tp_size == 1:
            return rows
        return gather_from_sequence_parallel_region(
            rows, group=self.owner.tp_group, output_split_sizes=self.by_tensor_rank
        )

    def scatter(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The sum over the expert tensor group, added in ``dtype``; each rank keeps what it sent."""
        if self.owner.tp_size == 1:
            return rows
        summed = reduce_scatter_to_sequence_parallel_region(
            rows.to(dtype), group=self.owner.tp_group, input_split_sizes=self.by_tensor_rank
        )
        return summed.to(rows.dtype)

    def send_back(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """From local experts' order to the ranks that sent them, in the order in which they did. No gradient."""
        with torch.no_grad():
            mine = self.scatter(self.unsort(rows), dtype)
            return all_to_all(self.owner.ep_group, mine, self.sent, self.received)


class DetAlltoAllTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Sends each row to its expert's rank and back. ``runs`` counts dispatches and combines.

    ``--moe-permute-fusion`` is served: the permutation is always this one. Shapes: hidden [s / tp, b, H],
    probs [T, E], routing_map [T, E] bool, T = s / tp * b.
    """

    runs: Counter[str]

    def __init__(
        self, num_local_experts: int, local_expert_indices: list[int], config: Any, pg_collection: Any = None
    ) -> None:
        unfused = copy.copy(config)
        unfused.moe_permute_fusion = False
        super().__init__(num_local_experts, local_expert_indices, config=unfused, pg_collection=pg_collection)
        self.runs = Counter()

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[Any, Any]:
        """To rows [R, H] and their probabilities [R], by rising expert id and token."""
        x = self._plan(hidden_states, routing_map, probs)
        place = self.placement
        return Permute.apply(x, place.token, place.rows), PermuteProbs.apply(probs, place.source, place.place)

    def _plan(self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Sets ``placement`` and ``exchange`` of this micro-batch; gives the tokens [T, H]."""
        self.runs["dispatch"] += 1
        self.hidden_shape, self.probs, self.routing_map = hidden_states.shape, probs, routing_map
        if self.config.moe_router_padding_for_quantization:
            multiple = get_align_size_for_quantization(self.config)
            self.routing_map = pad_routing_map(routing_map.clone(), multiple)
        counts = self.preprocess(self.routing_map)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        self._maybe_update_cuda_sync_point("before_permutation_1")
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        self.placement = placement(self.routing_map, self.capacity if self.drop_and_pad else None)
        by_tensor_rank = self.output_splits_tp
        self.exchange = Exchange(
            self,
            self.input_splits,
            self.output_splits,
            None if by_tensor_rank is None else by_tensor_rank.tolist(),
            self._chunks(),
        )
        return hidden_states.view(-1, self.hidden_shape[-1])

    def _chunks(self) -> torch.Tensor:
        """Rows per (source rank, local expert); with one local expert nothing is sorted."""
        if self.num_local_experts == 1:
            return torch.zeros(0, 1, dtype=torch.long)
        return self.num_global_tokens_per_local_expert.view(-1, self.num_local_experts)

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows of the local experts [R', H], their number per expert, their probabilities [R']."""
        route, counts, self.tokens_per_expert = self.exchange, self.tokens_per_expert, None
        return route.sort(route.gather(hidden_states)), counts, route.sort(route.gather(probs))

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Rows of the local experts, summed over the expert tensor group, by source rank."""
        return self.exchange.scatter(self.exchange.unsort(hidden_states), self.probs.dtype)

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        """The rows that came back to tokens, in the shape in which they came."""
        self.runs["combine"] += 1
        combined: Any = Combine.apply(permutated_local_input_tokens, self.placement.token, self.placement.rows)
        output = combined.view(self.hidden_shape)
        if self.shared_experts is not None:
            output = output + self.shared_experts.get_output()
        return output


class DetAllGatherTokenDispatcher(DetAlltoAllTokenDispatcher):
    """Gathers all tokens of the expert groups and keeps the rows of the local experts; what comes back is the same.

    The gradient of a row goes back to its token as in ``DetAlltoAllTokenDispatcher``, and not as a sum over ranks, so
    both have the same bits. Rows are not padded to the capacity here, as in Megatron's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.drop_and_pad = False

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[Any, Any]:
        """To tokens [T, H] and the probabilities of their rows [R]."""
        x = self._plan(hidden_states, routing_map, probs)
        return x, PermuteProbs.apply(probs, self.placement.source, self.placement.place)

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[Any, Any]:
        """To the rows of the local experts [R', H], sorted, and the probabilities as all-to-all brings them."""
        rows: Any = _GatherRows.apply(hidden_states, self._rows_here(), self.placement.rows, self.exchange)
        return rows, all_to_all(self.ep_group, probs, self.output_splits, self.input_splits)

    def _rows_here(self) -> torch.Tensor:
        """Which of all tokens, by (expert rank, tensor rank, token), each row of the local experts is. [R']."""
        tokens, ranks = self.routing_map.shape[0], self.ep_size * self.tp_size
        with torch.no_grad():
            everyone = _gathered(self.routing_map.to(torch.uint8), self.tp_ep_group)
        here = everyone[:, self.local_expert_indices[0] : self.local_expert_indices[-1] + 1]
        here = here.reshape(self.ep_size, self.tp_size, tokens, self.num_local_experts).permute(3, 1, 0, 2)
        number = torch.arange(ranks * tokens, device=here.device).view(self.ep_size, self.tp_size, tokens)
        return number.transpose(0, 1).expand(here.shape)[here.bool()]

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows of the local experts [R', H], their number per expert, their probabilities [R']."""
        route, counts, self.tokens_per_expert = self.exchange, self.tokens_per_expert, None
        return hidden_states, counts, route.sort(route.gather(probs))


def _gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
    return x if group.size() == 1 else gather_from_sequence_parallel_region(x, group=group)


class _GatherRows(torch.autograd.Function):
    """Forward: all tokens of the groups, and from them the rows of the local experts. Backward: each row's gradient to
    the rank of its token, added there by ``gather_sum``. Shapes: x [T, H], index [R'] -> [R', H]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor, route: Exchange) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.route = route
        return take_rows(_gathered(x, route.owner.tp_ep_group), index)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (rows,) = ctx.saved_tensors
        back = ctx.route.send_back(grads[0], grads[0].dtype)
        return gather_sum(back, rows), None, None, None


register_dispatcher("alltoall", DetAlltoAllTokenDispatcher)
register_dispatcher("allgather", DetAllGatherTokenDispatcher)
