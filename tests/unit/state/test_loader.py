"""A micro-batch depends on its place in the run: not on workers, on when a loader started, or on what came before."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.datasets import gpt_dataset
from megatron.training import training
from megatron.training.datasets import data_samplers

from megatron_det import devices
from megatron_det.patching import engine
from megatron_det.patching.inventory import data, loader
from megatron_det.state import generators

ARGS = SimpleNamespace(seed=11, full_validation=False, multiple_validation_sets=False)


class Noisy(torch.utils.data.Dataset):
    """Draws from every stream that a data set can reach."""

    def __init__(self):
        self.own = np.random.RandomState(3)
        self.inner = {"torch": torch.Generator().manual_seed(4), "python": random.Random(5)}

    def __len__(self):
        return 24

    def __getitem__(self, index):
        private = [self.own.rand(), torch.rand((), generator=self.inner["torch"]), self.inner["python"].random()]
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()), *private], dtype=torch.float64)


@pytest.fixture
def args(monkeypatch):
    monkeypatch.setattr(loader, "get_args", lambda: ARGS)
    monkeypatch.setattr(training, "get_args", lambda: ARGS)
    return ARGS


@pytest.fixture
def patched(args):
    tap = data.DataTap()
    applied = engine.apply([*data.patches(tap), *loader.loader_patches()])
    applied.tap = tap
    yield applied
    applied.undo()


@pytest.fixture
def recording_only(args):
    """What level ``observe`` does: stock Megatron, recorded."""
    applied = engine.apply(data.patches(data.DataTap()))
    yield applied
    applied.undo()


def batches(consumed: int, workers: int, kind: str = "single") -> list[list[list[str]]]:
    dataset = Noisy()
    if kind == "single":
        sampler = data_samplers.MegatronPretrainingSampler(len(dataset), consumed, 2, 1, 2)
    else:
        sampler = data_samplers.MegatronPretrainingRandomSampler(dataset, len(dataset), consumed, 2, 1, 2, False)
    source = torch.utils.data.DataLoader(
        dataset, batch_sampler=sampler, num_workers=workers, persistent_workers=workers > 0
    )
    return [[[float(x).hex() for x in row] for row in batch] for batch in source]


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_the_same_batches_after_a_resume_and_with_other_workers(patched, kind):
    torch.manual_seed(1)
    straight = batches(0, 0, kind)
    torch.manual_seed(2)  # a resumed process starts its loader elsewhere in the stream
    assert batches(8, 2, kind) == straight[2:]
    assert batches(8, 1, kind) == straight[2:]
    assert len({row[1] for batch in straight for row in batch}) == 12, "every sample has its own draws"
    assert patched.counts()["dataloader-fetch"] > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_at_and_after_the_end_of_an_epoch(patched, workers):
    """24 samples an epoch: resumed just before its end, exactly at it, and within the next epoch."""

    def cyclic(consumed: int, count: int, workers: int) -> list:
        dataset = Noisy()
        sampler = data_samplers.MegatronPretrainingRandomSampler(dataset, 24, consumed, 2, 0, 2, False)
        source = torch.utils.data.DataLoader(
            dataset, batch_sampler=sampler, num_workers=workers, persistent_workers=workers > 0
        )
        torch.manual_seed(consumed)
        iterator = training.cyclic_iter(source)
        return [[[float(x).hex() for x in row] for row in next(iterator)] for _ in range(count)]

    straight = cyclic(0, 12, 0)
    for consumed in (20, 24, 28):
        assert cyclic(consumed, 5, workers) == straight[consumed // 4 : consumed // 4 + 5]


def test_control_stock_loaders_depend_on_when_they_start(recording_only):
    torch.manual_seed(1)
    straight = batches(0, 2)
    torch.manual_seed(2)
    resumed = batches(8, 2)
    assert [[row[0] for row in batch] for batch in resumed] == [[row[0] for row in batch] for batch in straight[2:]]
    assert resumed != straight[2:]


def test_streams_of_the_training_process_are_not_moved(patched):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    batches(0, 0)
    batches(0, 2)
    assert (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()) == before


def test_another_seed_is_another_run(patched, monkeypatch):
    first = batches(0, 0)
    monkeypatch.setattr(loader, "get_args", lambda: SimpleNamespace(seed=12))
    assert batches(0, 0) != first


def test_cyclic_data_is_recorded_with_its_sample_ids(patched):
    """A generator hid its sampler: no ids were recorded. Two epochs, in order, and the ids pair with the batches."""
    dataset = Noisy()
    sampler = data_samplers.MegatronPretrainingRandomSampler(dataset, 24, 16, 2, 0, 2, False)
    source = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=1, persistent_workers=True)
    iterator = training.RerunDataIterator(iter(training.cyclic_iter(source)))
    patched.tap.start(iterator)
    served = [[int(row[0]) for row in next(iterator)] for _ in range(8)]  # 2 batches are left of the first epoch
    fresh = data_samplers.MegatronPretrainingRandomSampler(dataset, 24, 16, 2, 0, 2, False)
    assert served[:2] == [list(picked) for picked in fresh]
    recorded = patched.tap.stop()
    assert [name for name, _ in recorded] == [f"data/mb{number}/sample_ids" for number in range(8)]
    assert [value["items"] for _, value in recorded] == served


def test_an_empty_cyclic_loader_ends_with_megatrons_own_error(patched):
    with pytest.raises(RuntimeError, match="produced no data"):
        next(training.cyclic_iter([]))
    assert [next(cyclic) for cyclic in [training.cyclic_iter([1, 2])] for _ in range(5)] == [1, 2, 1, 2, 1]


class Texts(gpt_dataset.GPTDataset):
    """A GPTDataset of three samples: the first has padding."""

    def __init__(self):
        self.config = SimpleNamespace(
            add_extra_token_to_sequence=True, tokenizer=SimpleNamespace(eod=9), reset_position_ids=False,
            reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False, inter_document_masking=False,
        )  # fmt: skip
        self.masks_and_position_ids_are_cacheable = True
        self.masks_and_position_ids_are_cached = False
        self.cached_attention_mask = self.cached_loss_mask = self.cached_position_ids = None
        self._pad_token_id = 7

    def _query_document_sample_shuffle_indices(self, index):
        return np.array([[1, 2, 7, 7, 7], [1, 2, 3, 4, 5], [6, 5, 4, 3, 2]][index]), None, [5]


def masks(first: int) -> list[float]:
    dataset = Texts()
    dataset[first]
    return dataset[2]["loss_mask"].tolist()


def test_a_loss_mask_does_not_depend_on_the_first_sample(patched):
    assert Texts()[0]["loss_mask"].tolist() == [1, 0, 0, 0]
    assert masks(first=0) == masks(first=1) == [1, 1, 1, 1]


def test_control_stock_megatron_masks_by_the_first_sample(recording_only):
    assert masks(first=0) == [1, 0, 0, 0]
    assert masks(first=1) == [1, 1, 1, 1]


def evaluate(monkeypatch, args) -> list:
    """Megatron's own function up to the evaluation itself, in a world of one."""
    seen = []

    def stop(*args, eval_iters, **kwargs):
        seen.append(eval_iters)
        return {}, None, True

    standin = devices.install()
    try:
        for name in ("get_tensorboard_writer", "get_wandb_writer"):
            monkeypatch.setattr(training, name, lambda: None)
        monkeypatch.setattr(training, "get_args", lambda: args)
        monkeypatch.setattr(loader, "get_args", lambda: args)
        monkeypatch.setattr(training, "evaluate", stop)
        monkeypatch.setattr(training.mpu, "get_tensor_model_parallel_rank", lambda: 0)
        monkeypatch.setattr(torch.distributed, "broadcast", lambda *_, **__: None)
        training.evaluate_and_print_results("x", None, None, None, 1, None, None)
    finally:
        standin.undo()
    return seen


def full():
    return SimpleNamespace(
        full_validation=True, multiple_validation_sets=False, eval_iters=5, validation_set_names=None
    )


def test_full_validation_alone(patched, monkeypatch):
    args = full()
    assert evaluate(monkeypatch, args) == [5]
    assert args.eval_iters == 5, "a number again"


def test_control_stock_full_validation_crashes(recording_only, monkeypatch):
    with pytest.raises(TypeError, match="'int' object is not subscriptable"):
        evaluate(monkeypatch, full())


def test_private_generators_are_found():
    thing = SimpleNamespace(a=[{"b": random.Random(1)}], c=np.random.default_rng(2), d=torch.default_generator)
    found = dict(generators.find(thing))
    assert set(found) == {"a.0.b", "c"}, "the process-wide stream is not private"
    for one in found.values():
        generators.seed(one, 2**63 + 5)
        state = generators.get(one)
        first = one.random()
        generators.put(one, state)
        assert one.random() == first
