"""Values of a piece's state as JSON and back, exactly and without pickle.

Carried: None, bool, int, str, float (as hex), bytes, list, tuple, dict, NumPy scalars and arrays, torch tensors.
Anything else is refused by name: what cannot be written without pickle cannot be read without running its code.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch

from megatron_det.errors import CheckpointError
from megatron_det.kernels.fingerprint import words

MARK = "~"


def pack(value: Any) -> Any:
    """Raises: CheckpointError (DET-PIECE-STATE) for a type that is not carried."""
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, float):
        return {MARK: "float", "hex": float(value).hex()}
    if isinstance(value, (list, tuple)):
        items = [pack(item) for item in value]
        return items if isinstance(value, list) else {MARK: "tuple", "items": items}
    if isinstance(value, dict):
        if MARK not in value and all(isinstance(key, str) for key in value):
            return {key: pack(item) for key, item in value.items()}
        return {MARK: "dict", "items": [[pack(key), pack(item)] for key, item in value.items()]}
    return _pack_bytes(value)


def _pack_bytes(value: Any) -> dict[str, Any]:
    if isinstance(value, bytes):
        return {MARK: "bytes", "data": _text(value)}
    if isinstance(value, torch.Tensor):
        flat = words(value.cpu()).numpy()
        kind = str(value.dtype).removeprefix("torch.")
        return {MARK: "tensor", "dtype": kind, "shape": list(value.shape), "data": _text(flat.tobytes())}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        array = np.ascontiguousarray(value)
        kind, shape = array.dtype.str, list(np.shape(value))
        return {MARK: "array", "dtype": kind, "shape": shape, "scalar": isinstance(value, np.generic),
                "data": _text(array.tobytes())}  # fmt: skip
    raise CheckpointError.of(
        "DET-PIECE-STATE", "state of a piece", found=f"a value of type {type(value).__module__}.{type(value).__name__}",
        needed="numbers, text, bytes, lists, dictionaries, arrays and tensors",
        why="Nothing is saved that would need pickle to be read.", do="give the piece a state made of these.",
    )  # fmt: skip


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def unpack(value: Any) -> Any:
    """Raises: ValueError for a mark that is not known."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    mark = value.get(MARK)
    if mark is None:
        return {key: unpack(item) for key, item in value.items()}
    if mark == "float":
        return float.fromhex(value["hex"])
    if mark == "tuple":
        return tuple(unpack(item) for item in value["items"])
    if mark == "dict":
        return {unpack(key): unpack(item) for key, item in value["items"]}
    data = bytearray(base64.b64decode(value["data"]))
    if mark == "bytes":
        return bytes(data)
    if mark == "array":
        array = np.frombuffer(data, dtype=np.dtype(value["dtype"])).reshape(value["shape"])
        return array[()] if value["scalar"] else array
    if mark == "tensor":
        return _tensor(value, data)
    raise ValueError(f"unknown mark {mark!r}")


def _tensor(value: dict[str, Any], data: bytearray) -> torch.Tensor:
    dtype = getattr(torch, value["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {value['dtype']!r}")
    if not data:
        return torch.empty(value["shape"], dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(value["shape"])
