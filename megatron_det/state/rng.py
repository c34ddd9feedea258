"""RNG streams: Python, NumPy, torch CPU, the device's default generator, and Megatron's named tracker streams.

Captured as JSON (no pickle), per *global* rank: Megatron 0.19.2 saves one rank per (pp, tp) and gives its expert
stream to every expert-parallel peer.
"""

from __future__ import annotations

import base64
import random
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel

from megatron_det.errors import CheckpointError
from megatron_det.formats.digest import digest_array
from megatron_det.state.piece import Here

State = dict[str, Any]


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.detach().cpu().contiguous().numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _tracker_tensors() -> dict[str, torch.Tensor]:
    states = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        name: tensor_parallel.convert_cuda_rng_state(state, to_graphable=False)
        for name, state in sorted(states.items())
    }


def capture() -> dict[str, State]:
    """All streams of this process: piece name -> JSON-safe state."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    pieces: dict[str, State] = {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "kind": numpy_state["bit_generator"],
            "words": [int(word) for word in numpy_state["state"]["key"]],
            "position": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]).hex(),
        },
        "torch_cpu": {"bytes": _encode(torch.get_rng_state())},
        "cuda": {"bytes": _encode(torch.cuda.get_rng_state())},
    }
    for name, state in _tracker_tensors().items():
        pieces[f"tracker/{name}"] = {"bytes": _encode(state)}
    return pieces


def restore(pieces: dict[str, State]) -> None:
    """Puts all streams back. Raises: CheckpointError when the tracker's streams are not the ones that were saved."""
    mine = {f"tracker/{name}" for name in tensor_parallel.get_cuda_rng_tracker().get_states()}
    saved = {name for name in pieces if name.startswith("tracker/")}
    if mine != saved:
        raise CheckpointError.of(
            "DET-RNG-STREAMS", "RNG streams", found=f"saved {sorted(saved)}, this run has {sorted(mine)}",
            needed="the same named streams", why="A stream without its state would draw other numbers.",
            do="resume with the parallel layout that was saved.",
        )  # fmt: skip
    python, numpy_state = pieces["python"], pieces["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    np.random.set_state(
        (
            numpy_state["kind"],
            np.array(numpy_state["words"], dtype=np.uint32),
            numpy_state["position"],
            numpy_state["has_gauss"],
            float.fromhex(numpy_state["gauss"]),
        )
    )
    torch.set_rng_state(_decode(pieces["torch_cpu"]["bytes"]))
    torch.cuda.set_rng_state(_decode(pieces["cuda"]["bytes"]))
    tracker = tensor_parallel.get_cuda_rng_tracker()
    graphable = tensor_parallel.is_graph_safe_cuda_rng_tracker(tracker)
    tracker.set_states(
        {
            name.removeprefix("tracker/"): tensor_parallel.convert_cuda_rng_state(
                _decode(pieces[name]["bytes"]), to_graphable=graphable
            )
            for name in sorted(saved)
        }
    )


def value(piece: State) -> dict[str, Any]:
    """The ledger value (a digest) of one captured stream."""
    if "bytes" in piece:
        array = np.frombuffer(base64.b64decode(piece["bytes"]), dtype=np.uint8)
        return digest_array(array, "uint8", array.shape).as_value()
    rest = [piece.get("position", 0), piece.get("has_gauss", 0), gauss_bits(piece["gauss"])]
    array = np.array([*piece["words"], *rest], dtype=np.uint64)
    return digest_array(array, "uint64", array.shape).as_value()


def gauss_bits(gauss: float | str | None) -> int:
    """The cached Gaussian of a generator as its bits; all ones where there is none."""
    if gauss is None:
        return 2**64 - 1
    number = float.fromhex(gauss) if isinstance(gauss, str) else gauss
    return int.from_bytes(struct.pack(">d", number), "big")


class Streams:
    """All streams of this rank. Restored last: what is built before the first step draws from them."""

    name = "rng"

    def capture(self, here: Here) -> Any:
        return capture()

    def restore(self, here: Here, state: Any) -> None:
        restore(state)

    def digest(self, here: Here) -> Iterator[tuple[str, Any]]:
        for name, piece in capture().items():
            yield f"rng/{name}", value(piece)

    def describe(self) -> str:
        return "random streams of this rank; not restored, restored from a peer, or drawn from after the restore"
