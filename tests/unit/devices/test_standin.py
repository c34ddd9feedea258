"""The stand-in: every row of its table is effective and undone, and it has two RNG streams."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from megatron_det import devices
from megatron_det.devices.table import TABLE
from megatron_det.errors import PatchError, Refused
from megatron_det.patching.engine import Patch, apply, resolve


class Noisy(Dataset):
    """A dataset that draws while it is read, in place and on a tensor: host code all the same."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return torch.zeros(2).uniform_()


TORCH_ROWS = [row for row in TABLE if row.symbol.startswith("torch")]


@pytest.fixture
def standin():
    if torch.cuda.is_available():
        pytest.skip("a GPU is visible: the stand-in is tried on machines without one")
    installed = devices.install()
    yield installed
    if devices.installed():
        installed.undo()


def test_every_row_is_effective_and_undone():
    if torch.cuda.is_available():
        pytest.skip("a GPU is visible: the stand-in is tried on machines without one")
    before = {row.symbol: resolve(row.symbol)[2] for row in TORCH_ROWS}
    standin = devices.install()
    try:
        unchanged = [s for s, value in before.items() if resolve(s)[2] is value]
    finally:
        standin.undo()
    assert unchanged == [], "each row replaces its symbol"
    assert [s for s, value in before.items() if resolve(s)[2] is not value] == [], "the exact identities are back"
    assert not devices.installed()
    assert torch.cuda.is_available() is False, "the real answer is back"


def test_rows_name_what_exists_and_say_why():
    for row in TABLE:
        holder, attribute, _ = resolve(row.symbol)
        assert hasattr(holder, attribute)
        assert len(row.why) > 5
    assert len({row.symbol for row in TABLE}) == len(TABLE)


def test_never_twice(standin):
    with pytest.raises(Refused, match="DET-STANDIN-TWICE"):
        devices.install()


def test_a_runs_patch_may_lie_on_the_stand_in_and_leaves_first(standin):
    target = "torch.utils.data.dataloader:_BaseDataLoaderIter.__init__"
    on_top = apply([Patch("of-the-run", target, lambda original, ran: original, why="test")])
    with pytest.raises(PatchError, match="DET-PATCH-ORDER"):
        standin.undo()
    assert devices.installed()
    assert torch.ones(1, device="cuda").device.type == "cpu", "a refused undo takes nothing away"
    on_top.undo()
    standin.undo()
    assert not devices.installed()


def test_never_by_surprise_on_a_gpu_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "GPU")
    with pytest.raises(Refused, match="DET-STANDIN-GPU"):
        devices.install()


def test_tensors_asked_for_on_cuda_are_on_cpu(standin):
    made = [
        torch.zeros(2, device="cuda"),
        torch.empty(2, device=torch.cuda.current_device()),
        torch.ones(2).cuda(),
        torch.ones(2).to("cuda"),
        torch.ones(2).to(device=torch.device("cuda:0"), dtype=torch.bfloat16),
        torch.nn.Linear(2, 2).cuda().weight,
        torch.cuda.FloatTensor([1.0]),
    ]
    assert {tensor.device.type for tensor in made} == {"cpu"}
    assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert isinstance(torch.ones(1), torch.FloatTensor)


def test_a_copy_to_the_host_is_a_copy(standin):
    parameter = torch.zeros(3)
    snapshots = [parameter.cpu(), parameter.to("cpu"), parameter.to(torch.device("cpu")), parameter.to(device="cpu")]
    parameter.add_(1)
    assert all(int(snapshot.sum()) == 0 for snapshot in snapshots), "as on a GPU, a snapshot does not follow"


def host() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


def device() -> bytes:
    return torch.cuda.get_rng_state().numpy().tobytes()


