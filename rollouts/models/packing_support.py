"""How a model keeps the sequences of a packed row apart, found with a probe of two sequences."""

from __future__ import annotations

from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch

from rollouts.errors import UnsupportedModelError
from rollouts.models.architecture import Architecture, forward_parameters, same_random_numbers, token_type_argument
from rollouts.models.forward import forward_inputs, run_base
from rollouts.models.packed_masks import packed_masks
from rollouts.models.placed_rows import TokenRow, placed_rows
from rollouts.models.positions import row_positions

#: How the sequences of a packed row are kept apart: by positions that begin again and no attention mask; by
#: masks with a block for each sequence.
Packing = Literal["positions", "masks"]

_PACKINGS: tuple[Packing, ...] = ("positions", "masks")

_known: WeakKeyDictionary[torch.nn.Module, dict[tuple[str, bool], Packing | None]] = WeakKeyDictionary()


_LENGTH = 6
# Token types of the two sequences of the probe, and of the one that replaces the first.
_TYPES = ([0, 0, 0, 1, 1, 0], [0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0])


def packing_of(architecture: Architecture, *, with_media: bool) -> Packing | None:
    """How the hidden states of a sequence become independent of the one before it in a packed row, if at all.

    transformers separates attention where positions begin again. Some classes do not pass the positions to
    their masks, or lose them where images are attended in both directions (`with_media`): they get masks.
    Layers with a recurrent state are not separated by either. At first use, for each implementation of
    attention, the model runs on two sequences of six tokens of which the first differs.
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
    # The second sequence may change by this part of the change of the first: matrix products of low precision
    # round differently for other rows of a batch of experts.
    return bool(kept <= 1e-3 * changed)


def _states(
    architecture: Architecture, packing: Packing, first: np.ndarray, second: np.ndarray, types: list[int]
) -> torch.Tensor:
    """Hidden states (12, H) of two sequences in one row; with equal random numbers for dropout."""
    rows = placed_rows([TokenRow(first), TokenRow(second)], pad_id=0, layout="packed")
    inputs = forward_inputs(architecture, rows, architecture.base, row_positions(architecture, rows)[0])
    given = torch.tensor([types], device=architecture.model.device)
    if (name := token_type_argument(architecture, architecture.base)) is not None:
        inputs[name] = given
    if packing == "masks":
        inputs["attention_mask"] = packed_masks(architecture, rows, given)
    with torch.no_grad(), same_random_numbers(architecture):
        return run_base(architecture, architecture.base, inputs, rows=rows)[0].float()
