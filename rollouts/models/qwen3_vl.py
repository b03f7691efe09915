"""A faster forward pass for Qwen3-VL, with the same result as the generic one: each distinct image is encoded once.

Calls the same modules of transformers' `Qwen3VLForConditionalGeneration` in the same order as its own
`forward`, which finds placeholders by token id and encodes an image once for every row that contains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from renderers import MediaItem
from rollouts.models.architecture import cache_argument
from rollouts.models.media_inputs import float_pixels
from rollouts.models.placed_rows import PlacedRows
from rollouts.models.positions import mrope_positions

MODEL_TYPE = "qwen3_vl"


class VisionFeatures(NamedTuple):
    """Merged features (tokens, hidden) and the deepstack features of each tapped vision layer, same shape."""

    embeds: torch.Tensor
    deepstack: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        return self.embeds.nbytes + sum(layer.nbytes for layer in self.deepstack)


class _Placement(NamedTuple):
    """`position_ids` int64 (3, B, T), or (4, B, T) for packed rows; `following` int64 (N,), the position
    after each sequence; `visual` bool (B, T), True on placeholder tokens; `feature_rows` int64 (number of
    True,), the row in the concatenated features of the distinct items for each of them.
    """

    position_ids: np.ndarray
    following: np.ndarray
    visual: np.ndarray
    feature_rows: np.ndarray


def distinct_items(rows: PlacedRows) -> list[MediaItem]:
    """Each image and video once, in the order of rows and columns."""
    return list({each.item.mm_hash: each.item for each in rows.items()}.values())


def vision_features(model: Any, items: Sequence[MediaItem]) -> list[VisionFeatures]:
    """Encode images and videos in one pass of the vision tower; one `VisionFeatures` an item."""
    parameter = model.model.visual.pos_embed.weight
    values = torch.from_numpy(float_pixels(items)).to(parameter.device, parameter.dtype)
    grids = torch.from_numpy(np.stack([item[f"{item.modality}_grid_thw"] for item in items])).to(parameter.device)
    output = model.model.get_image_features(values, grids, return_dict=True)
    sizes = [len(embeds) for embeds in output.pooler_output]
    # Earlier releases of transformers 5 return the features of a layer for all items together.
    layers = [torch.split(layer, sizes) if torch.is_tensor(layer) else layer for layer in output.deepstack_features]
    return [
        VisionFeatures(embeds, deepstack)
        for embeds, deepstack in zip(output.pooler_output, zip(*layers, strict=True), strict=True)
    ]


def hidden_states(
    model: Any, rows: PlacedRows, features: Sequence[VisionFeatures], *, cache: Any = None, masks: Any = None
) -> tuple[torch.Tensor, np.ndarray]:
    """The last layer's hidden states (B, T, hidden), and the position after each whole sequence, int64 (N,).

    `features` are those of `distinct_items(rows)`, in order; `masks`, of `packed_masks`, for packed rows.
    """
    device = model.device
    if not rows.packed:
        masks = torch.from_numpy(rows.attention_mask).to(device)
    placement = _placement(model, rows)
    embeds = model.model.get_input_embeddings()(torch.from_numpy(rows.input_ids).to(device))
    visual_mask, deepstack = None, None
    if features:
        visual_mask = torch.from_numpy(placement.visual).to(device)
        take = torch.from_numpy(placement.feature_rows).to(device)
        placed = torch.cat([item.embeds for item in features])[take].to(embeds.dtype)
        embeds = embeds.masked_scatter(visual_mask[..., None], placed)
        deepstack = [torch.cat(layer)[take] for layer in zip(*(item.deepstack for item in features), strict=True)]
    language_model = model.model.language_model
    output = language_model(
        inputs_embeds=embeds,
        attention_mask=masks,
        position_ids=torch.from_numpy(placement.position_ids).to(device),
        visual_pos_masks=visual_mask,
        deepstack_visual_embeds=deepstack,
        **{cache_argument(language_model.forward): cache},
        use_cache=cache is not None,
    )
    hidden: torch.Tensor = output.last_hidden_state
    return hidden, placement.following


def next_hidden_states(
    model: Any, token_ids: torch.Tensor, positions: torch.Tensor, attention_mask: torch.Tensor, cache: Any
) -> torch.Tensor:
    """One decoding step: ids (B,) at M-RoPE positions (B,) after a cache; returns hidden states (B, hidden).

    `attention_mask` is bool (B, cached + 1).
    """
    language_model = model.model.language_model
    output = language_model(
        # By embeddings, because a sampled placeholder token is text.
        inputs_embeds=model.model.get_input_embeddings()(token_ids[:, None]),
        attention_mask=attention_mask,
        position_ids=positions.expand(3, -1)[:, :, None],
        **{cache_argument(language_model.forward): cache},
        use_cache=True,
    )
    hidden: torch.Tensor = output.last_hidden_state[:, -1]
    return hidden


def _placement(model: Any, rows: PlacedRows) -> _Placement:
    merge_size = model.config.vision_config.spatial_merge_size
    positions = np.zeros((3, *rows.input_ids.shape), dtype=np.int64)
    following = np.zeros(len(rows.paths), dtype=np.int64)
    for index, path in enumerate(rows.paths):
        own, following[index] = mrope_positions(len(path.sequence), path.sequence.media, merge_size)
        positions[:, path.row, path.columns[path.shared :]] = own[:, path.shared :]
    if rows.packed:
        positions = np.concatenate([rows.position_ids[None], positions])
    first_row: dict[str, int] = {}
    feature_rows = [np.empty(0, dtype=np.int64)]
    total = 0
    for each in rows.items():
        if each.item.mm_hash not in first_row:
            first_row[each.item.mm_hash] = total
            total += each.item.num_tokens
        feature_rows.append(np.arange(each.item.num_tokens) + first_row[each.item.mm_hash])
    return _Placement(positions, following, rows.token_types() > 0, np.concatenate(feature_rows))
