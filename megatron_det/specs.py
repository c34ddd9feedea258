"""Layer specs: ``--spec megatron_det.specs gpt_layer_spec``, with or without ``--det``.

=====================  ================================================================================================
name                   use
=====================  ================================================================================================
``gpt_layer_spec``     ``--spec`` and ``GPTModelConfig.transformer_layer_spec``: called with the model's config it gives
                       the block of this pipeline stage (dense, experts, or mixed; MLA), sees to MTP, and leaves a
                       pre-wrap hook that replaces embeddings and loss and looks at what was built
``gpt_block_spec``     the same block from a ``TransformerConfig``, for a script that builds ``GPTModel`` itself
``gpt_mtp_spec``       the MTP block for such a script: Megatron's builder ignores the user's spec there
``gpt_layer_object``   a ``ModuleSpec``: one dense layer without q/k norms. Megatron adds its own final norm; ``adopt``
                       replaces it
``adopt``              puts in place, on a built model, what no layer spec reaches
``hybrid_stack_spec``  refused by name
=====================  ================================================================================================

The structure is Megatron's own spec, with norms, attention and experts exchanged. Level: each module's own.
Importing this changes nothing. For MTP ``gpt_layer_spec`` replaces ``get_gpt_mtp_block_spec`` until its next call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec_for_backend,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_det.errors import Finding, GuaranteeBroken, Refused
from megatron_det.modules import built, rope
from megatron_det.modules.attention import DetAttention
from megatron_det.modules.norm import DetNorm
from megatron_det.patching.engine import Applied, Patch, apply

MTP_BUILDER = "megatron.core.models.gpt.gpt_layer_specs:get_gpt_mtp_block_spec"
NORMS = ("input_layernorm", "pre_cross_attn_layernorm", "pre_mlp_layernorm")
HEAD_NORMS = ("q_layernorm", "k_layernorm", "kv_layernorm")

adopt = built.adopt


def refusals(config: Any) -> Iterator[Finding]:
    """What this file has no modules for, by the name of the flag. ``config``: a ``TransformerConfig``."""
    no = "no written-down order"
    cases = [
        (config.transformer_impl != "local", "--transformer-impl", config.transformer_impl, "local",
         "Its attention has not been proved by a probe.", "--transformer-impl local."),
        (bool(getattr(config, "is_hybrid_model", False)), "hybrid model", "Mamba layers", "GPT",
         f"Mamba's kernels have {no}.", "train a GPT model, or without this spec."),
        (config.experimental_attention_variant is not None, "--experimental-attention-variant",
         config.experimental_attention_variant, "none", f"It has {no} (atomics in DSA).", "leave the flag out."),
        (bool(config.use_kitchen), "--use-kitchen", "on", "off", f"Kitchen's kernels have {no}.", "leave it out."),
        (bool(config.fp8 or config.fp4), "--fp8-format / --fp4-format", config.fp8 or config.fp4, "none",
         "They need Transformer Engine's layers.", "train in bf16."),
        (config.normalization not in ("RMSNorm", "LayerNorm"), "--normalization", config.normalization,
         "RMSNorm or LayerNorm", f"Another one has {no}.", "--normalization RMSNorm."),
        (config.context_parallel_size > 1, "--context-parallel-size", config.context_parallel_size, "1",
         "Only Transformer Engine's attention has it.", "--context-parallel-size 1."),
    ]  # fmt: skip
    for found, what, value, needed, why, do in cases:
        if found:
            yield Finding("DET-SPEC-REFUSED", what, str(value), needed, why, do)


def check(config: Any) -> None:
    """Before anything is built: ``build_module`` garbles what a constructor raises. Raises: Refused."""
    findings = list(refusals(config))
    if findings:
        raise Refused(*findings)
    rope.check(config)


def gpt_block_spec(config: Any, vp_stage: int | None = None, pp_rank: int | None = None) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage, and the final norm. ``config``: a ``TransformerConfig``. Raises: Refused."""
    check(config)
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, qk_l2_norm=config.qk_l2_norm, vp_stage=vp_stage, pp_rank=pp_rank
    )
    done = {id(spec): exchanged(spec) for spec in block.layer_specs}
    return replace(block, layer_specs=[done[id(spec)] for spec in block.layer_specs], layer_norm=DetNorm)


