"""Placeholders by range in models whose own code looks for them by token id."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from renderers import MediaItem
from renderers.rendered import TOKEN_TYPE_IDS
from rollouts.errors import ArgumentError, SampleError
from rollouts.models.architecture import EXTEND, MERGE, SEARCHES, Architecture, parameters_of, shallow_copy
from rollouts.models.placed_rows import PlacedRows
from rollouts.models.sounds_by_range import extending, merging


def literal_positions(architecture: Architecture, rows: PlacedRows) -> np.ndarray:
    """bool (B, T): tokens with the id of a placeholder outside every range; the policy sampled them, they are text."""
    literal: np.ndarray = rows.attention_mask & (rows.token_types() == 0) & _has_placeholder_id(architecture, rows)
    return literal


def check_placeholders(architecture: Architecture, rows: PlacedRows) -> None:
    """Raise `SampleError`, which names row and token, where a range covers a token with another id."""
    wrong = (rows.token_types() > 0) & ~_has_placeholder_id(architecture, rows)
    if not wrong.any():
        return
    ids = ", ".join(map(str, sorted(architecture.placeholder_ids))) or "none"
    raise _first_error(
        rows,
        wrong,
        f"in the range of an image, video or sound; the placeholder ids of {architecture.model_type} are: "
        f"{ids}. Render the row with the files of this model",
    )


def check_token_ids(architecture: Architecture, rows: PlacedRows) -> None:
    """Raise `SampleError`, which names row and token, for the id of a text token that has no row in the
    embeddings, and `ArgumentError` for such an id on padding.
    """
    count = getattr(architecture.model.get_input_embeddings(), "num_embeddings", None)
    if not isinstance(count, int):
        return
    wrong = (rows.input_ids < 0) | (rows.input_ids >= count)
    if not wrong.any() or not (wrong := wrong & (rows.token_types() == 0)).any():
        return
    known = f"the embeddings of {architecture.model_type} have ids from 0 to {count - 1}"
    row, column = np.argwhere(wrong)[0]
    if rows.sequence_ids[row, column] < 0:
        raise ArgumentError("pad_id", int(rows.input_ids[row, column]), f"{known}; pass one of them")
    cure = "Render the row with the files of this model, or resize its embeddings (resize_token_embeddings)"
    raise _first_error(rows, wrong, f"and {known}. {cure}")


def refuse_literals(architecture: Architecture, rows: PlacedRows, consequence: str) -> None:
    """Raise `SampleError` for the first literal placeholder token; `consequence` says why, and what to do."""
    literal = literal_positions(architecture, rows)
    if not literal.any():
        return
    reason = f"a placeholder token outside every image, video and sound (the policy sampled it); {consequence}"
    raise _first_error(rows, literal, reason)


def _first_error(rows: PlacedRows, wrong: np.ndarray, reason: str) -> SampleError:
    """The error of the first token in `wrong`, bool (B, T): its row, place and id, and the reason."""
    row, column = np.argwhere(wrong)[0]
    token = f"the token at position {rows.position_ids[row, column]} has id {rows.input_ids[row, column]}"
    return SampleError(rows.sequences[rows.sequence_ids[row, column]].name, f"{token}, {reason}")


def base_for(architecture: Architecture, rows: PlacedRows, methods: Mapping[str, Any]) -> Any:
    """The base model, or a shallow copy that finds placeholders by range and has `methods` (see `towers`).

    The copy is needed for literal placeholder tokens, for rows with images and videos in a model that has one
    id for both, and for items that are encoded once. It shares parameters, submodules and hooks with the base
    model and is used for one forward pass, so that other threads are not affected. Raises `SampleError` for a
    literal token in a model without a known search.
    """
    base = shallow_copy(architecture.base)
    replaced = {**_search_by_range(architecture, base, rows), **methods}
    vars(base).update(replaced)  # a module's own assignment refuses a function in the place of a submodule
    return base if replaced else architecture.base


def _search_by_range(architecture: Architecture, base: Any, rows: PlacedRows) -> Mapping[str, Any]:
    """What replaces attributes of `base`; empty where its own search finds the ranges of `rows`."""
    items = [each.item for each in rows.items]
    separate = {"pixel_values", "pixel_values_videos"} <= {name for item in items for name in item}
    types = rows.token_types()
    # Padding counts: the padding id may be a placeholder's.
    outside = bool(((types == 0) & _has_placeholder_id(architecture, rows)).any())
    ids = torch.from_numpy(rows.input_ids).to(architecture.model.device)
    if architecture.search == EXTEND:
        return extending(base, architecture.neutral_id, rows, ids)
    if architecture.search == MERGE:
        if not items or (not outside and (types[:, :-1] & types[:, 1:]).any()):
            return {}
        return merging(base, architecture.neutral_id, ids, torch.from_numpy(types > 0).to(ids.device))
    if not outside and not separate:
        return {}
    if architecture.search is None:
        refuse_literals(
            architecture,
            rows,
            f"{type(architecture.base).__name__} has no known method that searches for placeholders (tried: "
            f"{', '.join(SEARCHES)}), and would take it for an image or sound. Leave this row out",
        )
        return {}
    kinds = torch.zeros(rows.input_ids.shape, dtype=torch.int64)
    for each in rows.items:
        for start, end in each.placeholder.runs:
            kinds[each.row, start:end] = _kind(each.item)
    return _searching(architecture, architecture.search, ids, kinds.to(ids.device))


def _kind(item: MediaItem) -> int:
    """The token type of the features of an item: some models take the frames of a video as images."""
    is_image = item.modality == "video" and "pixel_values_videos" not in item
    return TOKEN_TYPE_IDS["image" if is_image else item.modality]


def base_for_text(architecture: Architecture, token_ids: torch.Tensor) -> Any:
    """The base model for ids (B, T) of text; a copy, as of `base_for`, if one has a placeholder's id."""
    if architecture.search in (None, MERGE, EXTEND) or not architecture.placeholder_ids:
        return architecture.base  # the last two merge nothing without features
    literal = torch.isin(token_ids, torch.tensor(sorted(architecture.placeholder_ids), device=token_ids.device))
    if not bool(literal.any()):
        return architecture.base
    base = shallow_copy(architecture.base)
    vars(base).update(_searching(architecture, str(architecture.search), token_ids, torch.zeros_like(token_ids)))
    return base


