"""Exact scalars: bits as big-endian hex, the decimal beside them for people, and distances in ulp."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

FLOATS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}


def from_bits(kind: str, bits: int) -> dict[str, Any]:
    """A ledger value of a float from its bit pattern. Kinds: f16, bf16, f32, f64."""
    return {"t": kind, "bits": f"{bits:0{FLOATS[kind] // 4}x}", "dec": repr(to_float(kind, bits))}


def of_python(value: Any) -> dict[str, Any]:
    """A ledger value of a Python float (f64), int, bool, str or None; a list of ints becomes a list value."""
    if value is None:
        return {"t": "none"}
    if isinstance(value, bool):
        return {"t": "bool", "bits": str(int(value)), "dec": str(value)}
    if isinstance(value, (int, np.integer)):
        return {"t": "i64", "bits": f"{int(value) & (2**64 - 1):016x}", "dec": str(int(value))}
    if isinstance(value, (float, np.floating)):
        return from_bits("f64", int.from_bytes(struct.pack(">d", float(value)), "big"))
    if isinstance(value, str):
        return {"t": "str", "text": value}
    if isinstance(value, (list, tuple)):
        return {"t": "list", "of": "i64", "items": [int(item) for item in value]}
    raise TypeError(f"no exact ledger value for {type(value).__name__}")


def to_float(kind: str, bits: int) -> float:
    if kind == "f64":
        return float(struct.unpack(">d", bits.to_bytes(8, "big"))[0])
    if kind == "bf16":
        kind, bits = "f32", bits << 16
    form = ">f" if kind == "f32" else ">e"
    return float(struct.unpack(form, bits.to_bytes(FLOATS[kind] // 8, "big"))[0])


def ulp_distance(a: dict[str, Any], b: dict[str, Any]) -> int | None:
    """How many representable numbers lie between two floats of one kind (-0 and +0: 1 apart). None where that has
    no meaning: other kinds, or a NaN."""
    kind = a.get("t")
    if kind not in FLOATS or b.get("t") != kind:
        return None
    width = FLOATS[kind]
    x, y = int(a["bits"], 16), int(b["bits"], 16)
    if any(np.isnan(to_float(kind, bits)) for bits in (x, y)):
        return None
    return abs(_ordinal(x, width) - _ordinal(y, width))


def _ordinal(bits: int, width: int) -> int:
    """Integers in the order of the floats, -0 directly below +0."""
    sign = 1 << (width - 1)
    return bits if bits < sign else sign - 1 - bits


def show(value: dict[str, Any]) -> str:
    """For people: hex and decimal of a scalar, both halves of a digest."""
    kind = value.get("t")
    if kind == "digest":
        shape = "x".join(str(n) for n in value["shape"]) or "scalar"
        return f"{value['dtype']}[{shape}] {value['ordered']} ({value['blind']})"
    if kind == "none":
        return "absent"
    if kind == "str":
        return repr(value["text"])
    if kind == "list":
        return str(value["items"])
    return f"0x{value['bits']} ({value['dec']})"
