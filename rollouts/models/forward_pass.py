"""One model's forward passes: the generic ones, or the faster ones of Qwen3-VL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from renderers import MediaItem
from rollouts.errors import UnsupportedModelError
from rollouts.models import forward, qwen3_vl
from rollouts.models.architecture import (
    Architecture,
    architecture,
    forward_parameters,
    same_random_numbers,
    token_type_argument,
)
from rollouts.models.forward import forward_inputs, run_base
from rollouts.models.output_head import OutputHead, output_head
from rollouts.models.placed_rows import PlacedRows, TokenSequence, packed_masks, placed_rows, row_positions
from rollouts.models.placeholders import check_placeholders, check_token_ids
from rollouts.models.qwen3_vl import VisionFeatures

#: How the sequences of a packed row are kept apart: by positions that begin again and no attention mask; by masks with
#: a block for each sequence.
Packing = Literal["positions", "masks"]
_PACKINGS: tuple[Packing, ...] = ("positions", "masks")
_known: WeakKeyDictionary[torch.nn.Module, dict[tuple[str, bool], Packing | None]] = WeakKeyDictionary()
# The second sequence may change by this part of the change of the first: matrix products of low precision round
# differently for other rows of a batch of experts.
_TOLERANCE = 1e-3
_LENGTH = 6
# Token types of the two sequences of the probe, and of the one that replaces the first.
_TYPES = ([0, 0, 0, 1, 1, 0], [0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0])


def packing_of(architecture: Architecture, *, with_media: bool) -> Packing | None:
    """How the hidden states of a sequence become independent of the sequence before it in a packed row, if at all.

    transformers separates attention where positions begin again. Some classes do not pass the positions to their masks,
    or lose them where images are attended in both directions (`with_media`): they get masks. Layers with a recurrent
    state are not separated by either. At first use, for each implementation of attention, the model runs on two
    sequences of six tokens of which the first differs.
    """
    results = _known.setdefault(architecture.model, {})
    attention = str(getattr(architecture.text_config, "_attn_implementation", None))
    # With M-RoPE the token types only matter for positions, which are given.
    types = token_type_argument(architecture, architecture.base, with_media=with_media)
    with_types = with_media and not architecture.mrope and types is not None
    if (attention, with_types) not in results:
        ways = (way for way in _PACKINGS if _separates(architecture, way, with_types))
        results[attention, with_types] = next(ways, None)
    return results[attention, with_types]


def _separates(architecture: Architecture, packing: Packing, with_types: bool) -> bool:
    if "position_ids" not in forward_parameters(architecture.base):
        return False
    usual = [token for token in range(3 * _LENGTH) if token not in architecture.placeholder_ids]
    first, second, other = (np.array(usual[part * 4 : part * 4 + _LENGTH]) for part in range(3))
    types = _TYPES if with_types else ([0] * _LENGTH,) * 3
    try:
        one = _states(architecture, packing, first, second, [*types[0], *types[1]])
        two = _states(architecture, packing, other, second, [*types[2], *types[1]])
    except UnsupportedModelError:  # it takes no such masks, or makes none
        return False
    changed, kept = ((one[part] - two[part]).abs().max() for part in (slice(_LENGTH), slice(_LENGTH, None)))
    return bool(kept <= _TOLERANCE * changed)


def _states(
    architecture: Architecture, packing: Packing, first: np.ndarray, second: np.ndarray, types: list[int]
) -> torch.Tensor:
    """Hidden states (12, H) of two sequences in one row; with the same random numbers for dropout in each call."""
    starts = np.array([[0, 0], [0, _LENGTH]], dtype=np.int64)
    sequences = [TokenSequence(first), TokenSequence(second)]
    rows = placed_rows(sequences, starts, (1, 2 * _LENGTH), pad_id=0, packed=True)
    inputs = forward_inputs(architecture, rows, architecture.base, row_positions(architecture, rows)[0])
    given = torch.tensor([types], device=architecture.model.device)
    if (name := token_type_argument(architecture, architecture.base)) is not None:
        inputs[name] = given
    if packing == "masks":
        inputs["attention_mask"] = packed_masks(architecture, rows, given)
    with torch.no_grad(), same_random_numbers(architecture):
        return run_base(architecture, architecture.base, inputs, rows=rows)[0].float()


EncodeImages = Callable[[Sequence[MediaItem]], list[VisionFeatures]]


class Prefill(NamedTuple):
    """Hidden states (B, T, hidden) of prompts, and int64 (B,) the position of each prompt's next token."""

    hidden: torch.Tensor
    following: torch.Tensor


class ForwardPass:
    """The forward passes of a model of transformers, with media placed by range.

    Raises `UnsupportedModelError` for a model without a separate output layer, or with one that does more than a linear
    layer, a scale and soft-capping.
    """

    def __init__(self, model: Any) -> None:
        self.architecture: Architecture = architecture(model)
        self.model = self.architecture.model
        output_head(self.architecture)  # checked now, and not when it is needed
        self._is_qwen3_vl = self.architecture.model_type == qwen3_vl.MODEL_TYPE

    @property
    def head(self) -> OutputHead:
        """The output layer that the model has now, with the adapter that is in it."""
        return output_head(self.architecture)

    def hidden_states(self, rows: PlacedRows) -> torch.Tensor:
        """The last layer's hidden states (B, T, hidden). Differentiable. Packed rows where `packing_of` is not None.

        Raises `SampleError` for rows that the model cannot take, `UnsupportedModelError` if its forward fails.
        """
        check_placeholders(self.architecture, rows)
        check_token_ids(self.architecture, rows)
        with_media = any(sequence.media for sequence in rows.sequences)
        explicit_masks = rows.packed and packing_of(self.architecture, with_media=with_media) == "masks"
        if self._is_qwen3_vl and not explicit_masks:
            return qwen3_vl.hidden_states(self.model, rows, self.encode(qwen3_vl.distinct_items(rows)))[0]
        return forward.generic_hidden_states(self.architecture, rows, explicit_masks=explicit_masks)[0]

    def prefill(self, rows: PlacedRows, cache: Any, encode: EncodeImages) -> Prefill:
        """Run prompts, one a row, padded on the left, and fill the cache; `encode` gives the features of Qwen3-VL."""
        check_placeholders(self.architecture, rows)
        if self._is_qwen3_vl:
            features = encode(qwen3_vl.distinct_items(rows))
            hidden, following = qwen3_vl.hidden_states(self.model, rows, features, cache=cache)
        else:
            hidden, following = forward.generic_hidden_states(self.architecture, rows, cache=cache)
        return Prefill(hidden, torch.from_numpy(following).to(self.model.device))

    def next_hidden_states(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention_mask: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        """One decoding step: ids (B,) at positions (B,) after a cache; returns hidden states (B, hidden).

        `attention_mask` is bool (B, cached + 1).
        """
        if self._is_qwen3_vl:
            return qwen3_vl.next_hidden_states(self.model, token_ids, positions, attention_mask, cache)
        return forward.generic_next_hidden_states(self.architecture, token_ids, positions, attention_mask, cache)

    def encode(self, items: Sequence[MediaItem]) -> list[VisionFeatures]:
        """The features of images and videos for Qwen3-VL's forward; an empty list for no items."""
        return qwen3_vl.vision_features(self.model, items) if items else []