def gpt_mtp_spec(config: Any, vp_stage: int | None = None, pp_rank: int | None = None) -> Any:
    """The MTP block of this stage with our norms and our last decoder layer, or None where there is none."""
    check(config)
    last = get_gpt_decoder_layer_specs(config, use_transformer_engine=False, qk_l2_norm=config.qk_l2_norm)[-1]
    return get_gpt_mtp_block_spec_for_backend(
        config=config, spec=exchanged(last), backend=_Backend(), vp_stage=vp_stage, pp_rank=pp_rank
    )


class _Backend(LocalSpecProvider):
    """Megatron's local backend with our norm and attention."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        return DetNorm

    def core_attention(self) -> type:
        return DetAttention


def exchanged(spec: ModuleSpec) -> ModuleSpec:
    """A copy of one of Megatron's local layer specs with our norms, attention and experts."""
    layer = spec.submodules
    attention = layer.self_attention
    heads = {
        name: _norm(getattr(attention.submodules, name)) for name in HEAD_NORMS if hasattr(attention.submodules, name)
    }
    inner = replace(attention.submodules, core_attention=DetAttention, **heads)
    norms = {name: _norm(getattr(layer, name)) for name in NORMS}
    outer = replace(layer, self_attention=replace(attention, submodules=inner), mlp=experts(layer.mlp), **norms)
    return replace(spec, submodules=outer)


def _norm(theirs: Any) -> Any:
    return theirs if theirs in (None, IdentityOp, L2Norm) else DetNorm


def experts(mlp: Any) -> Any:
    """Our MoE layer and router in place of Megatron's, as soon as they are there. A dense MLP stays."""
    ours = built.moe_classes()
    if not (isinstance(mlp, partial) and mlp.func is MoELayer and ours):
        return mlp
    layer, router = ours
    return partial(
        layer, *mlp.args, **{**mlp.keywords, "submodules": replace(mlp.keywords["submodules"], router=router)}
    )


class GptLayerSpec:
    """What ``--spec`` names. Megatron's GPT builder calls it; its hybrid builder asks for ``module`` and is refused."""

    def __init__(self) -> None:
        self._mtp: Applied | None = None

    def __call__(self, config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        """``config``: a ``GPTModelConfig``, or a ``TransformerConfig`` (then only the block: see ``adopt``)."""
        transformer = getattr(config, "transformer", config)
        block = gpt_block_spec(transformer, vp_stage)
        if transformer is not config:
            if finish not in config.pre_wrap_hooks:
                config.pre_wrap_hooks.append(finish)
            if transformer.mtp_num_layers is not None:
                self._next_mtp(transformer)
        return block

    def _next_mtp(self, config: Any) -> None:
        """The builder asks for the MTP block right after the layers: this one question is answered by us."""
        if self._mtp is not None:
            self._mtp.undo()

        def make(original: Any, ran: Any) -> Any:
            def get_gpt_mtp_block_spec(theirs: Any, *args: Any, **kwargs: Any) -> Any:
                if theirs is not config:
                    return original(theirs, *args, **kwargs)
                ran()
                if self._mtp is not None:
                    self._mtp.undo()
                    self._mtp = None
                return gpt_mtp_spec(config, kwargs.get("vp_stage"), kwargs.get("pp_rank"))

            return get_gpt_mtp_block_spec

        self._mtp = apply([Patch("mtp-spec", MTP_BUILDER, make, "MTP ignores the user's spec")])

    @property
    def module(self) -> Any:
        raise Refused(
            Finding(
                "DET-SPEC-REFUSED",
                "--spec megatron_det.specs in a hybrid model",
                "Mamba layers",
                "a GPT model",
                "Mamba's kernels have no written-down order.",
                "train a GPT model, or leave --spec out.",
            )
        )


def finish(model: list[Any]) -> list[Any]:
    """The pre-wrap hook: replaces what is left, refuses what is missing, watches each chunk's first forward."""
    adopt(model)
    findings = list(built.absent(model))
    if findings:
        raise Refused(*findings)
    for chunk in model:
        watch(chunk)
    return model


def watch(chunk: Any) -> None:
    """After the chunk's first training forward every replacement must have run. Raises there: GuaranteeBroken."""

    def hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if getattr(module, "post_process", False) and kwargs.get("labels") is None:
            return  # no loss is asked for: not a training step
        handle.remove()
        for finding in built.idle([module]):
            raise GuaranteeBroken(finding)

    handle = chunk.register_forward_hook(hook, with_kwargs=True)


gpt_layer_spec = GptLayerSpec()
hybrid_stack_spec = gpt_layer_spec
gpt_layer_object = exchanged(get_gpt_layer_local_spec())
