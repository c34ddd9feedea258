"""Pieces around a training step: data order, private generators, kernel choices, groups."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from megatron_det.formats.digest import Digest, digest_array
from megatron_det.formats.receipt import values_seal
from megatron_det.state import generators, model, optimizer
from megatron_det.state.packing import pack
from megatron_det.state.piece import Here, Item, Seen

INDICES = ("document_index", "sample_index", "shuffle_index", "dataset_index", "dataset_sample_index")
WHOLE = 1 << 26  # bytes of an index that are digested whole; of a larger one SAMPLES blocks and both ends
BLOCK, SAMPLES = 1 << 16, 256
SEALS = "_megatron_det_indices"
DRAWN = "_megatron_det_drawn"


class DataOrder(Seen):
    """The order in which samples come: the sampler, and digests of the shuffle, sample and blend indices."""

    name = "data"
    about = "sampler and indices of the data set; other files, seed, --train-iters or split gave another order"

    def digest(self, here: Here) -> Iterator[Item]:
        sampler = getattr(here.data, "batch_sampler", None)
        if sampler is not None:
            yield "sampler/kind", type(sampler).__name__
            for key in ("total_samples", "micro_batch_size", "data_parallel_rank", "data_parallel_size"):
                if hasattr(sampler, key):
                    yield f"sampler/{key}", int(getattr(sampler, key))
        dataset = getattr(here.data, "dataset", None)
        if dataset is None:
            return
        held = getattr(here.data, SEALS, None)
        if held is None:  # indices never change while a process lives
            held = list(index_items(dataset))
            setattr(here.data, SEALS, held)
        yield from held


def index_items(dataset: Any, path: str = "index") -> Iterator[Item]:
    """(name, digest) of every index array of a Megatron data set and of those that it blends."""
    for key in INDICES:
        array = getattr(dataset, key, None)
        if isinstance(array, np.ndarray):
            yield f"{path}/{key}", sampled(array).as_value()
    inner = getattr(dataset, "datasets", None) or [getattr(dataset, "dataset", None)]
    for number, one in enumerate(inner):
        if one is not None and type(one).__name__ != "IndexedDataset":
            yield from index_items(one, f"{path}/{number}")


def sampled(array: np.ndarray) -> Digest:
    """Digest of an index; of a large one, of blocks spread evenly over it, and its dtype says so."""
    flat = array.reshape(-1)
    flat = flat.view(f"u{flat.dtype.itemsize}")
    if flat.nbytes <= WHOLE:
        return digest_array(np.ascontiguousarray(flat), str(array.dtype), array.shape)
    width = BLOCK // flat.itemsize
    starts = [(flat.size - width) * number // SAMPLES for number in range(SAMPLES + 1)]
    parts = np.concatenate([flat[start : start + width] for start in starts])
    return digest_array(parts, f"{array.dtype} sampled", array.shape)


class Loader:
    """A loader that keeps its own position (torchdata's StatefulDataLoader, Energon, any with ``state_dict``)."""

    name = "loader"

    def capture(self, here: Here) -> Any:
        return here.data.state_dict() if _stateful(here.data) else None

    def restore(self, here: Here, state: Any) -> None:
        here.data.load_state_dict(state)

    def digest(self, here: Here) -> Iterator[Item]:
        if _stateful(here.data):
            yield "loader/state", values_seal([("state", pack(here.data.state_dict()))])

    def describe(self) -> str:
        return "position of an external loader; it starts from its beginning"


def _stateful(loader: Any) -> bool:
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


class PrivateGenerators:
    """Generators kept by modules, optimizers and external loaders. Those of Megatron's data sets are started anew
    for every micro-batch (``patching/inventory/data.py``), so nothing of them is left over at a boundary."""

    name = "generators"

    def capture(self, here: Here) -> Any:
        return {path: generators.get(one) for path, one in _private(here)} or None

    def restore(self, here: Here, state: Any) -> None:
        for path, one in _private(here):
            if path in state:
                generators.put(one, state[path])

    def digest(self, here: Here) -> Iterator[Item]:
        for path, one in _private(here):
            yield f"generator/{path}", values_seal([("state", pack(generators.get(one)))])

    def describe(self) -> str:
        return "random generators of modules, optimizers and loaders; a fresh process seeds them again"


def _private(here: Here) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    roots = list(_roots(here))  # held while ids are compared
    for root, thing in roots:
        for path, one in generators.find(thing, 3, seen):
            yield f"{root}/{path}", one


def _roots(here: Here) -> Iterator[tuple[str, Any]]:
    for index, chunk in enumerate(here.model):
        for path, module in chunk.named_modules():
            inner = ("_parameters", "_buffers", "_modules")
            fields = {k: v for k, v in vars(module).items() if k not in inner and not isinstance(v, torch.nn.Module)}
            yield f"{model.prefix(index, here.model)}{model.plain(path) or 'model'}", fields
    for number, one in enumerate(optimizer.each(here.optimizer)):
        yield f"optimizer{number}", {k: v for k, v in vars(one.optimizer).items() if k not in ("state", "param_groups")}
    if here.data is not None and getattr(here.data, "batch_sampler", None) is None:
        yield "loader", here.data


class Kernels(Seen):
    """What chooses among kernels: attention backend, grouped GEMM, bucket layout, groups."""

    name = "kernels"
    about = "choices of kernels, buckets and groups; another backend, bucket size or group order"

    def digest(self, here: Here) -> Iterator[Item]:
        for key in ("attention_backend", "transformer_impl", "moe_grouped_gemm", "moe_token_dispatcher_type"):
            if getattr(here.args, key, None) is not None:
                yield f"choice/{key}", str(getattr(here.args, key))
        if getattr(here.args, "use_distributed_optimizer", False):
            names = {id(parameter): name for name, parameter in model.parameters(here.model)}
            for index, chunk in enumerate(here.model):
                layout = list(_buckets(chunk, names))
                if layout:
                    yield f"buckets/chunk{index}", values_seal(layout)
        known = torch.distributed.distributed_c10d._world.pg_group_ranks
        for name, item in vars(parallel_state).items():
            if isinstance(item, torch.distributed.ProcessGroup) and item in known:  # a destroyed one may still be named
                yield f"group/{name.strip('_').lower()}", list(known[item])


def _buckets(chunk: Any, names: dict[int, str]) -> Iterator[tuple[str, list[str]]]:
    for kind in ("bucket_groups", "expert_parallel_bucket_groups"):
        for group in getattr(chunk, kind, None) or ():
            for bucket in group.buckets:
                yield kind, [names.get(id(parameter), "?") for parameter in bucket.params_list]


class Autotune:
    """Winners of Triton's autotuner: chosen by time, and another winner may add in another order."""

    name = "autotune"

    def capture(self, here: Here) -> Any:
        return {where: [[key, _chosen(one)] for key, one in tuner.cache.items()]
                for where, tuner in tuners() if tuner.cache} or None  # fmt: skip

    def restore(self, here: Here, state: Any) -> None:
        for where, tuner in tuners():
            for key, chosen in state.get(where, ()):
                fitting = [config for config in tuner.configs if _chosen(config) == chosen]
                if fitting:
                    tuner.cache[key] = fitting[0]

    def digest(self, here: Here) -> Iterator[Item]:
        for where, tuner in tuners():
            for key, config in tuner.cache.items():
                yield f"autotune/{where}/{key}", str(_chosen(config))

    def describe(self) -> str:
        return "winners of the autotuner; it ran again and time chose another kernel, or the kernel has changed"


_tuners: tuple[int, list[tuple[str, Any]]] = (0, [])


def tuners() -> list[tuple[str, Any]]:
    """Every autotuner that a loaded module holds, by the module and name of the function that it tunes.

    Looked for again whenever another number of modules is loaded: decorators make autotuners at import.
    """
    global _tuners
    triton = sys.modules.get("triton.runtime.autotuner")
    if triton is None or _tuners[0] == len(sys.modules):
        return _tuners[1]
    found: dict[str, Any] = {}
    for module in list(sys.modules.values()):
        for item in list(vars(module).values()) if isinstance(module, ModuleType) else ():
            # type(), not isinstance: lazy objects warn or import when they are asked for their class
            if issubclass(type(item), triton.Autotuner):
                found[f"{item.base_fn.__module__}.{item.base_fn.__qualname__}"] = item
    _tuners = (len(sys.modules), sorted(found.items()))
    return _tuners[1]


def _chosen(config: Any) -> str:
    return str(sorted((key, str(item)) for key, item in config.all_kwargs().items()))
