"""Every piece: corrupted, dropped, swapped between ranks, or not restored, it is named with its rank."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core import num_microbatches_calculator as calculator
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from small_rank import build, head

from megatron_det.errors import CheckpointError
from megatron_det.formats import receipt as written
from megatron_det.kernels.fingerprint import value
from megatron_det.state import digests, receipt, surroundings
from megatron_det.state import piece as register


def flip(tensor: torch.Tensor) -> None:
    tensor.detach().view(-1).view(torch.int32)[0] ^= 1


def moments(here):
    return next(iter(here.optimizer.optimizer.state.values()))


class Tuner:
    """Stands in for one of Triton's autotuners."""

    def __init__(self):
        self.configs = [SimpleNamespace(all_kwargs=lambda n=n: {"BLOCK": n}) for n in (16, 32)]
        self.cache = {("torch.bfloat16", 128): self.configs[0]}


@pytest.fixture
def rank(process, monkeypatch):
    tuner = Tuner()
    monkeypatch.setattr("megatron_det.state.surroundings.tuners", lambda: [("kernels.op", tuner)])
    here = build()
    here.tuner = tuner
    return here


@pytest.fixture
def two(rank, tmp_path):
    """Receipts of two ranks and their index, as a save writes them."""
    documents = [receipt.take(rank, head(0))]
    rank1 = build(1)
    documents.append(receipt.take(rank1, head(1)))
    summaries = [written.summary(d, {}) for d in documents]
    for document in documents:
        written.write_sealed(written.rank_path(tmp_path, document["rank"]), document)
    written.write_sealed(written.index_path(tmp_path), written.make_index(documents[0], summaries))
    return tmp_path, documents


# piece -> how its state in memory is spoiled, and the entry that must be named
SPOILED = {
    "kernels": (lambda h: setattr(h.args, "attention_backend", "flash"), "choice/attention_backend"),
    "autotune": (lambda h: h.tuner.cache.update({("torch.bfloat16", 128): h.tuner.configs[1]}), "autotune/kernels.op"),
    "batches": (lambda h: setattr(h.args, "consumed_train_samples", 24), "samples/consumed_train_samples"),
    "loader": (lambda h: setattr(h.data, "position", 0), "loader/state"),
    "schedule": (lambda h: setattr(h.scheduler, "num_steps", 32), "scheduler/num_steps"),
    "groups": (lambda h: h.optimizer.optimizer.param_groups[0].update(lr=0.2), "lr/group0"),
    "loss_scaler": (lambda h: h.optimizer.grad_scaler.update(True), "grad_scaler/"),
    "model": (lambda h: flip(h.model[0].gate.weight), "param/gate.weight"),
    "router_bias": (lambda h: flip(h.model[0].expert_bias), "buffer/expert_bias"),
    "router_counters": (lambda h: h.model[0].local_tokens_per_expert.zero_(), "counter/local_tokens_per_expert"),
    "optimizer": (lambda h: flip(moments(h)["exp_avg"]), "exp_avg/"),
    "trackers": (lambda h: get_moe_metrics_tracker().clear(), "moe/load_balancing_loss"),
    "rerun": (lambda h: get_rerun_state_machine().max_values.clear(), "max_values/loss"),
    "generators": (lambda h: h.model[0].noise.manual_seed(1), "generator/model/noise"),
    "rng": (lambda h: random.random(), "rng/python"),
}
OURS = ("autotune", "loader", "router_counters", "trackers", "rerun", "generators", "rng")  # captured and restored


@pytest.mark.parametrize("name", SPOILED)
def test_what_differs_in_memory_is_named(rank, name):
    """Corrupted, or a restore that was skipped: both leave memory unlike the receipt."""
    document = receipt.take(rank, head(3))
    assert receipt.check(rank, document) == [], "the control: nothing was touched"
    SPOILED[name][0](rank)
    wrong = receipt.check(rank, document)
    assert {(one.piece, one.rank) for one in wrong} == {(name, 3)}
    assert any(one.name.startswith(SPOILED[name][1]) for one in wrong), [one.name for one in wrong]
    assert all(one.saved != one.found and one.cause for one in wrong)
    table = written.table(wrong)
    assert name in table
    assert wrong[0].cause in table


@pytest.mark.parametrize("name", OURS)
def test_what_is_ours_comes_back_and_a_skipped_restore_is_named(rank, name):
    document = receipt.take(rank, head(0))
    SPOILED[name][0](rank)
    receipt.restore(rank, document, leave={name})
    assert {one.piece for one in receipt.check(rank, document)} == {name}
    receipt.restore(rank, document)
    assert receipt.check(rank, document) == []


