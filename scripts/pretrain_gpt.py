"""A small GPT / MoE pretrain script with Megatron's argument surface, for machines that only have the
``megatron-core`` wheel. It knows nothing of determinism: ``--det`` comes from the installed package.

Examples:
    torchrun --nproc-per-node 2 scripts/pretrain_gpt.py @configs/gpt.args --data-path PREFIX --det --det-device cpu
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_det.errors import FormatError
from megatron_det.formats.argfile import expand_argument_files


def needs_data() -> bool:
    return mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()


def datasets(samples: list[int], vp_stage: int | None = None) -> Any:
    """Train, validation and test data; built where a rank reads them."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    here = mpu.get_tensor_model_parallel_rank() == 0 and needs_data()
    return BlendedMegatronDatasetBuilder(kind, samples, lambda: here, config).build()


datasets.is_distributed = True  # type: ignore[attr-defined]


def shared_in_tensor_group(batch: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Rank 0 of a tensor-parallel group reads; the others get its micro-batch.

    Shapes: [micro batch, sequence]; the mask, where the loader makes one, [micro batch, 1, sequence, sequence].
    """
    args = get_args()
    group, source = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_src_rank()
    rows, width = args.micro_batch_size, args.seq_length
    fields = dict.fromkeys(("tokens", "labels", "position_ids"), (torch.int64, (rows, width)))
    fields["loss_mask"] = (torch.float32, (rows, width))
    if args.create_attention_mask_in_dataloader:
        fields["attention_mask"] = (torch.bool, (rows, 1, width, width))
    received = {}
    for name, (dtype, shape) in fields.items():
        if batch is not None:
            value = batch[name].cuda(non_blocking=True).contiguous()
        else:
            value = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
        torch.distributed.broadcast(value, source, group=group)
        received[name] = value
    return received


def loss_function(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Sum of the token losses, number of tokens, and both for the report (Megatron divides one by the other)."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """One micro-batch. A pipeline stage in the middle reads nothing."""
    batch: dict[str, torch.Tensor] = {}
    if needs_data():
        mine = next(data_iterator) if mpu.get_tensor_model_parallel_rank() == 0 else None
        batch = shared_in_tensor_group(mine)
    inputs = batch.get("tokens"), batch.get("position_ids"), batch.get("attention_mask")
    output = model(*inputs, labels=batch.get("labels"))
    return output, partial(loss_function, batch.get("loss_mask"))


def main() -> None:
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    try:
        sys.argv[1:] = expand_argument_files(sys.argv[1:])
    except FormatError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    main()
