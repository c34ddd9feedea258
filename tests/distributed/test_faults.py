"""Injected faults: ``verify`` must exit 1 and name the right thing. Each is a fault that people really met."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.training]

RUNS = ["--iters", "4", "--resume-at", "2"]
TWO_ARMS = [*RUNS, "--fail-fast"]


def first_difference(verdict):
    assert verdict.code == 1, verdict.output
    assert verdict.json["verdict"] == "differs"
    return verdict.json["first_difference"]


def test_flipped_bit_in_one_weight_on_one_rank(launch, verify):
    fault = "b:flip-bit:iteration=3,rank=1,param=layers.1.mlp.linear_fc1.weight,bit=3"
    found = first_difference(verify([*TWO_ARMS, "--chaos", fault], launch(2, "gpt")))
    assert (found["arm"], found["iteration"], found["rank"]) == ("b", 3, 1)
    assert "layers.1.mlp.linear_fc1.weight" in found["quantity"]
    assert found["cause"] == "state differs"


def test_skipped_rng_restore(launch, verify):
    found = first_difference(
        verify([*RUNS, "--runs", "1", "--fail-fast", "--chaos", "resumed:skip-rng-restore"], launch(2, "gpt"))
    )
    assert (found["arm"], found["iteration"]) == ("resumed", 3)
    assert found["quantity"].startswith("rng/")
    assert found["cause"] == "RNG differs"


def test_dropped_moments_though_the_first_loss_is_equal(launch, verify):
    verdict = verify(
        [*RUNS, "--runs", "1", "--fail-fast", "--chaos", "resumed:drop-moments:iteration=3"], launch(2, "gpt")
    )
    found = first_difference(verdict)
    assert (found["arm"], found["iteration"]) == ("resumed", 3)
    assert found["quantity"].startswith("state/exp_avg")
    assert "num/loss/lm loss" not in found["all_quantities"], "the first resumed loss is equal: that is the trap"


def test_one_swapped_sample(launch, verify):
    found = first_difference(verify([*TWO_ARMS, "--chaos", "b:swap-sample:iteration=3,rank=0"], launch(2, "gpt")))
    assert (found["arm"], found["iteration"], found["rank"]) == ("b", 3, 0)
    assert found["quantity"].startswith("data/mb0/")
    assert found["cause"] == "data differ"


def test_learning_rate_of_one_rank_off_by_one_step(launch, verify):
    found = first_difference(verify([*TWO_ARMS, "--chaos", "b:lr-off:iteration=4,rank=1"], launch(2, "gpt")))
    assert (found["arm"], found["iteration"], found["rank"]) == ("b", 4, 1)
    assert found["quantity"].startswith("state/lr/")
    assert found["cause"] == "state differs"
    assert found["ulp"] > 0
