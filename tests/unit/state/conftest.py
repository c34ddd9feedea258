"""Named streams on the stand-in, and process-wide state that pieces look at, put back afterwards."""

from __future__ import annotations

import pytest
import torch
from megatron.core import num_microbatches_calculator as calculator
from megatron.core import tensor_parallel
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from megatron_det import devices


@pytest.fixture
def streams():
    if torch.cuda.is_available():
        pytest.skip("written for machines without a GPU; on a GPU the real streams are tried by the training tests")
    standin = devices.install()
    tracker = tensor_parallel.get_cuda_rng_tracker()
    before = tracker.get_states()
    tracker.reset()
    tracker.add("model-parallel-rng", 11)
    tracker.add("expert-parallel-rng", 12)
    yield tracker
    tracker.reset()
    tracker.set_states(before)
    standin.undo()


@pytest.fixture
def process(streams):
    """Process-wide state that pieces look at, put back afterwards."""
    calculator.init_num_microbatches_calculator(0, None, 8, 2, 2)
    get_moe_metrics_tracker()._metrics.clear()
    yield streams
    calculator.unset_num_microbatches_calculator()
    get_moe_metrics_tracker()._metrics.clear()
    machine = get_rerun_state_machine()
    machine.max_values, machine.large_value_counts = {}, {}
