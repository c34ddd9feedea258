"""The digest of a tensor: two 64-bit numbers from one pass over its bytes.

Words. The elements in logical (row-major) order, each seen as an unsigned word of its own size (1, 2, 4 or 8 bytes).
Complex elements are two words, real part first.

``blind``    xor of all words, each sign-extended from its size to 64 bits. It does not see order. It equals
             ``torch.hash_tensor`` of the same bits viewed as a signed integer tensor.
``ordered``  sum modulo 2**64 over all words of ``mix(word xor key(i))`` with the word zero-extended, its position
             ``i`` counted from 0, all arithmetic modulo 2**64:

             key(i) = (i + 1) * 0x9E3779B97F4A7C15
             mix(x): x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9;  x ^= x >> 27;  x *= 0x94D049BB133111EB;  x ^= x >> 31

             The sum is of integers, so any order of reduction gives the same value. (``mix`` is the finaliser of
             SplitMix64: Steele, Lea, Flood, OOPSLA 2014.)

An empty tensor has both 0. Equal ``ordered``, dtype and shape: the same tensor (up to a 2**-64 collision). Only
``blind`` equal: the same values in another order. Bytes are told apart, so +0 and -0, and NaN payloads, differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MUL1 = np.uint64(0xBF58476D1CE4E5B9)
MUL2 = np.uint64(0x94D049BB133111EB)
CHUNK = 1 << 16  # words: fits the cache; peak extra memory is a few times 8 * CHUNK bytes


@dataclass(frozen=True)
class Digest:
    """Digest of one tensor with what the bytes alone do not say."""

    dtype: str
    shape: tuple[int, ...]
    blind: int
    ordered: int

    def as_value(self) -> dict[str, Any]:
        return {
            "t": "digest",
            "dtype": self.dtype,
            "shape": list(self.shape),
            "blind": f"{self.blind:016x}",
            "ordered": f"{self.ordered:016x}",
        }

    @classmethod
    def from_value(cls, value: dict[str, Any]) -> Digest:
        return cls(value["dtype"], tuple(value["shape"]), int(value["blind"], 16), int(value["ordered"], 16))


def digest_words(words: np.ndarray, start: int = 0) -> tuple[int, int]:
    """(blind, ordered) of a flat array of unsigned words whose first has the position ``start``.

    Digests of consecutive pieces combine: xor the blind parts, add the ordered parts modulo 2**64.
    Raises: ValueError for an array that is not flat or not of unsigned 1, 2, 4 or 8-byte words.
    """
    if words.ndim != 1 or words.dtype.kind != "u":
        raise ValueError(f"flat unsigned words needed, got {words.dtype} with shape {words.shape}")
    signed = words.view(f"i{words.dtype.itemsize}")
    blind = int(np.bitwise_xor.reduce(signed)) if words.size else 0
    ordered = 0
    keys = np.arange(1, min(CHUNK, words.size) + 1, dtype=np.uint64) * GOLDEN
    with np.errstate(over="ignore"):
        for low in range(0, words.size, CHUNK):
            part = words[low : low + CHUNK]
            x = keys[: part.size] + np.uint64(start + low) * GOLDEN
            x ^= part
            x ^= x >> np.uint64(30)
            x *= MUL1
            x ^= x >> np.uint64(27)
            x *= MUL2
            x ^= x >> np.uint64(31)
            ordered = (ordered + int(np.add.reduce(x))) & 0xFFFFFFFFFFFFFFFF
    return blind & 0xFFFFFFFFFFFFFFFF, ordered


def digest_array(words: np.ndarray, dtype: str, shape: tuple[int, ...]) -> Digest:
    """Digest of contiguous words that belong to a tensor of this dtype and shape."""
    blind, ordered = digest_words(words.reshape(-1))
    return Digest(dtype, tuple(shape), blind, ordered)
