"""Two RNG streams on one CPU, as a machine with a GPU has them.

PyTorch has one default generator on CPU, so dropout ("device") and the data loader's base seed ("host") would move
the same stream, and a resumed run with dropout would differ for a reason that no GPU run has. Here the default
generator is the host stream; the device stream is a generator of its own, whose state is put into the default
generator for the time of a device draw.

Rule: a random operation that is given no generator draws from the *device* stream, except
* a factory (``torch.rand`` …) that was not asked for a CUDA device and is given no tensor, and
* anything inside ``host()``: the scopes are listed in ``table.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

FACTORIES = frozenset({"rand", "randn", "randint", "randperm", "normal"})
DRAW_NAMES = """
    alpha_dropout alpha_dropout_ bernoulli bernoulli_ binomial cauchy_ dropout dropout1d dropout2d dropout3d
    dropout_ _sample_dirichlet _standard_gamma exponential_ feature_alpha_dropout feature_alpha_dropout_
    feature_dropout feature_dropout_ geometric_ gru gumbel_softmax kaiming_normal_ kaiming_uniform_
    log_normal_ lstm multi_head_attention_forward multinomial native_dropout normal_ poisson rand_like
    randint_like randn_like random_ rnn_relu rnn_tanh rrelu rrelu_ scaled_dot_product_attention trunc_normal_
    uniform_ xavier_normal_ xavier_uniform_
"""
DRAWS = frozenset(DRAW_NAMES.split())


class Streams:
    """The device generator and the scopes. One object per installation of the stand-in."""

    def __init__(self) -> None:
        self.device = torch.Generator()
        self.device.set_state(torch.default_generator.get_state())
        self._host_depth = 0
        self.mode: Any = None  # the StandInMode that uses these streams

    @contextmanager
    def host(self) -> Iterator[None]:
        """Draws inside are made by host code: they move torch's default generator, as they do on a GPU machine."""
        self._host_depth += 1
        try:
            yield
        finally:
            self._host_depth -= 1

    def is_device_draw(self, name: str, kwargs: dict[str, Any], on_device: bool) -> bool:
        """The rule above, for one torch function by its name."""
        if self._host_depth or kwargs.get("generator") is not None:
            return False
        return name in DRAWS or (name in FACTORIES and on_device)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """For the time of one device draw, torch's default generator has the device stream's state."""
        host_state = torch.default_generator.get_state()
        torch.default_generator.set_state(self.device.get_state())
        try:
            yield
        finally:
            self.device.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(host_state)
