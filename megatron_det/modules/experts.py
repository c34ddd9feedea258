"""Experts: Megatron's parameters, names and checkpoints, computed one by one or all in one go, with the same bits.

Replaces  the ``forward`` of ``SequentialMLP``; ``--moe-grouped-gemm``, ignored by Megatron's local layers, is honoured
Why       the gradients of probabilities and biases are torch sums there, and fused activations are compiled
Order     ``kernels/expert_linear.py``; each expert sees its own rows only
Level     run: the matmuls are the vendor's. Probabilities and biases: placement
Reaches   plain and gated activations, clamp and offset, biases, probabilities on the input (k = 1)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP

from megatron_det.errors import Finding, Refused
from megatron_det.kernels import expert_linear


def refusals(config: Any) -> Iterator[Finding]:
    """What these experts do not compute, by the name of the flag. ``config``: a ``TransformerConfig``."""
    cases = [
        (config.use_te_activation_func, "--use-te-activation-func", "Transformer Engine's are not examined."),
        (config.activation_func_fp8_input_store, "--activation-func-fp8-input-store",
         "The activation's input would be rounded to fp8 between forward and backward."),
        (config.gradient_accumulation_fusion, "gradient_accumulation_fusion",
         "The experts' weight gradients are written by torch, and not into main_grad."),
        (config.moe_latent_size, "--moe-latent-size", "The projections around the experts are Transformer Engine's."),
    ]  # fmt: skip
    for found, what, why in cases:
        if found:
            yield Finding("DET-EXPERTS", what, str(found), "off", why, "leave the flag out.")


class DetExperts(SequentialMLP):
    """Shapes: rows [R, H] by local expert, tokens_per_expert [E] on the host, probs [R] -> [R, H].

    ``runs`` counts ``grouped`` and ``sequential``. Raises: Refused from ``refusals``.
    """

    def __init__(self, num_local_experts: int, config: Any, *args: Any, **kwargs: Any) -> None:
        findings = list(refusals(config))
        if findings:
            raise Refused(*findings)
        super().__init__(num_local_experts, config, *args, **kwargs)
        self.runs: Counter[str] = Counter()

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        x, probs = permuted_local_hidden_states, permuted_probs
        if self.config.moe_apply_probs_on_input:
            x, probs = expert_linear.scaled(x, probs), torch.ones_like(probs)
        counts = tokens_per_expert.tolist()
        if self.config.moe_grouped_gemm:
            self.runs["grouped"] += 1
            return self._compute(x, counts, probs, list(self.local_experts)), None
        self.runs["sequential"] += 1
        parts = zip(torch.split(x, counts), counts, torch.split(probs, counts), self.local_experts, strict=True)
        done = [self._compute(rows, [count], share, [expert]) for rows, count, share, expert in parts]
        return torch.cat(done), None

    def _compute(
        self, x: torch.Tensor, counts: list[int], probs: torch.Tensor, experts: list[torch.nn.Module]
    ) -> torch.Tensor:
        first, second = ([getattr(expert, name) for expert in experts] for name in ("linear_fc1", "linear_fc2"))
        inner = _linear(x, counts, first)
        inner = expert_linear.scaled(self._activated(inner), probs)
        out = expert_linear.linear(inner, counts, [layer.weight for layer in second])
        if second[0].bias is None:
            return out
        bias = expert_linear.biases(counts, [layer.bias for layer in second])
        return out + expert_linear.scaled(bias, probs)

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise. Shapes: [R, 2 F] gated, else [R, F] -> [R, F]."""
        config = self.config
        if not config.gated_linear_unit:
            return config.activation_func(x)
        gate, value = torch.chunk(x, 2, dim=-1)
        most = config.activation_func_clamp_value
        if most is not None:
            gate, value = gate.clamp(max=most), value.clamp(min=-most, max=most)
        return config.activation_func(gate) * (value + config.glu_linear_offset)


def _linear(x: torch.Tensor, counts: list[int], layers: list[Any]) -> torch.Tensor:
    out = expert_linear.linear(x, counts, [layer.weight for layer in layers])
    return out if layers[0].bias is None else out + expert_linear.biases(counts, [layer.bias for layer in layers])