@pytest.mark.parametrize("name", [*SPOILED, "fp8"])
def test_a_piece_dropped_from_the_file_is_refused(two, name):
    folder, documents = two
    document = copy.deepcopy(documents[1])
    document["pieces"] = [piece for piece in document["pieces"] if piece["name"] != name]
    written.write_sealed(written.rank_path(folder, 1), document)
    wrong = written.against_index(written.read_sealed(written.index_path(folder)), written.read_rank(folder, 1, 5))
    assert [(one.piece, one.rank, one.found) for one in wrong] == [(name, 1, "absent")]


@pytest.mark.parametrize("name", SPOILED)
def test_a_piece_of_another_rank_is_named(two, name):
    """Swapped between ranks and sealed again: the file is whole by itself, the index knows better."""
    documents = two[1]
    mine, theirs = ({p["name"]: p for p in d["pieces"]} for d in documents)
    if written.piece_seal(mine[name]) == written.piece_seal(theirs[name]):
        assert name in ("kernels", "autotune"), "equal on both ranks by nature"
        return
    document = {**documents[1], "pieces": [mine[name] if p["name"] == name else p for p in documents[1]["pieces"]]}
    wrong = written.against_index(
        written.make_index(documents[0], [written.summary(d, {}) for d in documents]), document
    )
    assert [(one.piece, one.rank, one.cause) for one in wrong] == [(name, 1, "this is the piece of rank 0")]


def test_whole_kinds_have_their_own_cause(rank):
    document = receipt.take(rank, head(0))
    for state in rank.optimizer.optimizer.state.values():
        state["exp_avg"].zero_()
    assert {one.cause for one in receipt.check(rank, document)} == {"the optimizer's moments were not restored"}
    rank.optimizer.optimizer.state.clear()
    assert {one.found for one in receipt.check(rank, document)} == {"absent"}


def test_weights_alone(rank):
    """--no-load-optim: moments may differ, weights may not."""
    document = receipt.take(rank, head(0))
    rank.optimizer.optimizer.state.clear()
    only = receipt.loaded_by_megatron(True)
    assert receipt.check(rank, document, only) == []
    flip(rank.model[0].gate.bias)
    assert [one.name for one in receipt.check(rank, document, only)] == ["param/gate.bias"]


class Curriculum:
    name = "curriculum"

    def __init__(self):
        self.stage = 1

    def capture(self, here):
        return {"stage": self.stage}

    def restore(self, here, state):
        self.stage = state["stage"]

    def digest(self, here):
        yield "curriculum/stage", value(self.stage)

    def describe(self):
        return "the stage of the curriculum; it began anew"


@pytest.fixture
def curriculum():
    piece = Curriculum()
    register.register(piece)
    yield piece
    register.unregister(piece.name)


def test_users_add_pieces(rank, curriculum):
    assert [piece.name for piece in register.pieces()][-2:] == ["curriculum", "rng"], "RNG stays last"
    curriculum.stage = 4
    document = receipt.take(rank, head(0))
    curriculum.stage = 1
    wrong = receipt.check(rank, document)
    assert [(one.piece, one.name, one.cause) for one in wrong] == [("curriculum", "curriculum/stage", "it began anew")]
    receipt.restore(rank, document)
    assert curriculum.stage == 4
    with pytest.raises(CheckpointError, match="DET-PIECE-NAME"):
        register.register(Curriculum())
    register.unregister("curriculum")
    with pytest.raises(CheckpointError, match="DET-PIECE-UNKNOWN"):
        receipt.restore(rank, document)


def test_state_that_needs_pickle_is_refused(rank, curriculum, monkeypatch):
    monkeypatch.setattr(curriculum, "capture", lambda here: {"file": object()})
    with pytest.raises(CheckpointError, match=r"DET-PIECE-STATE.*builtins\.object"):
        receipt.take(rank, head(0))


def test_two_entries_of_one_name_are_refused(rank, curriculum, monkeypatch):
    monkeypatch.setattr(curriculum, "digest", lambda here: [("a", 1), ("a", 1)])
    with pytest.raises(CheckpointError, match="DET-PIECE-TWICE"):
        receipt.take(rank, head(0))


