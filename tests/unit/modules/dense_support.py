"""What the tests of the dense modules share: bits, disturbance, a one-process Megatron on the CPU stand-in."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_det import devices

REPLAYS = 50


def bits(*tensors: torch.Tensor) -> bytes:
    """The bytes of the tensors: +0 and -0 differ, equal NaNs are equal."""
    return b"".join(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def load() -> Iterator[None]:
    """Another thread that computes all the time."""
    stop = threading.Event()

    def burn() -> None:
        x = torch.ones(64, 64)
        while not stop.is_set():
            x = (x @ x).clamp_(-1, 1)

    thread = threading.Thread(target=burn)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _filled(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = make(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    return poisoned


@contextmanager
def poison() -> Iterator[None]:
    """What is not initialised reads NaN."""
    kept = {name: getattr(torch, name) for name in ("empty", "empty_like")}
    for name, make in kept.items():
        setattr(torch, name, _filled(make))
    try:
        yield
    finally:
        for name, make in kept.items():
            setattr(torch, name, make)


def replays(run: Callable[[], bytes], count: int = REPLAYS) -> set[bytes]:
    """The different results of ``count`` runs: two threads, load, poisoned memory, garbage of changing size before."""
    seen = set()
    with threads(2), load():
        for number in range(count):
            garbage = [torch.full((size + 7 * number,), float("nan")) for size in (64, 4096, 65536)]
            del garbage[number % 3]
            if number % 2:
                with poison():
                    seen.add(run())
            else:
                seen.add(run())
    return seen


def gradients(run: Callable[..., torch.Tensor], *leaves: torch.Tensor, recompute: bool = False) -> tuple[Any, ...]:
    """The output of ``run`` and the gradients of its sum with fixed weights, with or without recompute."""
    fresh = [leaf.detach().clone().requires_grad_(leaf.is_floating_point()) for leaf in leaves]
    if recompute:
        out = torch.utils.checkpoint.checkpoint(run, *fresh, use_reentrant=True)
    else:
        out = run(*fresh)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype)
    wanted = [leaf for leaf in fresh if leaf.requires_grad]
    (out * weights).sum().backward()
    return out, *(leaf.grad for leaf in wanted)


@contextmanager
def megatron(**more: Any) -> Iterator[None]:
    """One process of Megatron on the stand-in: groups, RNG streams; taken down again."""
    from megatron.core import parallel_state, tensor_parallel

    before = dict(os.environ)  # Megatron writes NVTE_... when it builds a model
    standin = devices.install()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        torch.distributed.init_process_group("gloo", rank=0, world_size=1)
        parallel_state.initialize_model_parallel(**more)
        tensor_parallel.model_parallel_cuda_manual_seed(3)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
        standin.undo()
        os.environ.clear()
        os.environ.update(before)


def config(**more: Any) -> Any:
    """A small ``TransformerConfig`` as a training run on CPU would have it."""
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    plain = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 64,
        "use_cpu_initialization": True, "normalization": "RMSNorm", "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu, "add_bias_linear": False, "hidden_dropout": 0.1,
        "attention_dropout": 0.1, "attention_backend": AttnBackend.auto, "transformer_impl": "local",
        "gradient_accumulation_fusion": False, "masked_softmax_fusion": False, "bias_dropout_fusion": False,
        "bias_activation_fusion": False, "apply_rope_fusion": False, "persist_layer_norm": False,
        "deterministic_mode": False, "pipeline_dtype": torch.float32,
    }  # fmt: skip
    return TransformerConfig(**{**plain, **more})
