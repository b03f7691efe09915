"""How a model keeps the sequences of a row apart, packed or in a tree, found with probes of a few tokens."""

import math
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch

from rollouts.errors import UnsupportedModelError
from rollouts.models.architecture import (
    Architecture,
    attends_by_types,
    forward_parameters,
    same_random_numbers,
    token_type_argument,
)
from rollouts.models.forward import forward_inputs, run_base
from rollouts.models.output_head import relative_difference, tolerance
from rollouts.models.packed_masks import FLEX_ATTENTION, packed_masks
from rollouts.models.placed_rows import PlacedRows, TokenRow, placed_rows
from rollouts.models.positions import row_positions
from rollouts.models.prefix_tree import tree_of, tree_rows

#: How the sequences of a packed row are kept apart: by positions that begin again and no attention mask; by
#: masks with a block for each sequence.
Packing = Literal["positions", "masks"]

_PACKINGS: tuple[Packing, ...] = ("positions", "masks")

_known: WeakKeyDictionary[torch.nn.Module, dict[tuple[str, bool], Packing | None]] = WeakKeyDictionary()
_sharing: WeakKeyDictionary[torch.nn.Module, dict[tuple[str, bool], bool]] = WeakKeyDictionary()


_LENGTH = 6
# Token types of the two sequences of the probe, and of the one that replaces the first.
_TYPES = ([0, 0, 0, 1, 1, 0], [0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0])


def packing_of(architecture: Architecture, *, with_media: bool, columns: int = 0) -> Packing | None:
    """How the hidden states of a sequence become independent of the one before it in a row of `columns`, if at all.

    transformers separates attention where positions begin again. Some classes do not pass the positions to
    their masks, or lose them where images are attended in both directions (`with_media`): they get masks.
    Layers with a recurrent state are not separated by either. At first use, for each implementation of
    attention, the model runs on two sequences of six tokens of which the first differs.
    """
    # Both count along the row, further than a probe shows; Falcon's biases are of bfloat16.
    has_biases = architecture.model_type == "falcon" and architecture.text_config.alibi
    if has_biases or columns >= (architecture.floor_scale or math.inf):
        return None
    results, key = _known.setdefault(architecture.model, {}), _case(architecture, with_media)
    if key not in results:
        ways = (way for way in _PACKINGS if _separates(architecture, way, key[1]))
        results[key] = next(ways, None)
    return results[key]


def shares_prefixes(architecture: Architecture, *, with_media: bool) -> bool:
    """Whether hidden states of two branches in one row, with masks, are those of the branches alone.

    At first use, for each implementation of attention, the model runs on branches of twelve tokens that share
    six. Models with layers that take no such mask (a recurrent state, FlashAttention) do not, and FlexAttention
    does not where images are attended in both directions.
    """
    results, key = _sharing.setdefault(architecture.model, {}), _case(architecture, with_media)
    if key not in results:
        # Other implementations read no such mask; a kernel on a GPU could take its values for indices.
        takes_masks = key[0] in ("sdpa", "eager", FLEX_ATTENTION) and not _counts_along_rows(architecture)
        results[key] = takes_masks and _computes_trees(architecture, key[1])
    return results[key]


def _case(architecture: Architecture, with_media: bool) -> tuple[str, bool]:
    """The implementation of attention, and whether token types change what a token sees."""
    return architecture.attention, with_media and attends_by_types(architecture)


def _counts_along_rows(architecture: Architecture) -> bool:
    """Whether layers count further along the row than a probe shows, whatever the mask says.

    GPT-Neo's windows and the pools of DeepSeek V4's compressed attention are columns of the row; Moshi's forward
    has no window, but the masks that transformers makes for it have.
    """
    config = architecture.text_config
    return config.model_type in ("gpt_neo", "moshi") or hasattr(config, "compress_rates")


def _computes_trees(architecture: Architecture, with_types: bool) -> bool:
    if "position_ids" not in forward_parameters(architecture.base):
        return False
    begin, first, second, other = _texts(architecture, 4)
    types = _TYPES if with_types else ([0] * _LENGTH,) * 3
    branch = np.concatenate([begin, second])
    try:
        one, two = (
            _tree_states(architecture, np.concatenate([begin, sibling]), branch, [*types[0], *own, *types[1]])
            for sibling, own in ((first, types[0]), (other, types[2]))
        )
        alone = placed_rows([TokenRow(branch)], pad_id=0, layout="packed")
        expected = _states(architecture, alone, [*types[0], *types[1]], masks=with_types)
    except UnsupportedModelError:
        return False
    changed = (one[_LENGTH : 2 * _LENGTH] - two[_LENGTH : 2 * _LENGTH]).abs().max()
    of_branch = torch.cat([one[:_LENGTH], one[2 * _LENGTH :]])
    kept = (of_branch - torch.cat([two[:_LENGTH], two[2 * _LENGTH :]])).abs().max()
    is_alone = bool(kept <= 1e-3 * changed)
    return is_alone and relative_difference(expected, of_branch) <= tolerance(architecture.model.dtype)


def _tree_states(known: Architecture, one: np.ndarray, two: np.ndarray, types: list[int]) -> torch.Tensor:
    """Hidden states (18, H) of the six tokens that two branches share, and of the six of each behind them."""
    tree = tree_of((0, 1), (0, _LENGTH), (len(one), len(two)))
    rows = tree_rows([TokenRow(one), TokenRow(two)], [[tree]], pad_id=0, packed=True)
    return _states(known, rows, types, masks=True)


def _texts(architecture: Architecture, count: int) -> list[np.ndarray]:
    """Different sequences of six text tokens."""
    usual = [token for token in range((count + 1) * _LENGTH) if token not in architecture.placeholder_ids]
    return [np.array(usual[part * 4 : part * 4 + _LENGTH]) for part in range(count)]


def _separates(architecture: Architecture, packing: Packing, with_types: bool) -> bool:
    if "position_ids" not in forward_parameters(architecture.base):
        return False
    first, second, other = _texts(architecture, 3)
    types = _TYPES if with_types else ([0] * _LENGTH,) * 3
    try:
        one, two = (
            _states(
                architecture,
                placed_rows([TokenRow(before), TokenRow(second)], pad_id=0, layout="packed"),
                [*of_first, *types[1]],
                masks=packing == "masks",
            )
            for before, of_first in ((first, types[0]), (other, types[2]))
        )
    except UnsupportedModelError:  # it takes no such masks, or makes none
        return False
    changed, kept = ((one[part] - two[part]).abs().max() for part in (slice(_LENGTH), slice(_LENGTH, None)))
    # The second sequence may change by this part of the change of the first: matrix products of low precision
    # round differently for other rows of a batch of experts.
    return bool(kept <= 1e-3 * changed)


def _states(architecture: Architecture, rows: PlacedRows, types: list[int], *, masks: bool) -> torch.Tensor:
    """Hidden states (T, H) of one packed row; with equal random numbers for dropout."""
    inputs = forward_inputs(architecture, rows, architecture.base, row_positions(architecture, rows)[0])
    given = torch.tensor([types], device=architecture.model.device)
    if (name := token_type_argument(architecture, architecture.base)) is not None:
        inputs[name] = given
    if masks:
        inputs["attention_mask"] = packed_masks(architecture, rows, given)
    with torch.no_grad(), same_random_numbers(architecture):
        return run_base(architecture, architecture.base, inputs, rows=rows)[0].float()
