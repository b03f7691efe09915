"""Whether a model keeps the sequences of a packed row apart, found by running it."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import torch

from rollouts.models.architecture import Architecture, forward_parameters
from rollouts.models.forward import generic_hidden_states
from rollouts.models.placed_rows import TokenSequence, placed_rows

_known: WeakKeyDictionary[torch.nn.Module, dict[str, bool]] = WeakKeyDictionary()
# The second sequence may change by this part of the change of the first: matrix products of low precision round
# differently for other rows of a batch of experts.
_TOLERANCE = 1e-3
_LENGTH = 6


def separates_packed_sequences(architecture: Architecture) -> bool:
    """Whether the hidden states of a sequence do not depend on the sequence before it in a packed row.

    transformers separates attention where positions begin again; layers with a recurrent state may not. The model runs
    twice at first use, on two sequences of six tokens of which the first differs, for each kind of attention.
    """
    results = _known.setdefault(architecture.model, {})
    attention = str(getattr(architecture.text_config, "_attn_implementation", None))
    if attention not in results:
        results[attention] = _probe(architecture)
    return results[attention]


def _probe(architecture: Architecture) -> bool:
    if "position_ids" not in forward_parameters(architecture.base):
        return False
    usual = [token for token in range(3 * _LENGTH) if token not in architecture.placeholder_ids]
    first, second, other = (np.array(usual[part * 4 : part * 4 + _LENGTH]) for part in range(3))
    one, two = (_states(architecture, before, second) for before in (first, other))
    changed, kept = ((one[part] - two[part]).abs().max() for part in (slice(_LENGTH), slice(_LENGTH, None)))
    return bool(kept <= _TOLERANCE * changed)


def _states(architecture: Architecture, first: np.ndarray, second: np.ndarray) -> torch.Tensor:
    """Hidden states (12, H) of two sequences in one row; with the same random numbers for dropout in each call."""
    starts = np.array([[0, 0], [0, _LENGTH]], dtype=np.int64)
    sequences = [TokenSequence(first), TokenSequence(second)]
    rows = placed_rows(sequences, starts, (1, 2 * _LENGTH), pad_id=0, packed=True)
    devices = [architecture.model.device] if architecture.model.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        return generic_hidden_states(architecture, rows)[0][0].float()