DROPOUT_LSTM = torch.nn.LSTM(4, 4, 2, dropout=0.5)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.nn.functional.dropout(torch.ones(64), 0.5),
        lambda: torch.nn.Dropout(0.5)(torch.ones(64)),
        lambda: torch.ones(8).uniform_(),
        lambda: torch.empty(8).normal_(),
        lambda: torch.nn.init.normal_(torch.empty(8)),
        lambda: torch.rand(8, device="cuda"),
        lambda: torch.randn(8, device=torch.cuda.current_device()),
        lambda: torch.rand_like(torch.ones(8)),
        lambda: torch.bernoulli(torch.full((8,), 0.5)),
        lambda: torch.nn.functional.gumbel_softmax(torch.ones(8)),
        lambda: torch.normal(torch.zeros(8), torch.ones(8)),
        lambda: torch.distributions.Gamma(torch.ones(8), torch.ones(8)).sample(),
        lambda: DROPOUT_LSTM(torch.ones(3, 1, 4)),
    ],
)
def test_device_draws_move_the_device_stream_only(standin, draw):
    torch.manual_seed(1)
    before = host(), device()
    draw()
    assert host() == before[0]
    assert device() != before[1]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: iter(DataLoader([1, 2, 3])),
        lambda: next(iter(DataLoader([1, 2, 3], shuffle=True))),
        lambda: next(iter(DataLoader(Noisy()))),
        lambda: torch.rand(8),
        lambda: torch.randperm(8),
    ],
)
def test_host_draws_move_the_host_stream_only(standin, draw):
    torch.manual_seed(1)
    before = host(), device()
    draw()
    assert host() != before[0]
    assert device() == before[1]


def test_a_given_generator_moves_neither(standin):
    before = host(), device()
    torch.empty(8).normal_(generator=torch.Generator().manual_seed(3))
    assert (host(), device()) == before


def test_seeding_and_states(standin):
    torch.manual_seed(5)
    first = torch.rand(4, device="cuda"), torch.rand(4)
    torch.manual_seed(5)
    again = torch.rand(4, device="cuda"), torch.rand(4)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True)), "manual_seed seeds both"
    state = torch.cuda.get_rng_state()
    one = torch.ones(32).uniform_()
    torch.cuda.default_generators[0].set_state(state)
    assert torch.equal(one, torch.ones(32).uniform_())


def test_without_the_stand_in_one_stream_serves_both():
    """The control: why two streams are needed at all."""
    torch.manual_seed(1)
    before = host()
    torch.nn.functional.dropout(torch.ones(64), 0.5)
    assert host() != before


def test_recompute_sees_the_same_mask():
    code = (
        "from megatron_det import devices; devices.install(); import torch\n"
        "from megatron.core import tensor_parallel as tp\n"
        "tracker = tp.get_cuda_rng_tracker(); tracker.add('model-parallel-rng', 7); torch.manual_seed(1)\n"
        "seen = []\n"
        "def block(x):\n"
        "    with tracker.fork(): y = torch.nn.functional.dropout(x, 0.5)\n"
        "    z = torch.nn.functional.dropout(y, 0.5); seen.append(z.detach().clone()); return z\n"
        "x = torch.ones(256, requires_grad=True)\n"
        "tp.checkpoint(block, False, x).sum().backward()\n"
        "assert len(seen) == 2 and torch.equal(*seen) and 0 < int((seen[0] == 0).sum()) < 256\n"
        "print('same mask')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "same mask" in done.stdout, done.stderr
    assert "RNG state changed" not in done.stderr


MEGATRON_ROWS = [row.symbol for row in TABLE if not row.symbol.startswith("torch")]


@pytest.mark.parametrize("undo_first", [False, True])
def test_rows_on_megatron_are_effective_and_undone(undo_first):
    code = (
        "from megatron_det import devices; from megatron_det.patching.engine import resolve\n"
        f"rows, early = {MEGATRON_ROWS!r}, {undo_first!r}\n"
        "made_here = lambda s: resolve(s)[2].__code__.co_filename.replace('\\\\', '/').count('megatron_det/devices/')\n"
        "standin = devices.install()\n"
        "if not early:\n"
        "    assert all(map(made_here, rows)), [s for s in rows if not made_here(s)]\n"
        "standin.undo()\n"
        "assert not any(map(made_here, rows)), [s for s in rows if made_here(s)]\n"
        "print('as it was')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "as it was" in done.stdout, done.stderr


def test_import_changes_nothing():
    before = dict(vars(torch.cuda))
    importlib.import_module("megatron_det.devices.table")
    assert {k: v for k, v in vars(torch.cuda).items() if before.get(k) is not v} == {}
