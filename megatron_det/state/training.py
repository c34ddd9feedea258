"""Pieces that a training step reads and writes: weights, optimizer, schedule, scaler, counters, trackers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import num_microbatches_calculator as calculator
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.moe.moe_logging import MetricEntry, get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_det.state import model as model_state
from megatron_det.state import optimizer as optimizer_state
from megatron_det.state.piece import Here, Item, Seen

GROUP_OPTIONS = (
    "betas",
    "eps",
    "max_lr",
    "min_lr",
    "lr_mult",
    "wd_mult",
    "momentum",
    "nesterov",
    "amsgrad",
    "maximize",
)
BIASES = ("expert_bias", "qb_beta")
COUNTERS = ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps", "qb_beta_accum", "qb_beta_count")
POSITION = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
RERUN = ("large_value_counts", "max_values")


class Weights(Seen):
    """Parameters and persistent buffers, by name (router biases have their own piece)."""

    name = "model"
    about = "parameters and buffers; the checkpoint was damaged, or a shard was not loaded or not synchronised"

    def digest(self, here: Here) -> Iterator[Item]:
        for name, parameter in model_state.parameters(here.model):
            yield f"param/{name}", parameter
        for name, buffer in model_state.buffers(here.model):
            if name.rpartition(".")[2] not in BIASES:
                yield f"buffer/{name}", buffer


class Biases(Seen):
    """The router's expert bias: it chooses experts, and no gradient ever repairs it."""

    name = "router_bias"
    about = "expert bias of the routers; the buffer was not loaded"

    def digest(self, here: Here) -> Iterator[Item]:
        for name, buffer in model_state.buffers(here.model):
            if name.rpartition(".")[2] in BIASES:
                yield f"buffer/{name}", buffer


class Counters:
    """Token counts of the routers. Megatron does not save them: they are zero at most boundaries, not at all."""

    name = "router_counters"

    def capture(self, here: Here) -> Any:
        return dict(_counters(here)) or None

    def restore(self, here: Here, state: Any) -> None:
        with torch.no_grad():
            for name, buffer in _counters(here):
                buffer.copy_(state[name])

    def digest(self, here: Here) -> Iterator[Item]:
        return _counters(here)

    def describe(self) -> str:
        return "tokens per expert since the bias was last moved; the counters start from zero in a fresh process"


def _counters(here: Here) -> Iterator[tuple[str, torch.Tensor]]:
    for index, chunk in enumerate(here.model):
        for path, module in chunk.named_modules():
            for key in COUNTERS:
                buffer = getattr(module, key, None)
                if isinstance(buffer, torch.Tensor) and key not in module._parameters:
                    where = model_state.plain(f"{path}.{key}" if path else key)
                    yield f"counter/{model_state.prefix(index, here.model)}{where}", buffer


class Optimizer(Seen):
    """Main parameters and moments, each in its own dtype, and Adam's step (tensor, scalar or of the group)."""

    name = "optimizer"
    about = "main parameters, moments, step; moments dropped, rounded through 16 bits, or another rank's shard"

    def digest(self, here: Here) -> Iterator[Item]:
        for kind, name, item in optimizer_state.tensors(here.optimizer, here.model):
            yield f"{kind}/{name}", item
        for kind, name, item in optimizer_state.options(here.optimizer):
            if kind == "group_step":
                yield f"{kind}/{name}", item


class Options(Seen):
    """What the parameter groups say: the coming learning rate and weight decay, betas, multipliers."""

    name = "groups"
    about = "options of the parameter groups; the schedule was not restored, or groups were exchanged"

    def digest(self, here: Here) -> Iterator[Item]:
        for kind, name, item in optimizer_state.options(here.optimizer):
            if kind in ("lr", "weight_decay"):
                yield f"{kind}/{name}", item
        number = 0
        for one in optimizer_state.each(here.optimizer):
            for group in one.optimizer.param_groups:
                for key in GROUP_OPTIONS:
                    yield from _option(f"option/group{number}/{key}", group.get(key))
                number += 1


def _option(name: str, item: Any) -> Iterator[Item]:
    if isinstance(item, (tuple, list)):
        for position, one in enumerate(item):
            yield from _option(f"{name}{position}", one)
    elif isinstance(item, (bool, int, float, torch.Tensor)):
        yield name, item


class LossScaler(Seen):
    """The scale and when it changes next."""

    name = "loss_scaler"
    about = "the loss scale and its counters; the scaler started anew"

    def digest(self, here: Here) -> Iterator[Item]:
        for kind, name, item in optimizer_state.options(here.optimizer):
            if kind in ("loss_scale", "grad_scaler"):
                yield f"{kind}/{name}", item