def _searching(
    architecture: Architecture, name: str, token_ids: torch.Tensor, kinds: torch.Tensor
) -> Mapping[str, Any]:
    """The method `name` of the base model, which finds only tokens with a kind. Both are (B, T).

    For the features of one modality, only those of its kind are found.
    """
    original = getattr(architecture.base, name)

    def search(*args: Any, **kwargs: Any) -> Any:
        found = kinds > 0
        for modality, kind in TOKEN_TYPE_IDS.items():
            if kwargs.get(f"{modality}_features") is not None:
                found = kinds == kind
        searched = torch.where(found, token_ids, architecture.neutral_id)
        if args:
            return original(searched, *args[1:], **kwargs)
        return original(**{**kwargs, "input_ids": searched})

    replaced = {name: search}
    features = getattr(architecture.base, "get_audio_features", None)
    # MusicFlamingo searches the ids for the times of its frames, too.
    if features is not None and "input_ids" in parameters_of(features):
        ids = torch.where(kinds == TOKEN_TYPE_IDS["audio"], token_ids, architecture.neutral_id)
        replaced["get_audio_features"] = lambda *args, **kwargs: features(*args, **{**kwargs, "input_ids": ids})
    return replaced


def _has_placeholder_id(architecture: Architecture, rows: PlacedRows) -> np.ndarray:
    return np.isin(rows.input_ids, sorted(architecture.placeholder_ids))
