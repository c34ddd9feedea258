"""Layer specs: what they build, what they refuse, what is found missing or idle, and one real pretrain()."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dense_support import bits, config, megatron

from megatron_det import specs
from megatron_det.errors import GuaranteeBroken, Refused
from megatron_det.modules import built
from megatron_det.modules.norm import DetNorm
from megatron_det.patching.engine import resolve

ROOT = Path(__file__).resolve().parents[3]
WORDS, LENGTH = 128, 16


@pytest.fixture(scope="module")
def world():
    with megatron():
        yield


MOE = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16, "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01,
}  # fmt: skip
LAYER_NORM = {
    "normalization": "LayerNorm", "layernorm_zero_centered_gamma": True, "qk_layernorm": True, "add_bias_linear": True,
    "gated_linear_unit": False, "activation_func": torch.nn.functional.gelu,
}  # fmt: skip
STRUCTURES = {
    "dense": {},
    "layer norm, biases, q/k norm": LAYER_NORM,
    "flash": {"attention_dropout": 0.0},
    "experts": MOE,
    "mixed": {**MOE, "moe_layer_freq": [0, 1]},
    "mtp": {"mtp_num_layers": 1},
    "mtp with experts": {**MOE, "mtp_num_layers": 1, "moe_layer_freq": [1, 0]},
    "full recompute": {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
    },
    "selective recompute": {"recompute_granularity": "selective"},
}  # fmt: skip


def from_builder(conf, **more):
    """As ``pretrain`` builds it from ``--spec``, hooks and all."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig

    words = {"position_embedding_type": "rope", "transformer_layer_spec": specs.gpt_layer_spec, **more}
    model_config = GPTModelConfig(transformer=conf, vocab_size=WORDS, seq_length=LENGTH, **words)
    torch.manual_seed(11)
    (model,) = GPTModelBuilder(model_config).build_distributed_models(
        ProcessGroupCollection.use_mpu_process_groups(), wrap_with_ddp=False, mixed_precision_wrapper=None
    )
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their places."""
    ids = torch.randint(0, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    return ids, torch.arange(LENGTH).expand(2, LENGTH).contiguous()


def step(model, data: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(3, force_reset_rng=True)
    ids, places = data or batch()
    loss = model(ids, places, None, labels=ids)
    loss.mean().backward()
    return loss


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(world, name):
    """Every module is in place, and runs; two models give the same bits; the loss falls back to nobody else's."""
    results = set()
    for _ in range(2):
        more = {"position_embedding_type": "learned_absolute"} if name.startswith("layer norm") else {}
        model = from_builder(config(**STRUCTURES[name]), **more)
        loss = step(model)
        results.add(bits(loss, *(p.grad for p in model.parameters() if p.grad is not None)))
        assert list(built.absent([model])) == []
        assert list(built.idle([model])) == []
        paths = built.paths([model])
    assert len(results) == 1
    assert paths["DetVocabParallelEmbedding/lookup"] and paths["DetLoss/loss"]
    assert ("DetAttention/flash" in paths) == (name == "flash")
    assert ("DetEmbedding/lookup" in paths) == name.startswith("layer norm")
    norms = [seen for seen in built.seen([model]) if seen.kind == "DetNorm"]
    assert any("final_layernorm" in norm.name for norm in norms)
    assert any("mtp" in norm.name and "enorm" in norm.name for norm in norms) == name.startswith("mtp")


def test_recompute_keeps_the_bits(world):
    seen = set()
    for name in ("dense", "full recompute", "selective recompute"):
        model = from_builder(config(**STRUCTURES[name]))
        loss = step(model)
        seen.add(bits(loss, *(p.grad for p in model.parameters())))
    assert len(seen) == 1


