"""Sounds by range, each by itself, in models whose code merges them by token id or in padded batches."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from renderers.placement import PlacedItem
from rollouts.errors import SampleError
from rollouts.models.architecture import EXTEND, MERGE, Architecture
from rollouts.models.item_features import are_padded
from rollouts.models.placed_rows import PlacedRows


def merging(base: Any, neutral_id: int, token_ids: torch.Tensor, placed: torch.Tensor) -> Mapping[str, Any]:
    """Attributes for Qwen2-Audio's `base`: it finds no placeholder, and then merges the features at `placed` (B, T)."""

    def forward(input_ids: torch.Tensor, position_ids: torch.Tensor, **inputs: Any) -> Any:
        def merge(features: torch.Tensor, counts: torch.Tensor, embeds: Any, _: Any, mask: Any, labels: Any) -> Any:
            valid = torch.arange(features.shape[1], device=features.device) < counts.to(features.device)[:, None]
            text = base.get_input_embeddings()(token_ids)
            merged = text.masked_scatter(placed[..., None], features[valid].to(text.device, text.dtype))
            return merged, mask, labels, position_ids, token_ids

        vars(base)[MERGE] = merge
        nothing = torch.full_like(token_ids, neutral_id)
        logger = logging.getLogger(type(base).__module__)
        logger.addFilter(_is_no_advice)
        try:
            return type(base).forward(base, input_ids=nothing, position_ids=position_ids, **inputs)
        finally:
            logger.removeFilter(_is_no_advice)

    return {"forward": forward}


def _is_no_advice(record: logging.LogRecord) -> bool:
    """False for the advice to expand placeholders: they are, and the model was not shown them."""
    return "Expanding inputs for audio tokens" not in record.getMessage()


def extending(base: Any, neutral_id: int, rows: PlacedRows, tokens: torch.Tensor) -> Mapping[str, Any]:
    """Attributes for Phi-4's `base`: sounds are encoded one by one, each with the projection of its own row.

    The model has one for sounds, and one for sounds beside images; its code takes the second for all sounds
    of a batch with an image. `tokens` are the ids (B, T).
    """
    placed = rows.items
    seeing = {each.sequence for each in placed if each.item.modality == "image"}
    inner = getattr(base, EXTEND)

    def only(*modalities: str, number: int | None = None) -> torch.Tensor:
        found = torch.full_like(tokens, neutral_id)
        for index, each in enumerate(placed):
            if each.item.modality in modalities and number in (None, index):
                for run in each.placeholder.runs:
                    found[each.row, slice(*run)] = tokens[each.row, slice(*run)]
        return found

    def extend(input_ids: torch.Tensor, inputs_embeds: torch.Tensor, **tensors: Any) -> torch.Tensor:
        if tensors["image_pixel_values"] is not None:
            images = {name: value for name, value in tensors.items() if name.startswith("image_")}
            inputs_embeds = inner.image_embed(only("image"), inputs_embeds, **images)
        numbers = [number for number, each in enumerate(placed) if each.item.modality == "audio"]
        for index, number in enumerate(numbers):
            each = placed[number]
            frames = each.item["audio_input_features"].shape[0]
            inputs_embeds = inner.audio_embed(
                only("audio", number=number),
                inputs_embeds,
                audio_input_features=tensors["audio_input_features"][index : index + 1, :frames],
                audio_embed_sizes=tensors["audio_embed_sizes"][index : index + 1],
                audio_projection_mode="vision" if each.sequence in seeing else "speech",
            )
        return inputs_embeds

    return {EXTEND: extend} if placed else {}


def length_heard_otherwise(search: str | None, media: Sequence[PlacedItem]) -> int:
    """How many first tokens of a sequence Phi-4 sampled with other features of its sounds than the whole has.

    Those are the tokens before the first image, if a sound is among them; else 0.
    """
    first = {item.modality: placeholder.offset for item, placeholder in reversed(media)}
    image = first.get("image", 0)
    return image if search == EXTEND and first.get("audio", image) < image else 0


def refuse_changed_sounds(architecture: Architecture, rows: PlacedRows, trained: np.ndarray) -> None:
    """Raise `SampleError` for sounds of which the model's own forward makes other features in this batch than
    alone, or than those that tokens in `trained`, bool (B, T), were sampled with.
    """
    placed = rows.items
    sounds = [each for each in placed if each.item.has_sound]
    seeing = {each.sequence for each in placed if each.item.modality == "image"}
    # Model types whose towers let the padding of a batch change the features of a shorter sound.
    if architecture.model_type in {"phi4_multimodal", "qwen3_omni_moe_thinker"} and are_padded(
        [each.item for each in sounds]
    ):
        beside = "sounds of other lengths"
    elif architecture.search == EXTEND and len({each.sequence in seeing for each in sounds}) > 1:
        beside = "rows with images and rows without"
    elif any(
        trained[row, column : column + length_heard_otherwise(architecture.search, sequence.media)].any()
        for sequence, (row, column) in zip(rows.sequences, rows.starts, strict=True)
    ):
        beside = "an image behind what was sampled from it"
    else:
        return
    raise SampleError(
        rows.sequences[sounds[-1].sequence].name,
        f"its sound is in a batch with {beside}, which would change the features of a sound in the forward "
        f"of {architecture.model_type}. Compute the batch with token_logprobs, or make batches of rows that "
        "are alike",
    )
