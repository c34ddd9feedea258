"""The built-in pieces, in the order in which they are captured, shown and restored. RNG is last."""

from __future__ import annotations

from megatron_det.state import rng, surroundings, training
from megatron_det.state.piece import Piece

PIECES: tuple[Piece, ...] = (
    surroundings.Kernels(),
    surroundings.Autotune(),
    training.Batches(),
    surroundings.DataOrder(),
    surroundings.Loader(),
    training.Schedule(),
    training.Options(),
    training.LossScaler(),
    training.Weights(),
    training.Biases(),
    training.Counters(),
    training.Fp8(),
    training.Optimizer(),
    training.Trackers(),
    training.Rerun(),
    surroundings.PrivateGenerators(),
    rng.Streams(),
)
LOADED_BY_MEGATRON = frozenset({"schedule", "groups", "loss_scaler", "model", "router_bias", "fp8", "optimizer"})
WEIGHTS = frozenset({"model", "router_bias"})
