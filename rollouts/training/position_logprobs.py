"""Log-probabilities of tokens behind chosen positions of sequences, each distinct token computed once."""

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch

from rollouts.errors import ArgumentError, SampleError, UnsupportedModelError
from rollouts.models.forward_pass import ForwardPass
from rollouts.models.placed_rows import PlacedRows, TokenRow, placed_rows
from rollouts.models.sounds_by_range import length_heard_otherwise
from rollouts.training.sequence_logprobs import SequenceLogprobs, check_targets, sequence_logprobs


def position_logprobs(
    forward: ForwardPass,
    sequences: Sequence[TokenRow],
    positions: tuple[np.ndarray, np.ndarray],
    targets: torch.Tensor,
    *,
    pad_id: int,
    packed: Callable[[], PlacedRows] | None = None,
    temperature: float = 1.0,
    max_row_tokens: int,
) -> SequenceLogprobs:
    """log p(target) after P positions, each a place in a sequence, and the entropy there. Differentiable.

    `positions` are two int64 (P,), `targets` int64 (P,) or (P, K), as `sequence_logprobs` takes them. Where
    sequences share a beginning they are computed in rows of prefix trees, whose rows have at most
    `max_row_tokens` tokens, or those of their longest sequence; 0 turns this off. Else, and where a tree
    fails, in the rows of `packed`, or padded.
    """
    number, place = positions
    # Phi-4 projects the sounds of a prompt with images in another way: what it sampled before the first image
    # of a row is computed without that image, in a row of its own.
    search, count = forward.architecture.search, len(sequences)
    for index in range(count):
        length = length_heard_otherwise(search, sequences[index].media)
        is_before = (number == index) & (place < length)
        if is_before.any():
            number = np.where(is_before, len(sequences), number)
            sequences = [*sequences, sequences[index].part(0, length)]
    if len(sequences) > count:
        packed = None
    hidden, rows = _hidden_states(forward, sequences, pad_id, packed, max_row_tokens)
    paths = rows.paths
    begins = np.cumsum([0, *(len(path.columns) for path in paths)])
    row = np.array([path.row for path in paths])[number]
    column = np.concatenate([path.columns for path in paths])[begins[number] + place]
    flat, inverse = torch.from_numpy(row * rows.input_ids.shape[1] + column).to(hidden.device), None
    head, targets = forward.head, targets.to(hidden.device)
    # A position and its targets that several sequences share are computed once.
    if rows.tree is not None and len(flat):
        check_targets(flat, head.weight, targets)
        if targets.ndim == 1:  # numbers are sorted many times faster than rows
            pairs, inverse = torch.unique(flat * len(head.weight) + targets, return_inverse=True)
            flat, targets = pairs // len(head.weight), pairs % len(head.weight)
        else:
            pairs, inverse = torch.unique(torch.cat([flat[:, None], targets], dim=1), dim=0, return_inverse=True)
            flat, targets = pairs[:, 0], pairs[:, 1:]
    scored = sequence_logprobs(
        hidden.flatten(0, 1)[flat],
        head.weight,
        targets,
        bias=head.bias,
        low_rank=head.low_rank,
        softcap=head.softcap,
        scale=head.scale,
        temperature=temperature,
    )
    return scored if inverse is None else SequenceLogprobs(scored.logprobs[inverse], scored.entropy[inverse])


def _hidden_states(
    forward: ForwardPass,
    sequences: Sequence[TokenRow],
    pad_id: int,
    packed: Callable[[], PlacedRows] | None,
    max_row_tokens: int,
) -> tuple[torch.Tensor, PlacedRows]:
    """The hidden states of rows that have all sequences, and these rows."""
    lengths = [len(sequence) for sequence in sequences]
    usual = (1, sum(lengths)) if packed else (len(lengths), max(lengths))
    failed = None
    if max_row_tokens:
        try:
            tree = forward.shared_rows(sequences, usual, pad_id=pad_id, max_row_tokens=max_row_tokens)
            if tree is not None:
                return forward.hidden_states(tree), tree
        except (ArgumentError, SampleError, UnsupportedModelError) as error:
            failed = error  # the usual rows name the sample, or can be computed
    rows = packed() if packed else placed_rows(sequences, pad_id=pad_id)
    hidden = forward.hidden_states(rows)
    if failed is not None:
        reason = f"rows of prefix trees failed, so that each sample was computed by itself: {failed}"
        warnings.warn(reason, RuntimeWarning, stacklevel=2)
    return hidden, rows