class Schedule(Seen):
    """Where the learning-rate and weight-decay schedule stands."""

    name = "schedule"
    about = "position of the schedule; it was not restored, or restored twice (load_state_dict adds in 0.19.2)"

    def digest(self, here: Here) -> Iterator[Item]:
        if here.scheduler is not None:
            yield "scheduler/num_steps", int(here.scheduler.num_steps)


class Batches(Seen):
    """Consumed samples, and the number of micro-batches that the coming step will have (ramps depend on samples)."""

    name = "batches"
    about = "consumed samples and micro-batches of the coming step; another position or another ramp"

    def digest(self, here: Here) -> Iterator[Item]:
        for name in POSITION:
            yield f"samples/{name}", int(getattr(here.args, name, 0) or 0)
        now = calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
        if now is not None:
            coming = copy.copy(now)  # the calculator itself is moved by the training loop, and only by it
            coming.update(int(getattr(here.args, "consumed_train_samples", 0) or 0), False, False)
            yield "batches/num_micro_batches", coming.get()
            yield "batches/global_batch_size", coming.get_current_global_batch_size()


class Trackers:
    """Auxiliary losses and MTP losses that were added up and not reported yet. Only the log depends on them."""

    name = "trackers"

    def capture(self, here: Here) -> Any:
        return dict(_tracked()) or None

    def restore(self, here: Here, state: Any) -> None:
        metrics = get_moe_metrics_tracker().metrics
        for name, item in state.items():
            kind, _, key = name.partition("/")
            values = item.to(torch.device("cuda", torch.cuda.current_device()))
            if kind == "mtp":
                MTPLossLoggingHelper.tracker[key] = values
            elif key in metrics:
                metrics[key].values.copy_(values)
            else:
                metrics[key] = MetricEntry(values=values)  # its groups are set by the next record()

    def digest(self, here: Here) -> Iterator[Item]:
        return _tracked()

    def describe(self) -> str:
        return "auxiliary losses not reported yet; the sums started from zero"


def _tracked() -> Iterator[tuple[str, torch.Tensor]]:
    """Sums that are not zero: those that are make no difference to a tracker that does not exist yet."""
    for name, entry in sorted(get_moe_metrics_tracker().metrics.items()):
        if bool(entry.values.count_nonzero()):
            yield f"moe/{name}", entry.values
    for name, item in sorted(MTPLossLoggingHelper.tracker.items()):
        if isinstance(item, torch.Tensor) and bool(item.count_nonzero()):
            yield f"mtp/{name}", item


class Rerun:
    """Largest values seen, by which Megatron judges a loss "spiky". Stock Megatron loads them only in mid-fault."""

    name = "rerun"

    def capture(self, here: Here) -> Any:
        machine = get_rerun_state_machine()
        held = {key: dict(getattr(machine, key)) for key in RERUN}
        return held if any(held.values()) else None

    def restore(self, here: Here, state: Any) -> None:
        machine = get_rerun_state_machine()
        for key in RERUN:
            setattr(machine, key, state[key])

    def digest(self, here: Here) -> Iterator[Item]:
        machine = get_rerun_state_machine()
        yield "mode", str(machine.get_mode().value)
        yield "state", machine.state.name
        for key in RERUN:
            for name, item in sorted(getattr(machine, key).items()):
                yield f"{key}/{name}", float(item) if key == "max_values" else int(item)

    def describe(self) -> str:
        return "the rerun state machine; its largest values were forgotten, so another loss counts as spiky"


class Fp8(Seen):
    """Scales and amax history of Transformer Engine's modules (saved by Megatron as ``extra_state``)."""

    name = "fp8"
    about = "fp8 scales and amax history; derived anew instead of loaded"

    def digest(self, here: Here) -> Iterator[Item]:
        for index, chunk in enumerate(here.model):
            for path, module in chunk.named_modules():
                meta = getattr(module, "fp8_meta", None)
                for side in ("scaling_fwd", "scaling_bwd"):
                    held = meta.get(side) if isinstance(meta, dict) else None
                    for key in ("scale", "scale_inv", "amax_history"):
                        if isinstance(getattr(held, key, None), torch.Tensor):
                            where = f"{model_state.prefix(index, here.model)}{model_state.plain(path)}"
                            yield f"fp8/{where}/{side}/{key}", getattr(held, key)
