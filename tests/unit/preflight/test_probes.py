"""The probes hold with torch's switch on, and at least one of them sees that it is off."""

from __future__ import annotations

import pytest
import torch

from megatron_det.activation import switches
from megatron_det.errors import GuaranteeBroken
from megatron_det.preflight import probes


def test_hold_with_the_switch_on_and_fail_with_it_off():
    undo = switches.set_all(debug=False)
    try:
        assert list(probes.run()) == []
    finally:
        undo()
    assert not torch.are_deterministic_algorithms_enabled()
    assert "DET-PROBE-RAISES" in [finding.code for finding in probes.run()]


def test_switches_are_undone():
    before = (torch.backends.cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory)
    switches.set_all(debug=True)()
    assert (torch.backends.cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory) == before


@pytest.mark.parametrize(
    "turn",
    [
        lambda: torch.use_deterministic_algorithms(False),
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", True),
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
    ],
)
def test_a_turned_switch_is_seen_before_the_next_step(turn):
    undo = switches.set_all(debug=False)
    check = switches.check(debug=False)
    try:
        check(1)
        turn()
        with pytest.raises(GuaranteeBroken, match="DET-SWITCH"):
            check(2)
    finally:
        undo()
