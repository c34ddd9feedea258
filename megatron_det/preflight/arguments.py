"""Rules on Megatron's arguments: one record each. A value that is not vouched for is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ArgumentRule:
    """Refuses when ``refused(value of the argument)`` is true."""

    code: str
    argument: str
    refused: Callable[[Any], bool]
    needed: str
    why: str
    do: str

    @property
    def flag(self) -> str:
        return "--" + self.argument.replace("_", "-")


def truthy(value: Any) -> bool:
    return bool(value)


def given(value: Any) -> bool:
    return value is not None


def above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def neither(*good: Any) -> Callable[[Any], bool]:
    return lambda value: value is not None and value not in good


UNEXAMINED = "Its order of sums is not examined yet, so it cannot be vouched for."
IGNORED = "megatron-core 0.19.2 accepts this flag and ignores it: the run would not be what it says."

RULES: tuple[ArgumentRule, ...] = (
    ArgumentRule("DET-ARG-FLEX", "moe_token_dispatcher_type", neither("alltoall", "allgather"), "alltoall or allgather",
                 "DeepEP, HybridEP and NCCL-EP combine tokens in kernels of their own.",
                 "use --moe-token-dispatcher-type alltoall"),
    ArgumentRule("DET-ARG-PERMUTE-FUSION", "moe_permute_fusion", truthy, "off", UNEXAMINED, "drop the flag"),
    ArgumentRule("DET-ARG-ROUTER-FUSION", "moe_router_fusion", truthy, "off",
                 "Transformer Engine's fused router adds its auxiliary loss with atomics.", "drop the flag"),
    ArgumentRule("DET-ARG-FSDP", "use_megatron_fsdp", truthy, "off", UNEXAMINED, "use --use-distributed-optimizer"),
    ArgumentRule("DET-ARG-FSDP2", "use_torch_fsdp2", truthy, "off", UNEXAMINED, "use --use-distributed-optimizer"),
    ArgumentRule("DET-ARG-FP8", "fp8", given, "unset",
                 "Scales and amax history are not in the resume closure yet.", "train in --bf16"),
    ArgumentRule("DET-ARG-FP4", "fp4", given, "unset", UNEXAMINED, "train in --bf16"),
    ArgumentRule("DET-ARG-CP", "context_parallel_size", above_one, "1",
                 "Context-parallel attention reduces inside Transformer Engine, out of reach.",
                 "use tensor parallelism"),
    ArgumentRule("DET-ARG-CUDA-GRAPH", "cuda_graph_impl", neither("none"), "none",
                 "Warm-up and capture differ between a resumed run and one that never stopped.", "drop the flag"),
    ArgumentRule("DET-ARG-OPTIMIZER", "optimizer", neither("adam", "sgd"), "adam or sgd", UNEXAMINED, "use adam"),
    ArgumentRule("DET-ARG-OFFLOAD", "optimizer_cpu_offload", truthy, "off", UNEXAMINED, "drop the flag"),
    ArgumentRule("DET-ARG-PRECISION-AWARE", "use_precision_aware_optimizer", truthy, "off",
                 "Moments are rescaled on save and load.", "drop the flag"),
    ArgumentRule("DET-ARG-RAMPUP", "rampup_batch_size", given, "unset", IGNORED, "use --step-batch-size-schedule"),
    ArgumentRule("DET-ARG-JIT-FUSER", "disable_jit_fuser", truthy, "off", IGNORED,
                 "drop it; --det sets TORCHDYNAMO_DISABLE=1"),
    ArgumentRule("DET-ARG-YAML", "yaml_cfg", given, "unset",
                 "The YAML path skips the checks of arguments.", "give the settings as flags"),
    ArgumentRule("DET-ARG-NO-SAVE-RNG", "no_save_rng", truthy, "off", "A resume could not be exact.", "drop the flag"),
    ArgumentRule("DET-ARG-NO-SAVE-OPTIM", "no_save_optim", truthy, "off", "A resume could not be exact.", "drop it"),
    ArgumentRule("DET-ARG-CKPT-FORMAT", "ckpt_format", neither("torch_dist", "torch"), "torch_dist or torch",
                 "Per-rank state is written for these two formats.", "use --ckpt-format torch_dist"),
    ArgumentRule("DET-ARG-LOCAL-CKPT", "non_persistent_ckpt_type", neither("global"), "unset or global",
                 "Local checkpoints do not carry the per-rank state.", "drop the flag"),
    ArgumentRule("DET-ARG-RL", "perform_rl_step", truthy, "off", "Sampling is outside the resume closure.", "drop it"),
    ArgumentRule("DET-ARG-EXTERNAL-DATA", "dataloader_type", neither("single", "cyclic"), "single or cyclic",
                 "An external loader's position is not restored by Megatron.", "use --dataloader-type single"),
    ArgumentRule("DET-ARG-SFT", "sft", truthy, "off", "Packing draws random numbers that are not saved.", "drop it"),
    ArgumentRule("DET-ARG-FIM", "fim_data", truthy, "off",
                 "Fill-in-the-middle draws from a generator per worker that no checkpoint holds.", "drop the flag"),
    ArgumentRule("DET-ARG-INPROCESS", "inprocess_restart", truthy, "off",
                 "A restart inside the process keeps state that a fresh process has not.", "drop the flag"),
)  # fmt: skip
