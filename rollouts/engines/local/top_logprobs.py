"""The likeliest tokens at every position of a row of tokens that is there already."""

from __future__ import annotations

import numpy as np
import torch

from rollouts.engines.protocol import TopLogprobs
from rollouts.models.forward_pass import ForwardPass
from rollouts.models.placed_rows import TokenSequence, padded_rows

# Positions whose logits exist at once.
_POSITIONS = 256


def top_logprobs(forward: ForwardPass, sequence: TokenSequence, count: int) -> TopLogprobs:
    """The `count` likeliest tokens in the place of every token but the first; fewer where the model has fewer."""
    hidden = forward.hidden_states(padded_rows([sequence], pad_id=forward.architecture.neutral_id))[0, :-1]
    head = forward.head
    ids, values = [], []
    for start in range(0, len(hidden), _POSITIONS):
        logprobs = torch.log_softmax(head.logits(hidden[start : start + _POSITIONS]).float(), dim=-1)
        top = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
        ids.append(top.indices.to(torch.int32).cpu())
        values.append(top.values.cpu())
    if not ids:
        return TopLogprobs(np.empty((0, count), np.int32), np.empty((0, count), np.float32))
    return TopLogprobs(torch.cat(ids).numpy(), torch.cat(values).numpy())