def test_triton_s_own_autotuner(process):
    """The winner comes back through JSON, and a warm-up that time decides otherwise is seen."""
    from tuned_kernel import scale

    assert ("tuned_kernel.scale", scale) in surroundings.tuners()
    scale.cache[(128, "torch.bfloat16")] = scale.configs[1]
    document = written.plain(receipt.take(build(), head(0), only={"autotune"}))
    here = build()
    scale.cache.clear()
    assert [one.piece for one in receipt.check(here, document, {"autotune"})] == ["autotune"]
    receipt.restore(here, document)
    assert receipt.check(here, document, {"autotune"}) == []
    assert scale.cache[(128, "torch.bfloat16")] is scale.configs[1]
    scale.cache[(128, "torch.bfloat16")] = scale.configs[0]
    wrong = receipt.check(here, document, {"autotune"})
    assert "tuned_kernel.scale" in wrong[0].name
    scale.cache.clear()


class Blend:
    """As Megatron's data sets hold their order."""

    def __init__(self, seed: int, size: int = 50) -> None:
        order = np.random.RandomState(seed)
        self.shuffle_index = order.permutation(size)
        self.dataset_index = order.randint(0, 3, size).astype(np.int16)
        self.datasets = [SimpleNamespace(sample_index=np.arange(8).reshape(4, 2))]


class MegatronSampler:
    total_samples, micro_batch_size, data_parallel_rank, data_parallel_size = 50, 2, 0, 1


def loading(seed: int, size: int = 50) -> SimpleNamespace:
    return SimpleNamespace(dataset=Blend(seed, size), batch_sampler=MegatronSampler())


def test_another_order_of_the_data_is_named(rank):
    rank.data = loading(1)
    document = receipt.take(rank, head(2), only={"data"})
    names = [name for name, _ in document["pieces"][0]["entries"]]
    assert {"index/shuffle_index", "index/dataset_index", "index/0/sample_index"} <= set(names)
    rank.data = loading(1)
    assert receipt.check(rank, document, {"data"}) == []
    rank.data = loading(2)  # another seed, or --train-iters
    wrong = receipt.check(rank, document, {"data"})
    assert (wrong[0].piece, wrong[0].rank, wrong[0].name) == ("data", 2, "index/shuffle_index")
    assert "--train-iters" in wrong[0].cause


def test_a_large_index_is_sampled_and_says_so(monkeypatch):
    monkeypatch.setattr(surroundings, "WHOLE", 1 << 12)
    monkeypatch.setattr(surroundings, "BLOCK", 1 << 6)
    array = np.arange(1 << 16)
    first = surroundings.sampled(array)
    assert first.dtype == "int64 sampled"
    array[-1] += 1
    assert surroundings.sampled(array) != first, "both ends are always looked at"


class Delayed(torch.nn.Module):
    """As a Transformer Engine module keeps its delayed scaling."""

    def __init__(self):
        super().__init__()
        side = SimpleNamespace(scale=torch.ones(3), amax_history=torch.rand(4, 3))
        self.fp8_meta = {"scaling_fwd": side}


def test_fp8_scales_are_named(rank):
    rank.model.append(Delayed())
    document = receipt.take(rank, head(1), only={"fp8"})
    assert receipt.check(rank, document, {"fp8"}) == []
    rank.model[1].fp8_meta["scaling_fwd"].amax_history.zero_()
    wrong = receipt.check(rank, document, {"fp8"})
    assert [(one.piece, one.rank, one.name) for one in wrong] == [("fp8", 1, "fp8/chunk1//scaling_fwd/amax_history")]
    assert wrong[0].cause == "derived anew instead of loaded"


def test_a_ramp_of_the_batch_is_looked_at_one_step_ahead(rank):
    """At the save the calculator still holds the last step's number; the receipt says the coming one's."""
    calculator.unset_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(0, None, 8, 2, 1, False, "0:4 16:8")
    calculator.update_num_microbatches(12)
    assert calculator.get_num_microbatches() == 2
    rank.args.consumed_train_samples = 16
    document = receipt.take(rank, head(0), only={"batches"})
    assert calculator.get_num_microbatches() == 2, "looked at, not moved"
    saved = written.entries(document)
    assert saved["batches/num_micro_batches"][1]["dec"] == "4"
    calculator.update_num_microbatches(16)
    assert receipt.check(rank, document, {"batches"}) == []


def test_threads_change_no_digest(rank):
    items = [(f"t{n}", torch.rand(40_000)) for n in range(5)]
    assert digests.values(items, threads=1) == digests.values(items, threads=3)
