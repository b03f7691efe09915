"""Whether a model keeps the sequences of a packed row apart, found by running it."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import torch

from rollouts.models.architecture import TOKEN_TYPES, Architecture, forward_parameters
from rollouts.models.forward import forward_inputs, run_base
from rollouts.models.placed_rows import TokenSequence, placed_rows
from rollouts.models.positions import row_positions

_known: WeakKeyDictionary[torch.nn.Module, dict[tuple[str, bool], bool]] = WeakKeyDictionary()
# The second sequence may change by this part of the change of the first: matrix products of low precision round
# differently for other rows of a batch of experts.
_TOLERANCE = 1e-3
_LENGTH = 6
# Token types of the two sequences of the probe, and of the one that replaces the first.
_TYPES = ([0, 0, 0, 1, 1, 0], [0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0])


def separates_packed_sequences(architecture: Architecture, *, with_media: bool) -> bool:
    """Whether the hidden states of a sequence do not depend on the sequence before it in a packed row.

    transformers separates attention where positions begin again. Layers with a recurrent state may not, and some
    classes do not pass the positions to their masks, or lose them where images are attended in both directions
    (`with_media`). The model runs twice at first use, on two sequences of six tokens of which the first differs, for
    each implementation of attention.
    """
    results = _known.setdefault(architecture.model, {})
    attention = str(getattr(architecture.text_config, "_attn_implementation", None))
    # With M-RoPE the token types only matter for positions, which are given.
    with_types = with_media and not architecture.mrope and bool(TOKEN_TYPES & forward_parameters(architecture.base))
    if (attention, with_types) not in results:
        results[attention, with_types] = _probe(architecture, with_types)
    return results[attention, with_types]


def _probe(architecture: Architecture, with_types: bool) -> bool:
    if "position_ids" not in forward_parameters(architecture.base):
        return False
    usual = [token for token in range(3 * _LENGTH) if token not in architecture.placeholder_ids]
    first, second, other = (np.array(usual[part * 4 : part * 4 + _LENGTH]) for part in range(3))
    types = _TYPES if with_types else ([0] * _LENGTH,) * 3
    one = _states(architecture, first, second, [*types[0], *types[1]])
    two = _states(architecture, other, second, [*types[2], *types[1]])
    changed, kept = ((one[part] - two[part]).abs().max() for part in (slice(_LENGTH), slice(_LENGTH, None)))
    return bool(kept <= _TOLERANCE * changed)


def _states(architecture: Architecture, first: np.ndarray, second: np.ndarray, types: list[int]) -> torch.Tensor:
    """Hidden states (12, H) of two sequences in one row; with the same random numbers for dropout in each call."""
    starts = np.array([[0, 0], [0, _LENGTH]], dtype=np.int64)
    sequences = [TokenSequence(first), TokenSequence(second)]
    rows = placed_rows(sequences, starts, (1, 2 * _LENGTH), pad_id=0, packed=True)
    inputs = forward_inputs(architecture, rows, architecture.base, row_positions(architecture, rows)[0])
    for name in TOKEN_TYPES & inputs.keys():
        inputs[name] = torch.tensor([types], device=architecture.model.device)
    devices = [architecture.model.device] if architecture.model.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        return run_base(architecture, architecture.base, inputs, rows=rows)[0].float()
