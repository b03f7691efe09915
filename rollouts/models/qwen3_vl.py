"""Qwen3-VL's forward pass with images placed by range and each distinct image encoded once.

Calls the same modules of transformers' `Qwen3VLForConditionalGeneration` in the same order as its own `forward`, which
finds placeholders by token id and encodes an image once for every row that contains it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from renderers import MediaItem
from renderers.vision.normalise import normalised
from rollouts.errors import SampleError, UnsupportedModelError
from rollouts.models.placed_rows import PlacedRows

#: Modality -> the model's parameter name for its patches.
PIXELS: Mapping[str, str] = {"image": "pixel_values", "video": "pixel_values_videos"}


class VisionFeatures(NamedTuple):
    """Merged features (tokens, hidden) and the deepstack features of each tapped vision layer, same shape."""

    embeds: torch.Tensor
    deepstack: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        return self.embeds.nbytes + sum(layer.nbytes for layer in self.deepstack)


def require_qwen3_vl(model: Any, instead: str) -> None:
    """Raise `UnsupportedModelError` for any other architecture; `instead` names an alternative for the error."""
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind != "qwen3_vl":
        raise UnsupportedModelError(kind, f"only qwen3_vl is supported here. {instead}")


def vision_features(model: Any, items: Sequence[MediaItem]) -> list[VisionFeatures]:
    """Encode images and videos in one pass of the vision tower; one `VisionFeatures` an item."""
    parameter = model.model.visual.pos_embed.weight
    values = torch.from_numpy(float_pixels(items)).to(parameter.device, parameter.dtype)
    grids = torch.from_numpy(np.stack([item[f"{item.modality}_grid_thw"] for item in items])).to(parameter.device)
    output = model.model.get_image_features(values, grids, return_dict=True)
    layers = zip(*output.deepstack_features, strict=True)
    return [VisionFeatures(embeds, deepstack) for embeds, deepstack in zip(output.pooler_output, layers, strict=True)]


def float_pixels(items: Sequence[MediaItem]) -> np.ndarray:
    """The normalised patches of images and videos, one after the other: float32 (patches of all, patch size)."""
    pixels = [normalised(item, PIXELS[item.modality]) for item in items]
    for item, values in zip(items, pixels, strict=True):
        if values.dtype == np.uint8:  # pixels of a server without a known scale
            raise SampleError(
                item.mm_hash,
                "raw uint8 pixels without a scale that converts them to floats; pass "
                "ServerRenderer(scale=PixelScale(...)) with the numbers of preprocessor_config.json",
            )
    return np.concatenate(pixels)


def hidden_states(
    model: Any, rows: PlacedRows, features: Sequence[VisionFeatures], *, cache: Any = None
) -> torch.Tensor:
    """The last layer's hidden states (B, T, hidden) of placed rows; `features` belong to `rows.items`, in order."""
    device = model.device
    embeds = model.model.get_input_embeddings()(torch.from_numpy(rows.input_ids).to(device))
    visual_mask, deepstack = None, None
    if features:
        visual_mask = torch.from_numpy(rows.visual_mask).to(device)
        take = torch.from_numpy(rows.feature_rows).to(device)
        placed = torch.cat([item.embeds for item in features])[take].to(embeds.dtype)
        embeds = embeds.masked_scatter(visual_mask[..., None], placed)
        deepstack = [torch.cat(layer)[take] for layer in zip(*(item.deepstack for item in features), strict=True)]
    output = model.model.language_model(
        inputs_embeds=embeds,
        attention_mask=torch.from_numpy(rows.attention_mask).to(device),
        position_ids=torch.from_numpy(rows.position_ids).to(device),
        visual_pos_masks=visual_mask,
        deepstack_visual_embeds=deepstack,
        past_key_values=cache,
        use_cache=cache is not None,
    )
    hidden: torch.Tensor = output.last_hidden_state
    return hidden


def next_hidden_states(
    model: Any, token_ids: torch.Tensor, positions: torch.Tensor, attention_mask: torch.Tensor, cache: Any
) -> torch.Tensor:
    """One decoding step: ids (B,) at M-RoPE positions (B,) after a cache; returns hidden states (B, hidden).

    `attention_mask` is bool (B, cached + 1).
    """
    output = model.model.language_model(
        inputs_embeds=model.model.get_input_embeddings()(token_ids[:, None]),
        attention_mask=attention_mask,
        position_ids=positions.expand(3, -1)[:, :, None],
        past_key_values=cache,
        use_cache=True,
    )
    hidden: torch.Tensor = output.last_hidden_state[:, -1]
    return hidden
