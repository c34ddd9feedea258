"""Evidence, not flags: small experiments that show that a switch is honoured. A few milliseconds each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megatron_det.errors import Finding
from megatron_det.kernels.fingerprint import digest_tensor


@dataclass(frozen=True)
class Probe:
    """``holds`` is the experiment; it is run with torch's deterministic algorithms on."""

    code: str
    what: str
    holds: Callable[[], bool]
    why: str


def refuses_nondeterministic_op() -> bool:
    """``put_`` without accumulation has no deterministic implementation: torch must raise."""
    tensor = torch.zeros(4)
    try:
        tensor.put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
    except RuntimeError:
        return True
    return False


def scatter_repeats() -> bool:
    """``index_put_`` with accumulation and heavy collisions, on several threads, gives the same bits 8 times. (Without
    the switch this is a real source of nondeterminism on CPU.)"""
    threads = torch.get_num_threads()
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(20_000, generator=generator)
    index = torch.randint(0, 50, (20_000,), generator=generator)
    try:
        torch.set_num_threads(2)
        seen = {digest_tensor(torch.zeros(50).index_put_((index,), values, accumulate=True)) for _ in range(8)}
    finally:
        torch.set_num_threads(threads)
    return len(seen) == 1


PROBES = (
    Probe("DET-PROBE-RAISES", "deterministic algorithms: refusal", refuses_nondeterministic_op,
          "torch let an operation through that has no deterministic implementation."),
    Probe("DET-PROBE-SCATTER", "deterministic algorithms: index_put_", scatter_repeats,
          "Accumulating index_put_ gave other bits in 8 trials."),
)  # fmt: skip


def run() -> Iterator[Finding]:
    """Findings of the probes that fail. Expects the switches to be set already."""
    for probe in PROBES:
        if not probe.holds():
            yield Finding(
                probe.code, probe.what, "not honoured", "a switch that works", probe.why,
                "use a torch build that honours torch.use_deterministic_algorithms.",
            )  # fmt: skip
