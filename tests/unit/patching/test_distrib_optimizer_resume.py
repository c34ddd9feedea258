"""The distributed optimizer with torch's Adam comes back bit for bit, in every format; stock Megatron does not do it.

One process, a model of two layers, real DDP buffers, real checkpoints.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import MegatronModule, TransformerConfig

from megatron_det import devices
from megatron_det.patching import engine
from megatron_det.patching.inventory import distrib_optimizer, scheduler
from megatron_det.state import closure

FORMS = ("dp_reshardable", "fully_reshardable", "torch")  # the two shardings of torch_dist, and the older format


class Tiny(MegatronModule):
    def __init__(self, config):
        super().__init__(config)
        self.one = torch.nn.Linear(4, 6)
        self.two = torch.nn.Linear(6, 2)

    def forward(self, x):
        return self.two(torch.relu(self.one(x)))


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    if torch.cuda.is_available():
        pytest.skip("written for machines without a GPU; on a GPU the training tests try this")
    standin = devices.install()
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    standin.undo()


@pytest.fixture
def patched():
    applied = engine.apply([*distrib_optimizer.patches(), *scheduler.patches()])
    yield applied
    applied.undo()


def build(dtype):
    torch.manual_seed(0)
    bf16 = dtype is torch.bfloat16
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, bf16=bf16, params_dtype=dtype)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, ddp, Tiny(config).to(dtype))
    options = OptimizerConfig(
        optimizer="adam", lr=0.01, min_lr=0.001, weight_decay=0.1, bf16=bf16, params_dtype=dtype,
        use_distributed_optimizer=True,
    )  # fmt: skip
    return model, get_megatron_optimizer(options, [model])


def train(model, optimizer, steps):
    dtype = next(model.parameters()).dtype
    for step in steps:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        x = torch.sin(torch.arange(12, dtype=torch.float32).reshape(3, 4) + step).to(dtype)
        model(x).float().square().sum().backward()
        model.finish_grad_sync()
        for parameter in model.parameters():  # world size 1: the buffer holds what would have been reduced
            assert parameter.main_grad is not None
        assert optimizer.step()[0]


def state(model, optimizer):
    return dict(closure.tensor_items("state", [model], optimizer))


def steps_of(optimizer):
    return [entry["step"] for entry in optimizer.chained_optimizers[0].optimizer.state.values()]


def document(model, optimizer, sharding, loading=False):
    weights = model.module.sharded_state_dict()
    metadata = {"distrib_optim_sharding_type": sharding}
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, loading, metadata=metadata)}


def save(folder, model, optimizer, form):
    folder.mkdir()
    if form == "torch":
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, folder / "model.pt")
        optimizer.save_parameter_state(str(folder / "optimizer.pt"))
    else:
        dist_checkpointing.save(document(model, optimizer, form), str(folder))


def load(folder, model, optimizer, form):
    if form == "torch":
        loaded = torch.load(folder / "model.pt", weights_only=False)
    else:
        loaded = dist_checkpointing.load(document(model, optimizer, form, loading=True), str(folder))
    model.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    if form == "torch":
        optimizer.load_parameter_state(str(folder / "optimizer.pt"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("form", FORMS)
def test_resumes_bit_for_bit(patched, tmp_path, dtype, form):
    model, optimizer = build(dtype)
    train(model, optimizer, range(3))
    save(tmp_path / "saved", model, optimizer, form)
    at_save = state(model, optimizer)
    fresh, resumed = build(dtype)
    assert state(fresh, resumed) != at_save, "the control: a fresh optimizer is another one"
    load(tmp_path / "saved", fresh, resumed, form)
    assert state(fresh, resumed) == at_save
    found = steps_of(resumed)
    assert {int(step) for step in found} == {3}
    assert len({step.data_ptr() for step in found}) == len(found) == 4, "one step tensor per parameter"
    train(model, optimizer, range(3, 5))
    train(fresh, resumed, range(3, 5))
    assert state(fresh, resumed) == state(model, optimizer)
    assert patched.counts()["distrib-optimizer-load_state_dict"] > 0


STOCK = {"dp_reshardable": AssertionError, "fully_reshardable": AssertionError, "torch": KeyError}


@pytest.mark.parametrize("form", FORMS)
def test_control_stock_megatron_cannot_load(tmp_path, form):
    model, optimizer = build(torch.bfloat16)
    train(model, optimizer, range(3))
    save(tmp_path / "saved", model, optimizer, form)
    with pytest.raises(STOCK[form]):
        load(tmp_path / "saved", *build(torch.bfloat16), form)


def test_control_making_the_state_first_is_not_enough(tmp_path):
    """The obvious work-around loads without a word, and Adam's step is that of the template."""
    model, optimizer = build(torch.bfloat16)
    train(model, optimizer, range(3))
    save(tmp_path / "saved", model, optimizer, "dp_reshardable")
    fresh, resumed = build(torch.bfloat16)
    distrib_optimizer.materialise(resumed.chained_optimizers[0].optimizer)
    load(tmp_path / "saved", fresh, resumed, "dp_reshardable")
    assert {int(step) for step in steps_of(resumed)} == {0}


def schedule():
    _, optimizer = build(torch.float32)
    return OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=0.1, min_lr=0.01, lr_warmup_steps=2, lr_decay_steps=20, lr_decay_style="cosine",
        start_wd=0.1, end_wd=0.1, wd_incr_steps=20, wd_incr_style="constant",
    )  # fmt: skip


def twice(saved):
    again = schedule()
    again.load_state_dict(saved)
    again.load_state_dict(saved)
    return again


def test_schedule_is_set_not_added(patched):
    first = schedule()
    first.step(8)
    again = twice(first.state_dict())
    assert again.num_steps == 8
    rates = [[float(group["lr"]).hex() for group in one.optimizer.param_groups] for one in (first, again)]
    assert rates[0] == rates[1]


def test_control_stock_schedule_adds():
    first = schedule()
    first.step(8)
    assert twice(first.state_dict()).num_steps == 16
