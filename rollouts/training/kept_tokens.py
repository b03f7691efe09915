"""Log-probabilities among the ids that tokens were sampled from, where options such as top_p left others out."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from rollouts.engines.protocol import NO_TOKEN
from rollouts.training.sequence_logprobs import SequenceLogprobs


def padded_ids(masks: Sequence[np.ndarray | None], lengths: Iterable[int]) -> torch.Tensor | None:
    """The `sampling_mask` of rows of tokens, one row after another, int64 (n, K); None where none has an id."""
    width = max((mask.shape[1] for mask in masks if mask is not None), default=0)
    if not width:
        return None
    rows = [np.full((length, width), NO_TOKEN) for length in lengths]
    for row, mask in zip(rows, masks, strict=True):
        if mask is not None:
            row[:, : mask.shape[1]] = mask
    return torch.from_numpy(np.concatenate(rows))


def scored_among(
    kept: torch.Tensor | None, targets: torch.Tensor, score: Callable[[torch.Tensor], SequenceLogprobs]
) -> SequenceLogprobs:
    """What `score` says of targets (P,) or (P, K), the first of each place among the `kept` ids there.

    That is log p minus the logarithm of the sum of p over these ids (P, L), then -1; the entropy is that of
    the distribution among them. A place without ids stays as it is.
    """
    if kept is None:
        return score(targets)
    columns = targets.reshape(len(targets), -1)
    scored = score(torch.cat([columns, kept.to(targets).clamp(min=0)], dim=1))
    of_targets, of_kept = scored.logprobs.tensor_split([columns.shape[1]], dim=1)
    is_kept = kept.to(of_kept.device) >= 0
    is_known = is_kept.any(dim=1)
    # Without an infinity in places that have no ids: the gradient of the sum would be NaN.
    total = of_kept.masked_fill(~is_kept & is_known[:, None], -torch.inf).logsumexp(dim=1).where(is_known, 0)
    among = (of_kept - total[:, None]).masked_fill(~is_kept, 0)
    entropy = -(among.exp() * among).sum(dim=1)
    logprobs = torch.cat([of_targets[:, :1] - total[:, None], of_targets[:, 1:]], dim=1).reshape(targets.shape)
    return SequenceLogprobs(logprobs, entropy.where(is_known, scored.entropy))