def test_mtp_ignores_the_users_spec_unless_it_is_asked_by_us(world):
    """Control: what Megatron's builder would put there; and nothing stays replaced."""
    before = resolve(specs.MTP_BUILDER)[2]
    conf = config(mtp_num_layers=1)
    theirs = before(conf, specs.gpt_block_spec(conf), use_transformer_engine=False).layer_specs[0].submodules
    assert theirs.enorm is not DetNorm
    model = from_builder(conf)
    kinds = {name: type(m) for name, m in model.mtp.named_modules() if "norm" in name}
    assert set(kinds.values()) == {DetNorm, type(model.mtp.layers[0].mtp_model_layer.pre_cross_attn_layernorm)}
    assert resolve(specs.MTP_BUILDER)[2] is before
    specs.gpt_layer_spec(_Asked(conf))
    specs.gpt_layer_spec(_Asked(conf))
    other = config(mtp_num_layers=1)
    asked = resolve(specs.MTP_BUILDER)[2]
    assert asked is not before
    assert (
        asked(other, specs.gpt_block_spec(other), use_transformer_engine=False).layer_specs[0].submodules.enorm
        is not DetNorm
    )
    assert asked(conf, None, use_transformer_engine=False).layer_specs[0].submodules.enorm is DetNorm
    assert resolve(specs.MTP_BUILDER)[2] is before


class _Asked:
    """As much of a ``GPTModelConfig`` as the spec looks at."""

    def __init__(self, transformer) -> None:
        self.transformer = transformer
        self.pre_wrap_hooks: list = []


def plain_model(spec, **more):
    from megatron.core.models.gpt.gpt_model import GPTModel

    return GPTModel(
        config=config(**more), transformer_layer_spec=spec, vocab_size=WORDS, max_sequence_length=LENGTH,
        position_embedding_type="rope",
    )  # fmt: skip


def test_the_object(world):
    """A ``ModuleSpec``: the final norm, embedding and loss are named as absent until they are adopted."""
    model = plain_model(specs.gpt_layer_object)
    named = [finding.what for finding in built.absent([model])]
    assert len(named) == 3
    for part in ("final_layernorm", "word_embeddings", "compute_language_model_loss"):
        assert any(part in what for what in named), named
    specs.adopt(specs.adopt([model]))
    step(model)
    assert list(built.absent([model])) == [] and list(built.idle([model])) == []
    assert model.state_dict().keys() == plain_model(specs.gpt_layer_object).state_dict().keys()


def test_stock_is_found(world):
    """Control: Megatron's own spec, and a model that never ran."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    stock = plain_model(get_gpt_layer_local_spec())
    found = {finding.found for finding in built.absent([stock])}
    assert found >= {
        "RMSNorm",
        "DotProductAttention",
        "VocabParallelEmbedding",
        "Megatron's loss",
        "no module of megatron_det",
    }
    fresh = from_builder(config())
    assert len(list(built.idle([fresh]))) == len(list(built.seen([fresh]))) > 5


def test_a_replacement_that_never_runs_stops_the_first_step(world):
    """The injected fault: somebody's forward in place of ours."""
    model = from_builder(config())
    model.decoder.layers[1].input_layernorm.forward = lambda x: x
    with pytest.raises(GuaranteeBroken, match=r"DET-SPEC-IDLE.*layers.1.input_layernorm"):
        step(model)


def test_our_experts_come_in_as_soon_as_they_exist(world, monkeypatch):
    conf = config(**MOE)
    layer = specs.gpt_layer_object
    assert specs.experts(layer.submodules.mlp) is layer.submodules.mlp, "a dense MLP stays"

    class Layer:
        pass

    class Router:
        pass

    monkeypatch.setattr(built, "moe_classes", lambda: (Layer, Router))
    mlp = specs.gpt_block_spec(conf).layer_specs[0].submodules.mlp
    assert mlp.func is Layer and mlp.keywords["submodules"].router is Router
    assert built.replaced()["MoELayer"] is Layer


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"transformer_impl": "transformer_engine"}, "--transformer-impl"),
        ({"is_hybrid_model": True}, "hybrid"),
        ({"experimental_attention_variant": "dsa"}, "--experimental-attention-variant"),
        ({"use_kitchen": True}, "--use-kitchen"),
        ({"fp8": "e4m3"}, "--fp8-format"),
        ({"normalization": "L2Norm"}, "--normalization"),
        ({"context_parallel_size": 2}, "--context-parallel-size"),
    ],
)
def test_refusals_name_the_flag(change, flag):
    conf = config()
    assert list(specs.refusals(conf)) == []
    for name, value in change.items():
        setattr(conf, name, value)
    with pytest.raises(Refused, match="DET-SPEC-REFUSED") as error:
        specs.gpt_block_spec(conf)
    assert flag in str(error.value)
    assert all((f.why and f.do) for f in error.value.findings)


