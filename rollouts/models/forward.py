"""Forward passes through a model's own code, with media placed by range, to the hidden states of the last layer."""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from rollouts.errors import UnsupportedModelError
from rollouts.models.architecture import (
    FORWARD_ERRORS,
    Architecture,
    cache_argument,
    forward_parameters,
    token_type_argument,
)
from rollouts.models.item_features import FeatureCache, encodes_alone, towers
from rollouts.models.media_inputs import media_inputs
from rollouts.models.packed_masks import packed_masks
from rollouts.models.placed_rows import PlacedRows, RowItem
from rollouts.models.placeholders import base_for, base_for_text
from rollouts.models.positions import row_positions

#: Base models that compute only items that are encoded at each of their places.
_undivided: WeakSet[torch.nn.Module] = WeakSet()


def forward_inputs(
    architecture: Architecture,
    rows: PlacedRows,
    module: Any,
    positions: np.ndarray,
    *,
    explicit_masks: bool = False,
    items: Sequence[RowItem] | None = None,
) -> dict[str, Any]:
    """The keyword arguments of the forward of `module`, the model or its base model; on the model's device.

    `input_ids` (B, T); padded rows have `attention_mask` (B, T), packed rows have none: transformers then
    separates sequences where `position_ids` begin again. With `explicit_masks` packed rows have the masks of
    `packed_masks`. `position_ids`, token types and the tensors of the media, or of `items` of them, as far
    as the forward takes them.
    """
    model, takes = architecture.model, forward_parameters(module)
    types = torch.from_numpy(rows.token_types()).to(model.device)
    tensors: dict[str, torch.Tensor] = {"input_ids": torch.from_numpy(rows.input_ids)}
    if not rows.packed:
        tensors["attention_mask"] = torch.from_numpy(rows.attention_mask).long()
    if "position_ids" in takes:
        tensors["position_ids"] = torch.from_numpy(positions)
    placed = rows.items
    if (name := token_type_argument(architecture, module, with_media=bool(placed))) is not None:
        tensors[name] = types
    media = media_inputs(
        rows,
        placed if items is None else items,
        takes=takes,
        model_class=type(module).__name__,
        dtype=model.dtype,
        device=model.device,
        pads_sounds=module is architecture.base and encodes_alone(module),
    )
    masks = {"attention_mask": packed_masks(architecture, rows, types)} if explicit_masks else {}
    return {name: tensor.to(model.device) for name, tensor in tensors.items()} | media | masks


def hidden_states(
    architecture: Architecture,
    rows: PlacedRows,
    *,
    cache: Any = None,
    explicit_masks: bool = False,
    features: FeatureCache | None = None,
) -> tuple[torch.Tensor, np.ndarray]:
    """The last layer's hidden states (B, T, hidden) of placed rows, and the position after each sequence, int64 (N,).

    They come from the model's own base model; `explicit_masks` as in `forward_inputs`. Each distinct item
    passes its tower once, if it is not in `features`, to which it is added. Raises `SampleError` for rows
    that the model cannot take, and `UnsupportedModelError`, with what was tried, if the forward fails.
    """
    positions, following = row_positions(architecture, rows)
    base = architecture.base
    divides = base not in _undivided
    while True:
        items, methods = towers(base, rows, features, divides=divides)
        inputs = forward_inputs(architecture, rows, base, positions, explicit_masks=explicit_masks, items=items)
        run = base_for(architecture, rows, methods)
        try:
            hidden = run_base(architecture, run, inputs, cache=cache, rows=rows)
        except UnsupportedModelError:
            # Also where the forward reads the tensors of items after the tower, or is bound to another object.
            if not divides or not methods or (cache is not None and cache.get_seq_length()):
                raise
            divides = False
        else:
            if not divides:
                _undivided.add(base)
            return hidden, following


def next_hidden_states(
    architecture: Architecture,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    attention_mask: torch.Tensor,
    cache: Any,
) -> torch.Tensor:
    """One decoding step: ids (B,) at positions (B,) after a cache; returns hidden states (B, hidden).

    `attention_mask` is bool (B, cached + 1). Each id is text, a placeholder token too.
    """
    inputs: dict[str, torch.Tensor] = {"input_ids": token_ids[:, None]}
    # Without attention, a mask of all tokens would be multiplied with the state of the new one (Mamba).
    if any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        inputs["attention_mask"] = attention_mask.long()
    if "position_ids" in forward_parameters(architecture.base):
        inputs["position_ids"] = positions.expand(3, -1)[:, :, None] if architecture.mrope else positions[:, None]
    base = base_for_text(architecture, inputs["input_ids"])
    return run_base(architecture, base, inputs, cache=cache)[:, -1]


def run_base(
    architecture: Architecture,
    base: Any,
    inputs: Mapping[str, Any],
    *,
    cache: Any = None,
    rows: PlacedRows | None = None,
) -> torch.Tensor:
    """The hidden states (B, T, hidden) that `base` gives for its keyword arguments; `rows` are named in the error."""
    try:
        output = base(
            **inputs, **{cache_argument(type(base).forward): cache}, use_cache=cache is not None, return_dict=True
        )
    except torch.OutOfMemoryError:
        raise
    except FORWARD_ERRORS as error:
        shapes = ", ".join(_described(name, value) for name, value in inputs.items())
        of_rows = "" if rows is None else f" for {_row_names(rows)}"
        raise UnsupportedModelError(
            architecture.model_type,
            f"{type(base).__name__}.forward failed{of_rows} with {type(error).__name__}: {error}. Tried: "
            f"{shapes}; {'packed' if rows is not None and rows.packed else 'padded'} rows, media by the "
            "tensors of its processor",
        ) from error
    hidden: torch.Tensor = output[0]
    return hidden


def _row_names(rows: PlacedRows) -> str:
    with_media = [sequence.name for sequence in rows.sequences if sequence.media]
    names = ", ".join(with_media or [sequence.name for sequence in rows.sequences])
    return f"the rows {names:.200}{' (those with media)' if with_media else ''}"


def _described(name: str, value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{name} {str(value.dtype)[6:]} {tuple(value.shape)}"
    return f"{name} by {', '.join(value)}"
