"""The one table of redirected calls. A new Megatron release that needs another shows up as an error that names a
CUDA call: add a row here. Rows on Megatron's own modules are applied when those modules are imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_det.devices import distributed as d
from megatron_det.devices import fakes
from megatron_det.devices.streams import Streams
from megatron_det.patching.engine import Patch


@dataclass(frozen=True)
class Redirect:
    """``symbol`` becomes ``becomes(original, streams)``. ``undoable`` is a claim that a test checks for each row."""

    symbol: str
    becomes: Callable[[Any, Streams], Any]
    why: str


def constant(value: Any) -> Callable[[Any, Streams], Any]:
    return lambda original, streams: lambda *args, **kwargs: value


def thing(value: Any) -> Callable[[Any, Streams], Any]:
    return lambda original, streams: value


def nothing(original: Any, streams: Streams) -> Any:
    return lambda *args, **kwargs: None


def identity_decorator(original: Any, streams: Streams) -> Any:
    def compile(model: Any = None, **kwargs: Any) -> Any:
        return model if model is not None else lambda function: function

    return compile


def inside_host_stream(original: Any, streams: Streams) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with streams.host():
            return original(*args, **kwargs)

    return run


def inside_mode(original: Any, streams: Streams) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with streams.mode.again():
            return original(*args, **kwargs)

    return run


def _local_world_size(original: Any, streams: Streams) -> Any:
    return lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _get_state(original: Any, streams: Streams) -> Any:
    return lambda device="cuda": streams.device.get_state()


def _set_state(original: Any, streams: Streams) -> Any:
    return lambda new_state, device="cuda": streams.device.set_state(new_state)


def _seed(original: Any, streams: Streams) -> Any:
    def manual_seed(seed: int) -> None:
        streams.device.manual_seed(int(seed))

    return manual_seed


def _generators(original: Any, streams: Streams) -> Any:
    return fakes.Generators((streams.device,))


def _call_now(original: Any, streams: Streams) -> Any:
    return lambda call, **kwargs: call()


def _no_compiler_needed(original: Any, streams: Streams) -> Any:
    """The wheel ships ``helpers_cpp`` compiled, but no Makefile, and ``make`` then ends the run."""

    def compile_helpers() -> None:
        from importlib.util import find_spec

        if find_spec("megatron.core.datasets.helpers_cpp") is None:
            original()

    return compile_helpers


INDEX = fakes.DeviceIndex()
ALWAYS_CURRENT = constant(fakes.CURRENT)

TABLE: tuple[Redirect, ...] = (
    # presence
    Redirect("torch.cuda:is_available", constant(True), "Megatron asserts a GPU"),
    Redirect("torch.cuda:device_count", _local_world_size, "0 devices: model-parallel groups are never made"),
    Redirect("torch.cuda:set_device", lambda o, s: INDEX.set, "no device to select"),
    Redirect("torch.cuda:current_device", lambda o, s: INDEX.get, "used as a device argument in 40 places"),
    Redirect("torch.cuda:device", thing(fakes.DeviceScope), "context manager"),
    Redirect("torch.cuda:get_device_properties", constant(fakes.Properties), "capability and memory queries"),
    Redirect("torch.cuda:get_device_capability", constant((9, 0)), "capability gates of argument checks"),
    Redirect("torch.cuda:get_device_name", constant(fakes.Properties.name), "logging"),
    Redirect("torch.cuda:is_initialized", constant(True), "asked before RNG calls"),
    Redirect("torch.cuda:_lazy_init", nothing, "would fail: torch is built for CUDA, no driver is there"),
    Redirect("torch.cuda:_lazy_call", _call_now, "queued calls would wait for CUDA for ever"),
    Redirect("torch.accelerator:is_available", constant(False), "pinned memory asks for an accelerator"),
    Redirect(
        "torch.optim:Optimizer._accelerator_graph_capture_health_check",
        nothing,
        "asks the accelerator's stream, which starts CUDA",
    ),
    # streams, events, synchronisation
    Redirect("torch.cuda:Stream", thing(fakes.Stream), "side streams: all work is done at once"),
    Redirect("torch.cuda:Event", thing(fakes.Event), "timers"),
    Redirect("torch.cuda:stream", thing(fakes.StreamScope), "context manager"),
    Redirect("torch.cuda:current_stream", ALWAYS_CURRENT, "one stream"),
    Redirect("torch.cuda:default_stream", ALWAYS_CURRENT, "one stream"),
    Redirect("torch.cuda:set_stream", nothing, "one stream"),
    Redirect("torch.cuda:synchronize", nothing, "nothing runs ahead"),
    Redirect("torch.cuda:is_current_stream_capturing", constant(False), "no CUDA graphs"),
    # memory statistics and ranges
    Redirect("torch.cuda:empty_cache", nothing, "no caching allocator"),
    Redirect("torch.cuda:reset_peak_memory_stats", nothing, "no caching allocator"),
    Redirect("torch.cuda:memory_allocated", constant(0), "logging"),
    Redirect("torch.cuda:max_memory_allocated", constant(0), "logging"),
    Redirect("torch.cuda:memory_reserved", constant(0), "logging"),
    Redirect("torch.cuda:max_memory_reserved", constant(0), "logging"),
    Redirect("torch.cuda:memory_stats", thing(fakes.memory_stats), "logging"),
    Redirect("torch.cuda:mem_get_info", constant((2**34, 2**34)), "checkpoint buffers ask for free memory"),
    Redirect("torch.cuda.nvtx:range_push", nothing, "profiler ranges"),
    Redirect("torch.cuda.nvtx:range_pop", nothing, "profiler ranges"),
    # tensor types
    Redirect("torch.cuda:FloatTensor", thing(fakes.FloatTensor), "constructor and isinstance"),
    Redirect("torch.cuda:IntTensor", thing(fakes.IntTensor), "constructor"),
    Redirect("torch.cuda:LongTensor", thing(fakes.LongTensor), "constructor"),
    # RNG: the device stream
    Redirect("torch.cuda:get_rng_state", _get_state, "device stream"),
    Redirect("torch.cuda:set_rng_state", _set_state, "device stream"),
    Redirect("torch.cuda.random:get_rng_state", _get_state, "Megatron's tracker reads it here"),
    Redirect("torch.cuda.random:set_rng_state", _set_state, "device stream"),
    Redirect("torch.cuda:manual_seed", _seed, "device stream"),
    Redirect("torch.cuda:manual_seed_all", _seed, "torch.manual_seed calls it: seeds the device stream"),
    Redirect("torch.cuda.random:manual_seed", _seed, "device stream"),
    Redirect("torch.cuda.random:manual_seed_all", _seed, "device stream"),
    Redirect("torch.cuda:default_generators", _generators, "Megatron's tracker sets states here"),
    # RNG: the host scopes
    Redirect(
        "torch.utils.data.dataloader:_BaseDataLoaderIter.__init__",
        inside_host_stream,
        "the loader's base seed is a host draw",
    ),
    Redirect(
        "torch.utils.data.dataloader:_BaseDataLoaderIter.__next__",
        inside_host_stream,
        "samplers and datasets are host code: their draws too",
    ),
    Redirect(
        "torch.utils.data._utils.worker:_worker_loop",
        inside_host_stream,
        "a loader's worker process is host code",
    ),
    Redirect(
        "megatron.core.tensor_parallel.layers:_initialize_affine_weight_cpu",
        inside_host_stream,
        "--use-cpu-initialization draws on the host",
    ),
    # autograd
    Redirect("torch.autograd:_engine_run_backward", inside_mode, "recomputation inside a backward is redirected too"),
    # compiler
    Redirect("torch:compile", identity_decorator, "asks the accelerator's stream; Megatron's jit_fuser"),
    # distributed: gloo
    Redirect("torch.distributed:init_process_group", d.init_process_group, "nccl -> gloo, no device"),
    Redirect("torch.distributed:new_group", d.new_group, "nccl -> gloo, no options"),
    Redirect("torch.distributed:barrier", d.barrier, "gloo takes no device_ids"),
    Redirect("torch.distributed:all_reduce", d.all_reduce, "gloo before torch 2.14 has no AVG: sum, then divide"),
    Redirect("torch.distributed:all_to_all_single", d.all_to_all_single, "gloo wants split sizes as lists"),
    # Megatron
    Redirect("megatron.core.datasets.utils:compile_helpers", _no_compiler_needed, "the wheel has no Makefile"),
)


def patches(streams: Streams) -> Iterator[Patch]:
    """The table as patches, in its order. The stand-in is the ground that a run's patches may lie on: ``stack``."""
    for row in TABLE:
        yield Patch(f"standin-{row.symbol}", row.symbol, _maker(row, streams), why=row.why, stack=True)


def _maker(row: Redirect, streams: Streams) -> Callable[[Any, Callable[[], None]], Any]:
    def make(original: Any, ran: Callable[[], None]) -> Any:
        replacement = row.becomes(original, streams)
        if isinstance(replacement, type) or not callable(replacement) or isinstance(replacement, torch.Generator):
            return replacement
        return d.counted(original, replacement, ran)

    return make
