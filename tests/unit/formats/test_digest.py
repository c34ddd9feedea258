"""The digest's definition, its properties, and golden values that pin it for every later kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from megatron_det.formats import digest
from megatron_det.formats.digest import Digest, digest_array, digest_words

MASK = 2**64 - 1
SIZES = (1, 2, 4, 8)


def by_the_text(words: np.ndarray) -> tuple[int, int]:
    """The definition in the docstring, word by word in Python integers."""
    bits = 8 * words.dtype.itemsize
    blind = ordered = 0
    for i, word in enumerate(int(w) for w in words):
        blind ^= (word - (1 << bits) if word >> (bits - 1) else word) & MASK
        x = word ^ ((i + 1) * 0x9E3779B97F4A7C15 & MASK)
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
        ordered = (ordered + (x ^ x >> 31)) & MASK
    return blind, ordered


def words_of(size: int):
    return hnp.arrays(np.dtype(f"u{size}"), st.integers(0, 40))


@pytest.mark.parametrize("size", SIZES)
def test_equals_the_text(size):
    @given(words_of(size))
    def check(words):
        assert digest_words(words) == by_the_text(words)

    check()


@pytest.mark.parametrize("size", SIZES)
def test_blind_is_torch_hash_tensor(size):
    words = np.random.default_rng(size).integers(0, 2 ** (8 * size) - 1, 1001, dtype=f"u{size}", endpoint=True)
    theirs = torch.hash_tensor(torch.from_numpy(words.view(f"i{size}").copy())).view(torch.int64).item() & MASK
    assert digest_words(words)[0] == theirs


def test_golden_values():
    """A change here is a change of the format: raise the schema."""
    words = np.arange(10, dtype=np.uint32)
    assert [f"{n:016x}" for n in digest_words(words)] == ["0000000000000001", "6c39d4b171b44974"]
    assert digest_words(np.zeros(0, np.uint8)) == (0, 0)


@given(words_of(4).filter(lambda w: w.size > 0), st.data())
def test_every_flipped_bit_is_seen_by_both(words, data):
    at = data.draw(st.integers(0, words.size - 1))
    other = words.copy()
    other[at] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    before, after = digest_words(words), digest_words(other)
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_order_is_seen_by_ordered_only():
    rows = np.random.default_rng(0).integers(0, 2**16, (64, 32), dtype=np.uint16)
    one, other = digest_array(rows, "bfloat16", rows.shape), digest_array(rows[::-1].copy(), "bfloat16", rows.shape)
    assert one.blind == other.blind
    assert one.ordered != other.ordered


def test_pieces_combine_and_chunks_do_not_matter(monkeypatch):
    words = np.random.default_rng(1).integers(0, 2**32, 1000, dtype=np.uint32)
    whole = digest_words(words)
    left, right = digest_words(words[:333]), digest_words(words[333:], start=333)
    assert (left[0] ^ right[0], (left[1] + right[1]) & MASK) == whole
    monkeypatch.setattr(digest, "CHUNK", 7)
    assert digest_words(words) == whole


def test_refuses_what_it_is_not_defined_on():
    with pytest.raises(ValueError, match="flat unsigned"):
        digest_words(np.zeros((2, 2), np.uint8))
    with pytest.raises(ValueError, match="flat unsigned"):
        digest_words(np.zeros(2, np.int32))


def test_value_round_trip():
    value = digest_array(np.arange(6, dtype=np.uint16), "bfloat16", (2, 3))
    assert Digest.from_value(value.as_value()) == value
