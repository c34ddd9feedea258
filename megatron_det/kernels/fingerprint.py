"""Exact values of tensors and scalars for the ledger. The digest is defined in ``formats.digest``."""

from __future__ import annotations

from typing import Any

import torch

from megatron_det.formats import scalars
from megatron_det.formats.digest import Digest, digest_words

KINDS = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64"}
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MASK = 2**64 - 1


def _as_int64(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


GOLDEN, MUL1, MUL2 = (_as_int64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in row-major order as a flat tensor of signed words (complex: two words each)."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.resolve_neg().contiguous().reshape(-1)
    return flat.view(SIGNED[flat.element_size()])


def digest_tensor(tensor: torch.Tensor) -> Digest:
    """Digest of a tensor of any dtype, layout and device. Extra memory: bounded (a few MB) beside a contiguous copy
    of a non-contiguous tensor. Level: placement (integer sums; any order gives the same value)."""
    flat = words(tensor)
    if flat.device.type == "cpu":
        array = flat.numpy().view(f"u{flat.element_size()}")
        blind, ordered = digest_words(array)
    else:
        blind, ordered = device_digest(flat)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Digest(dtype, tuple(tensor.shape), blind, ordered)


def device_digest(flat: torch.Tensor, chunk: int = 1 << 22) -> tuple[int, int]:
    """The same two numbers by integer operations on the tensor's device; one copy to the host at the end."""
    blind = torch.zeros((), dtype=torch.int64, device=flat.device)
    ordered = torch.zeros((), dtype=torch.int64, device=flat.device)
    zero_extend = (1 << (8 * flat.element_size())) - 1 if flat.element_size() < 8 else -1
    for low in range(0, flat.numel(), chunk):
        wide = flat[low : low + chunk].to(torch.int64)
        blind ^= _xor(wide)
        position = torch.arange(low + 1, low + 1 + wide.numel(), dtype=torch.int64, device=flat.device)
        ordered += _mix((wide & zero_extend) ^ (position * GOLDEN)).sum()
    both = torch.stack([blind, ordered]).cpu()
    return int(both[0]) & MASK, int(both[1]) & MASK


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * MUL1
    x = (x ^ _shift(x, 27)) * MUL2
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _xor(wide: torch.Tensor) -> torch.Tensor:
    """xor of all elements: halve until one is left."""
    while wide.numel() > 1:
        half = wide.numel() // 2
        rest = wide[2 * half :]
        wide = torch.cat([wide[:half] ^ wide[half : 2 * half], rest])
    return wide[0]


def value(item: Any) -> dict[str, Any]:
    """The exact ledger value of a tensor (one element: its bits; else its digest) or of a Python scalar."""
    if not isinstance(item, torch.Tensor):
        return scalars.of_python(item)
    if item.numel() != 1:
        return digest_tensor(item).as_value()
    item = item.detach().cpu()
    if item.dtype in KINDS:
        array = words(item).numpy().view(f"u{item.element_size()}")
        return scalars.from_bits(KINDS[item.dtype], int(array[0]))
    return scalars.of_python(item.item())