def test_hybrid_is_refused_by_name():
    """The hybrid builder hands the spec to ``build_module``."""
    from megatron.core.transformer.spec_utils import build_module

    for spec in (specs.gpt_layer_spec, specs.hybrid_stack_spec):
        with pytest.raises(Refused, match="Mamba"):
            build_module(spec, config())


def pretrain(tmp_path: Path, name: str, *flags: str, det: bool = True) -> subprocess.CompletedProcess:
    """One process of scripts/pretrain_gpt.py. Without ``det``: a line of Python puts the stand-in in, no more."""
    corpus = tmp_path / "corpus" / "text"
    if not corpus.parent.exists():
        build = [sys.executable, "scripts/build_corpus.py", "--out", str(corpus), "--max-bytes", "300000"]
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    start = ["scripts/pretrain_gpt.py"]
    words = ["--det", "--det-device", "cpu", "--det-ledger", str(tmp_path / name)]
    if not det:
        one_line = tmp_path / "standin.py"
        one_line.write_text(
            "from megatron_det import devices\ndevices.install()\nimport runpy\n"
            f"runpy.run_path({str(ROOT / start[0])!r}, run_name='__main__')\n"
        )
        start, words = [str(one_line)], []
    data = ["--data-path", str(corpus), "--data-cache-path", str(tmp_path / "cache"), "--exit-interval", "2"]
    command = [
        sys.executable,
        *start,
        "@configs/gpt.args",
        *data,
        *words,
        "--spec",
        "megatron_det.specs",
        "gpt_layer_spec",
    ]
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    clean = {k: v for k, v in os.environ.items() if not k.startswith("NVTE_")}  # a model built in-process leaves them
    env = {
        **clean,
        **alone,
        "PYTHONPATH": str(ROOT),
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    return subprocess.run(
        [*command, *flags], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )


def steps(ledger: Path) -> list:
    """The quantities of all steps, bits and digests, as they were written."""
    lines = [json.loads(line) for line in (ledger / "rank-00000.jsonl").read_text().splitlines()]
    return [record["q"] for record in lines if record["kind"] == "step"]


@pytest.mark.distributed
@pytest.mark.training
def test_two_runs_and_recompute_give_the_same_bits(tmp_path):
    """The real ``pretrain()``: dropout on, parameters, gradients' norm and optimizer state digested on both steps."""
    full = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
    for name, flags in {"a": (), "b": (), "recompute": full, "other seed": ("--seed", "5")}.items():
        done = pretrain(tmp_path, name, *flags)
        assert done.returncode == 0, done.stderr[-3000:]
    first = steps(tmp_path / "a")
    assert len(first) == 2 and any(name.startswith("after/exp_avg") for name, _ in first[1])
    assert steps(tmp_path / "b") == first
    assert steps(tmp_path / "recompute") == first
    assert steps(tmp_path / "other seed") != first, "the comparison can fail"


@pytest.mark.distributed
@pytest.mark.training
def test_the_spec_alone_trains(tmp_path):
    done = pretrain(tmp_path, "none", det=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "iteration        2/" in done.stdout
    refused = pretrain(tmp_path, "none", "--hybrid-layer-pattern", "M*-", det=False)
    assert refused.returncode != 0 and "Mamba" in refused.stderr
