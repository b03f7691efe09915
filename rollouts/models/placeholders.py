"""Placeholders by range in models whose own code looks for them by token id."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from rollouts.errors import ArgumentError, SampleError
from rollouts.models.architecture import Architecture
from rollouts.models.placed_rows import PlacedRows


def literal_positions(architecture: Architecture, rows: PlacedRows) -> np.ndarray:
    """bool (B, T): tokens with the id of a placeholder outside every range; the policy sampled them, they are text."""
    literal: np.ndarray = rows.attention_mask & (rows.token_types() == 0) & _has_placeholder_id(architecture, rows)
    return literal


def check_placeholders(architecture: Architecture, rows: PlacedRows) -> None:
    """Raise `SampleError`, which names row and token, where a range covers a token with another id."""
    wrong = (rows.token_types() > 0) & ~_has_placeholder_id(architecture, rows)
    if not wrong.any():
        return
    row, column = np.argwhere(wrong)[0]
    sequence = rows.sequences[rows.sequence_ids[row, column]]
    ids = ", ".join(map(str, sorted(architecture.placeholder_ids))) or "none"
    raise SampleError(
        sequence.name,
        f"the token at position {rows.position_ids[row, column]} is in the range of an image or video and has id "
        f"{rows.input_ids[row, column]}; the placeholder ids of {architecture.model_type} are: {ids}. Render the row "
        "with the files of this model",
    )


def check_token_ids(architecture: Architecture, rows: PlacedRows) -> None:
    """Raise `SampleError`, which names row and token, for the id of a text token that has no row in the embeddings, and
    `ArgumentError` for such an id on padding.
    """
    count = getattr(architecture.model.get_input_embeddings(), "num_embeddings", None)
    if not isinstance(count, int):
        return
    wrong = (rows.input_ids < 0) | (rows.input_ids >= count)
    if not wrong.any() or not (wrong := wrong & (rows.token_types() == 0)).any():
        return
    row, column = np.argwhere(wrong)[0]
    if rows.sequence_ids[row, column] < 0:
        rule = f"the embeddings of {architecture.model_type} have ids from 0 to {count - 1}; pass one of them"
        raise ArgumentError("pad_id", int(rows.input_ids[row, column]), rule)
    raise SampleError(
        rows.sequences[rows.sequence_ids[row, column]].name,
        f"the token at position {rows.position_ids[row, column]} has id {rows.input_ids[row, column]}, and the "
        f"embeddings of {architecture.model_type} have ids from 0 to {count - 1}. Render the row with the files of "
        "this model, or resize its embeddings (resize_token_embeddings)",
    )


def refuse_literals(architecture: Architecture, rows: PlacedRows, consequence: str) -> None:
    """Raise `SampleError` for the first literal placeholder token; `consequence` says why, and what to do."""
    literal = literal_positions(architecture, rows)
    if not literal.any():
        return
    row, column = np.argwhere(literal)[0]
    raise SampleError(
        rows.sequences[rows.sequence_ids[row, column]].name,
        f"the token at position {rows.position_ids[row, column]} has id {rows.input_ids[row, column]}, a placeholder "
        f"token outside every image and video (the policy sampled it); {consequence}",
    )


def base_for(architecture: Architecture, rows: PlacedRows) -> Any:
    """The base model, or a shallow copy of it whose search for placeholders finds them by range.

    The copy is needed for literal placeholder tokens, and for rows with images and videos in a model that has one id
    for both. It shares parameters, submodules and hooks with the base model and is used for one forward pass, so that
    other threads are not affected. Raises `SampleError` for a literal token in a model without a known search.
    """
    items = [each.item for each in rows.items()]
    separate = {"pixel_values", "pixel_values_videos"} <= {name for item in items for name in item}
    # Padding counts: the padding id may be a placeholder's.
    outside = (rows.token_types() == 0) & _has_placeholder_id(architecture, rows)
    if not outside.any() and not separate:
        return architecture.base
    if architecture.search is None:
        refuse_literals(
            architecture,
            rows,
            f"{type(architecture.base).__name__} has no known method that searches for placeholders (tried: "
            "get_placeholder_mask, inputs_merger), and would take it for an image. Leave this row out",
        )
        return architecture.base
    placed = torch.zeros(rows.input_ids.shape, dtype=torch.bool)
    videos = torch.zeros_like(placed)
    for each in rows.items():
        for start, end in each.placeholder.runs:
            placed[each.row, start:end] = True
            videos[each.row, start:end] = "pixel_values_videos" in each.item
    return _searching(architecture, architecture.search, torch.from_numpy(rows.input_ids), placed, videos)


def base_for_text(architecture: Architecture, token_ids: torch.Tensor) -> Any:
    """The base model for ids (B, T) that are all text; a copy, as of `base_for`, if one has a placeholder's id."""
    if architecture.search is None or not architecture.placeholder_ids:
        return architecture.base
    literal = torch.isin(token_ids, torch.tensor(sorted(architecture.placeholder_ids), device=token_ids.device))
    if not bool(literal.any()):
        return architecture.base
    nothing = torch.zeros_like(literal)
    return _searching(architecture, architecture.search, token_ids, nothing, nothing)


def _searching(
    architecture: Architecture, name: str, token_ids: torch.Tensor, placed: torch.Tensor, videos: torch.Tensor
) -> Any:
    """A copy of the base model that passes ids to its method `name` in which only `placed` tokens are placeholders.

    For the features of images, placeholders of `videos` are left out, and the reverse. All are (B, T).
    """
    device = architecture.model.device
    ids, placed, videos = token_ids.to(device), placed.to(device), videos.to(device)
    original = getattr(architecture.base, name)

    def search(*args: Any, **kwargs: Any) -> Any:
        found = placed
        if kwargs.get("image_features") is not None:
            found = placed & ~videos
        elif kwargs.get("video_features") is not None:
            found = placed & videos
        searched = torch.where(found, ids, architecture.neutral_id)
        if args:
            return original(searched, *args[1:], **kwargs)
        return original(**{**kwargs, "input_ids": searched})

    base = copy.copy(architecture.base)
    setattr(base, name, search)
    return base


def _has_placeholder_id(architecture: Architecture, rows: PlacedRows) -> np.ndarray:
    return np.isin(rows.input_ids, sorted(architecture.placeholder_ids))
