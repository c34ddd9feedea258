"""The digest of a tensor is that of its bytes, whatever its dtype, layout and device path."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_det.formats.digest import digest_array
from megatron_det.kernels.fingerprint import device_digest, digest_tensor, value, words

DTYPES = [
    torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8,
    torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(*shape, generator=generator, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    return base > 0 if dtype is torch.bool else (base * 40).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_on_both_paths(dtype):
    tensor = sample(dtype, 37, 5)
    size = tensor.element_size() // (2 if dtype.is_complex else 1)
    raw = np.frombuffer(tensor.contiguous().view(torch.uint8).numpy().tobytes(), dtype=f"u{size}")
    expected = digest_array(raw, str(dtype).removeprefix("torch."), (37, 5))
    assert digest_tensor(tensor) == expected
    for chunk in (7, 1 << 22):
        assert device_digest(words(tensor), chunk) == (expected.blind, expected.ordered)


def test_layout_does_not_matter_but_order_does():
    tensor = sample(torch.bfloat16, 8, 6)
    assert digest_tensor(tensor.t().contiguous().t()) == digest_tensor(tensor)
    assert digest_tensor(tensor[:, ::2]) == digest_tensor(tensor[:, ::2].clone())
    swapped = tensor[torch.tensor([1, 0, *range(2, 8)])]
    assert digest_tensor(swapped).blind == digest_tensor(tensor).blind
    assert digest_tensor(swapped).ordered != digest_tensor(tensor).ordered


def test_signed_zero_nan_payload_and_empty():
    assert digest_tensor(torch.tensor([0.0])) != digest_tensor(torch.tensor([-0.0]))
    payloads = torch.tensor([0x7FC00000, 0x7FA00001], dtype=torch.int32).view(torch.float32)
    assert digest_tensor(payloads[:1]) != digest_tensor(payloads[1:])
    empty = digest_tensor(torch.zeros(0, 4))
    assert (empty.blind, empty.ordered, empty.shape) == (0, 0, (0, 4))
    assert digest_tensor(torch.zeros(4)) != digest_tensor(torch.zeros(2, 2)), "shape is part of it"


def test_conjugate_and_negative_views():
    tensor = sample(torch.complex64, 9)
    assert digest_tensor(tensor.conj()) == digest_tensor(tensor.conj().resolve_conj().clone())
    assert digest_tensor(tensor.conj()) != digest_tensor(tensor)


def test_scalars_keep_their_own_bits():
    assert value(torch.tensor(1.5))["bits"] == "3fc00000"
    assert value(torch.tensor(1.5, dtype=torch.bfloat16)) == {"t": "bf16", "bits": "3fc0", "dec": "1.5"}
    assert value(torch.tensor([7]))["dec"] == "7"
    assert value(torch.zeros(3))["t"] == "digest"
    assert value(0.1)["t"] == "f64"
