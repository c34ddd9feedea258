"""Gathers the manifest of this rank: what the run stands on. Sections as in docs/architecture.md."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from megatron_det import devices
from megatron_det.activation import environment
from megatron_det.contract.options import Options
from megatron_det.preflight.rules import data_prefixes

PACKAGES = (
    "megatron-det", "megatron-core", "torch", "numpy", "triton", "transformer-engine", "apex", "flash-attn",
    "nvidia-nccl-cu13", "nvidia-cublas", "nvidia-cudnn-cu13",
)  # fmt: skip
# Arguments that cannot change bits: where things are written, how often, how the run ends, what it resumes from.
UNCOMPARED_ARGUMENTS = frozenset(
    {
        "save", "load", "save_interval", "exit_interval", "exit_duration_in_mins", "ckpt_step", "no_load_rng",
        "no_load_optim", "tensorboard_dir", "wandb_save_dir", "local_rank", "rank", "data_cache_path", "det_ledger",
        "det_chaos", "det_resume", "iteration", "consumed_train_samples", "consumed_valid_samples",
        "skipped_train_samples", "timing_log_level", "log_interval", "non_persistent_save_interval", "async_save",
        "det_digest_interval", "det_placement", "det_collectives",
    }
)  # fmt: skip
DATA_ARGUMENTS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
ENVIRONMENT = (
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES", "MAMBA_DETERMINISTIC",
    "MKL_CBWR", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONHASHSEED",
    "PYTORCH_CUDA_ALLOC_CONF", "TORCHDYNAMO_DISABLE", "TRITON_CACHE_AUTOTUNING",
)  # fmt: skip
PREFIXES = ("NCCL_", "NVTE_", "TORCH_NCCL_", "GLOO_")
WHOLE_FILE = 1 << 30
BLOCK = 1 << 16
SAMPLES = 1024


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    return {"python": platform.python_version(), **{package: installed(package) for package in PACKAGES}}


def device_section(stand_in: bool) -> dict[str, Any]:
    cpu = {"cpu": cpu_model(), "machine": platform.machine(), "cpu_capability": torch.backends.cpu.get_cpu_capability()}
    if stand_in:
        return {**devices.describe(), **cpu}
    if not torch.cuda.is_available():
        return {"device": "none", **cpu}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    capability = f"{properties.major}.{properties.minor}"
    return {"device": "cuda", "gpu": properties.name, "capability": capability, "cuda": torch.version.cuda, **cpu}


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def environment_section() -> dict[str, str]:
    names = [*ENVIRONMENT, *(name for name in os.environ if name.startswith(PREFIXES))]
    return {name: os.environ[name] for name in sorted(set(names)) if name in os.environ}


def threads_section() -> dict[str, int]:
    return {"torch": torch.get_num_threads(), "interop": torch.get_num_interop_threads()}


def arguments_section(args: Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """(compared, shown only). Values that JSON cannot hold are written as their text."""
    values = {name: plain(value) for name, value in vars(args).items() if not name.startswith("_")}
    compared = {name: value for name, value in values.items() if name not in UNCOMPARED_ARGUMENTS}
    for name in DATA_ARGUMENTS:  # where files lie does not matter: what is in them is compared in the section "data"
        if compared.get(name):
            compared[name] = [os.path.basename(word) for word in compared[name]]
    text = json.dumps(compared, sort_keys=True)
    compared["digest"] = hashlib.sha256(text.encode()).hexdigest()
    return compared, {f"args.{n}": values[n] for n in sorted(UNCOMPARED_ARGUMENTS & set(values))}


def plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return getattr(value, "__qualname__", None) or str(value)


def data_section(prefixes: Iterable[str], rank: int) -> dict[str, Any]:
    """Sizes on every rank; digests on rank 0 (all of a file up to 1 GiB, else 1024 blocks and both ends, and it
    says so)."""
    section = {}
    for prefix in prefixes:
        for suffix in (".idx", ".bin"):
            path = Path(f"{prefix}{suffix}")
            entry: dict[str, Any] = {"bytes": path.stat().st_size}
            if rank == 0:
                entry.update(file_digest(path, whole=suffix == ".idx"))
            section[path.name] = entry
    return section


def file_digest(path: Path, whole: bool) -> dict[str, str]:
    size = path.stat().st_size
    with path.open("rb") as file:
        if whole or size <= WHOLE_FILE:
            return {"sha256": hashlib.file_digest(file, "sha256").hexdigest()}
        digest = hashlib.sha256()
        for number in range(SAMPLES + 1):
            file.seek((size - BLOCK) * number // SAMPLES)
            digest.update(file.read(BLOCK))
    return {"sha256-sampled": digest.hexdigest()}


def topology_section(args: Namespace) -> dict[str, Any]:
    names = {
        "world_size": "world_size",
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
        "dp": "data_parallel_size",
    }
    return {short: getattr(args, name, None) for short, name in names.items()}


def switches_section() -> dict[str, Any]:
    matmul = torch.backends.cuda.matmul
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill_uninitialized_memory": torch.utils.deterministic.fill_uninitialized_memory,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
        "fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
        "tf32": matmul.allow_tf32,
    }


def gather(options: Options, args: Namespace | None, rank: int, plan: dict[str, Any]) -> dict[str, Any]:
    """The manifest of this rank. ``plan`` is what activation changed (patches with their reasons)."""
    stand_in = devices.installed()
    sections: dict[str, dict[str, Any]] = {
        "versions": dict(versions()),
        "device": device_section(stand_in),
        "env": dict(environment_section()),
        "threads": dict(threads_section()),
        "switches": switches_section(),
        "plan": plan,
        "info": {"host": socket.gethostname(), "pid": os.getpid(), "command": sys.argv, "options": asdict(options)},
    }
    sections["info"]["environment_table"] = {v.name: v.why for v in environment.wanted(stand_in)}
    if args is not None:
        sections["args"], shown = arguments_section(args)
        sections["info"].update(shown)
        sections["topology"] = topology_section(args)
        words = [word for name in DATA_ARGUMENTS for word in getattr(args, name, None) or []]
        sections["data"] = data_section(data_prefixes(words), rank)
    return {
        "active": options.level != "observe",
        "level": options.level,
        "device": sections["device"]["device"],
        "waived": sorted(options.allow),
        "chaos": options.chaos,
        "rank": rank,
        "sections": sections,
    }
