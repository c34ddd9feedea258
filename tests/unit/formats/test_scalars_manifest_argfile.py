"""Exact scalars and their distances; manifests; argument files."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_det.errors import FormatError
from megatron_det.formats import manifest, scalars
from megatron_det.formats.argfile import expand_argument_files


def f32(number: float) -> dict:
    return scalars.from_bits("f32", int(np.float32(number).view(np.uint32)))


@given(st.floats(allow_nan=True, width=64))
def test_python_floats_keep_their_bits(number):
    value = scalars.of_python(number)
    assert bytes.fromhex(value["bits"]) == struct.pack(">d", number)


def test_ulp():
    one = f32(1.0)
    next_up = f32(float(np.nextafter(np.float32(1), np.float32(2))))
    assert scalars.ulp_distance(one, next_up) == 1
    assert scalars.ulp_distance(one, one) == 0
    assert scalars.ulp_distance(f32(0.0), f32(-0.0)) == 1, "signed zeros are different bits"
    assert scalars.ulp_distance(f32(-1e-45), f32(1e-45)) == 3
    assert scalars.ulp_distance(one, f32(math.nan)) is None
    assert scalars.ulp_distance(one, scalars.of_python(1.0)) is None, "kinds differ"
    assert scalars.ulp_distance(scalars.from_bits("bf16", 0x3F80), scalars.from_bits("bf16", 0x3F82)) == 2


def test_kinds():
    assert scalars.from_bits("bf16", 0x3F80)["dec"] == "1.0"
    assert scalars.from_bits("f16", 0x3C00)["dec"] == "1.0"
    assert scalars.of_python(True)["t"] == "bool"
    assert scalars.of_python(-1)["bits"] == "f" * 16
    assert scalars.of_python([1, 2]) == {"t": "list", "of": "i64", "items": [1, 2]}
    assert scalars.of_python(None) == {"t": "none"}
    with pytest.raises(TypeError):
        scalars.of_python(object())


def sample(**changes):
    return {"active": True, "level": "run", "device": "x", "waived": [], "chaos": None,
            "sections": {"env": {"A": "1"}, "info": {"host": "h"}}, **changes}  # fmt: skip


def test_manifest_round_trip_and_comparison(tmp_path):
    manifest.write(tmp_path, 0, sample())
    read = manifest.read(tmp_path, 0)
    assert manifest.compare(read, sample()) == []
    other = sample(level="placement", chaos="flip-bit", sections={"env": {"A": "2"}, "info": {"host": "elsewhere"}})
    found = [(d.section, d.key) for d in manifest.compare(read, other)]
    assert found == [("run", "level"), ("env", "A")], "info and chaos are never compared"


def test_manifest_damage(tmp_path):
    manifest.write(tmp_path, 0, sample())
    path = manifest.manifest_path(tmp_path, 0)
    path.write_text(path.read_text().replace('"A": "1"', '"A": "3"'))
    with pytest.raises(FormatError, match="DET-MANIFEST-DAMAGED"):
        manifest.read(tmp_path, 0)
    with pytest.raises(FormatError, match="DET-MANIFEST-MISSING"):
        manifest.read(tmp_path, 1)


def test_argument_files(tmp_path):
    file = tmp_path / "x.args"
    file.write_text("--a 1  # comment\n\n# all\n--b\n")
    assert expand_argument_files(["x", f"@{file}", "@", "y"]) == ["x", "--a", "1", "--b", "@", "y"]
    file.write_text("@other")
    for word in (f"@{file}", "@nowhere.args"):
        with pytest.raises(FormatError, match="DET-ARGFILE"):
            expand_argument_files([word])
