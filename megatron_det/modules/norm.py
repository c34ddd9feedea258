"""RMSNorm and LayerNorm for every place of a spec that asks for Megatron's ``LayerNormBuilder``.

Replaces  ``WrappedTorchNorm`` (local), ``FusedLayerNorm`` (Apex), ``TENorm`` where it stands alone
Why       the weight's gradient is added in the order of ``kernels/norm.py``; torch's on CPU changes with the number of
          threads, Apex's and TE's are not written down. ``WrappedTorchNorm`` refuses sequence parallel and gamma
          around zero; this serves both
Level     placement
Source    ``megatron.core.transformer.torch_norm``, 0.19.2 (interface only)
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_det.errors import Refused
from megatron_det.kernels.norm import Norm


class DetNorm(torch.nn.Module):
    """``config.normalization`` says which. Shapes: [..., hidden_size] -> the same, in the type of the input.

    Parameters are in torch's default type, as Megatron's are; its wrapper converts them. ``runs`` counts forwards.
    Raises: Refused for a normalization other than RMSNorm and LayerNorm.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> None:
        super().__init__()
        if config.normalization not in ("RMSNorm", "LayerNorm"):
            raise Refused.of(
                "DET-NORM",
                f"--normalization {config.normalization}",
                found=config.normalization,
                needed="RMSNorm or LayerNorm",
                why="No order is written down for another one.",
                do="choose --normalization RMSNorm.",
            )
        self._set(config, eps)
        start = torch.zeros if self.zero_centred else torch.ones
        self.weight = torch.nn.Parameter(start(hidden_size))
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size)) if self.centred else None
        self._mark()

    def _set(self, config: TransformerConfig, eps: float) -> None:
        self.config = config
        self.eps = eps
        self.centred = config.normalization == "LayerNorm"
        self.zero_centred = config.layernorm_zero_centered_gamma
        self.runs: Counter[str] = Counter()

    def _mark(self) -> None:
        for parameter in self.parameters():  # Megatron adds these gradients over the tensor-parallel ranks
            parameter.sequence_parallel = self.config.sequence_parallel

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.fill_(0.0 if self.zero_centred else 1.0)
            if self.bias is not None:
                self.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs["layer" if self.centred else "rms"] += 1
        result: Any = Norm.apply(x, self.weight, self.bias, self.eps, self.centred, self.zero_centred)
        return result

    def extra_repr(self) -> str:
        kind = "LayerNorm" if self.centred else "RMSNorm"
        return f"{kind}, {self.weight.shape[0]}, eps={self.eps}, zero_centred={self.zero_centred}"


def take_over_norm(module: torch.nn.Module, config: TransformerConfig) -> bool:
    """Turns a norm of torch's into ours, in place, where a spec cannot reach (``TransformerBlock``'s final norm).

    False: not one of the two classes, or without weights.
    """
    kind = {torch.nn.RMSNorm: "RMSNorm", torch.nn.LayerNorm: "LayerNorm"}.get(type(module))
    if kind is None or kind != config.normalization or config.layernorm_zero_centered_gamma or module.weight is None:
        return False
    eps: Any = module.eps
    module.__class__ = DetNorm
    if kind == "RMSNorm":
        module.bias = None
    module._set(config, eps)
    module._mark()
    return True
