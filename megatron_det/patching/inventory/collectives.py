"""All of Megatron's groups sum in logical-rank order: the ``det`` backend under every group of ``parallel_state``.

Replaces      ``torch.distributed.init_process_group`` and ``new_group``: the backend's name becomes ``det``;
              ``reduce_scatter_with_fp32_accumulation``: becomes a reduce-scatter of that backend;
              ``get_grad_norm_fp32``: the sum of squares is exact (``kernels.square_sum``)
Why           the vendor's sums follow ring, message size and bucket layout. Megatron's own fp32-accumulating
              reduce-scatter adds with ``torch.sum(dim=0)``, whose order follows the position of the element in the
              shard from 5 ranks on (measured on CPU), so it moves with the bucket layout as well. A norm that is added
              shard by shard moves with the borders of the shards
Reaches       every group that is made after activation: TP, DP, DP-CP, EP, expert-DP, embedding, pipeline, gloo groups
              of checkpointing
Leaves alone  the ``fake`` backend, and groups made before activation (refused at the first step)
Drop when     a vendor's backend takes a fixed order of ranks
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_det.collectives import NAME, Settings, record, register
from megatron_det.errors import Finding, GuaranteeBroken, Refused
from megatron_det.kernels.square_sum import square_sum
from megatron_det.patching.engine import Patch

UNTOUCHED = ("fake", "mpi")
WHY = "sums in logical-rank order, whatever the placement, bucket size and overlap"


def settings(order: str) -> Settings:
    return Settings(order=order)


def _init(chosen: Settings) -> Callable[..., Any]:
    def make(original: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
        def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
            if str(backend) in UNTOUCHED:
                return original(backend, *args, **kwargs)
            ran()
            register(chosen)
            return original(NAME, *args, **kwargs)

        return init_process_group

    return make


def _group(original: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        if str(backend) in UNTOUCHED:
            return original(ranks, timeout, backend, *args, **kwargs)
        ran()
        return original(ranks, timeout, NAME, *args, **kwargs)

    return new_group


def _fp32_accumulation(original: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
    def reduce_scatter(output_tensor: Any, input_tensor: Any, op: Any, group: Any, async_op: bool) -> Any:
        ran()
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)

    return reduce_scatter


def _grad_norm(original: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
    from megatron.core.optimizer import clip_grads

    def get_grad_norm_fp32(grads_for_norm: Any, norm_type: float = 2, grad_stats_parallel_group: Any = None) -> Any:
        if float(norm_type) == float("inf"):
            return original(grads_for_norm, norm_type, grad_stats_parallel_group)  # a maximum has no order
        if float(norm_type) != 2.0:
            raise Refused(
                Finding(
                    "DET-GRAD-NORM", "norm of the gradients", f"order {norm_type}", "2 or inf",
                    "There is no exact sum of other powers.", "clip by the 2-norm.",
                )
            )  # fmt: skip
        ran()
        grads = [grads_for_norm] if isinstance(grads_for_norm, torch.Tensor) else list(grads_for_norm)
        sharded = None
        for grad in grads:
            sharded = clip_grads.get_data_parallel_group_if_dtensor(grad, sharded)
        grads = [clip_grads.to_local_if_dtensor(grad) for grad in grads]
        groups = [sharded, grad_stats_parallel_group] if sharded is not None else [grad_stats_parallel_group]

        def reduce(op: Any) -> Callable[[torch.Tensor], None]:
            def over_groups(tensor: torch.Tensor) -> None:
                for group in groups:
                    dist.all_reduce(tensor, op=op, group=group)

            return over_groups

        total = square_sum(grads, torch.device("cuda"), reduce(dist.ReduceOp.MAX), reduce(dist.ReduceOp.SUM))
        norm = total.sqrt().float()
        return norm if clip_grads.multi_tensor_scale_tensor_impl is not None else norm.item()

    return get_grad_norm_fp32


def check_groups() -> None:
    """Before the first step: every group is ours, and was used. Raises: GuaranteeBroken."""
    foreign = [
        str(name) for group, name in dist.distributed_c10d._world.pg_names.items()
        if dist.distributed_c10d._world.pg_map[group][0] not in (NAME, *UNTOUCHED)
    ]  # fmt: skip
    if foreign or not record.count():
        found = f"groups of another backend: {', '.join(foreign[:5])}" if foreign else "not one collective"
        raise GuaranteeBroken.of(
            "DET-COLLECTIVE-UNUSED", "collectives", found=found, needed="all groups on the det backend",
            why="A group that was made before activation sums in the vendor's order.",
            do="activate before torch.distributed is initialised: use --det, or the launcher.",
        )  # fmt: skip


def patches(order: str = "tree") -> list[Patch]:
    chosen = settings(order)
    return [
        Patch("collectives-init", "torch.distributed:init_process_group", _init(chosen), why=WHY, stack=True),
        Patch("collectives-group", "torch.distributed:new_group", _group, why=WHY, stack=True),
        Patch(
            "collectives-fp32-accumulation",
            "megatron.core.distributed.reduce_scatter_with_fp32_accumulation:reduce_scatter_with_fp32_accumulation",
            _fp32_accumulation,
            why="the flag's local sum follows the position of the element from 5 ranks on",
        ),
        Patch(
            "collectives-grad-norm",
            "megatron.core.optimizer.clip_grads:get_grad_norm_fp32",
            _grad_norm,
            why="the norm does not follow the borders of optimizer shards",
        ),
    ]
