"""The keyword arguments of a transformers Qwen3-VL model, for trainers that call `model(**inputs)` themselves."""

from __future__ import annotations

from typing import Any

import torch

from rollouts.errors import SampleError
from rollouts.models.qwen3_vl import PIXELS, float_pixels, require_qwen3_vl
from rollouts.training.batch import OWN_FORWARD, TrainingBatch


def model_inputs(batch: TrainingBatch, model: Any) -> dict[str, torch.Tensor]:
    """`input_ids`, `attention_mask`, `mm_token_type_ids` (B, T) and, if any row has images, `pixel_values` and
    `image_grid_thw`, for videos `pixel_values_videos` and `video_grid_thw`; on the model's device, pixels in its dtype.

    transformers finds media by token id, so it would take a sampled placeholder token for an image: a row with such a
    token raises `SampleError`. `token_logprobs` finds media by range and accepts such rows.
    """
    require_qwen3_vl(model, OWN_FORWARD)
    placeholders = torch.tensor([model.config.image_token_id, model.config.video_token_id])
    types = batch.mm_token_type_ids
    for sample, ids, kinds in zip(batch.samples, batch.input_ids, types, strict=True):
        literal = (torch.isin(ids, placeholders) & (kinds == 0)).nonzero()
        if len(literal):
            raise SampleError(
                sample.name,
                f"the token at position {(position := int(literal[0]))} has id {int(ids[position])}, a placeholder "
                "token outside every image and video (the policy sampled it); transformers would take it for an image. "
                "Compute this row with token_logprobs",
            )
    inputs = {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask.long(),
        "mm_token_type_ids": types,
    }
    for modality, name in PIXELS.items():
        items = [item for sample in batch.samples for item, _ in sample.media if item.modality == modality]
        grids = batch.media_tensors(f"{modality}_grid_thw").cat()
        if grids is not None:
            pixels = torch.from_numpy(float_pixels(items)).to(model.dtype)
            inputs |= {name: pixels, f"{modality}_grid_thw": grids}
    return {name: tensor.to(model.device) for name, tensor in inputs.items()}
