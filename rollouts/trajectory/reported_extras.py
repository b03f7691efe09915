"""What an engine reported of each token, as rows of the nodes of a turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rollouts.engines.protocol import NO_TOKEN, Completion
from rollouts.engines.result_checks import top_logprobs_error
from rollouts.errors import InvalidTurnError, short_repr
from rollouts.trajectory.token_node import ROUTED_EXPERTS, SAMPLING_MASK, TOP_IDS, TOP_LOGPROBS


class ReportedExtras(NamedTuple):
    """Arrays by name, with one row for each new token of the prompt and for each token of the completion."""

    prompt: dict[str, np.ndarray]
    completion: dict[str, np.ndarray]


def reported_extras(completion: Completion, prompt_tokens: int, start: int) -> ReportedExtras:
    """The arrays for the prompt's tokens from `start` on, and for the tokens of its completion.

    `routed_experts` (n, layers, experts a token): a row names the experts of the pass that *predicted* its token, which
    read the token before it. So a row depends only on the tokens before its token, every sampled token has a row as
    soon as it is sampled, and the rows from a root to a leaf, without the first row, belong to the inputs of a forward
    pass over all tokens but the last. The first token of a prompt is not predicted: its row is zeros.
    `sampling_mask` int32 (n, longest): the ids that a token was sampled from, then -1. `top_ids` int32 (n, k) and
    `top_logprobs` float32 (n, k): the arrays of `Completion.top_logprobs`. Raises `InvalidTurnError` where counts do
    not agree.
    """
    prompt: dict[str, np.ndarray] = {}
    sampled: dict[str, np.ndarray] = {}
    end = prompt_tokens + len(completion.token_ids)
    if (experts := completion.routed_experts) is not None:
        if not isinstance(experts, np.ndarray) or experts.dtype.kind not in "iu":
            raise InvalidTurnError(f"routed experts are {short_repr(experts)}, not an array of integers")
        if experts.ndim != 3 or len(experts) != end - 1:
            raise InvalidTurnError(
                f"routed experts of shape {experts.shape} for {end} tokens of prompt and completion; there is one row "
                f"for each but the last: ({end - 1}, layers, experts a token)"
            )
        prompt[ROUTED_EXPERTS] = _predicting(experts, start, prompt_tokens)
        sampled[ROUTED_EXPERTS] = _predicting(experts, prompt_tokens, end)
    if (masks := completion.sampling_masks) is not None:
        if not isinstance(masks, list | tuple) or not all(map(_is_row_of_ids, masks)):
            raise InvalidTurnError(f"sampling masks are {short_repr(masks)}, not one array of token ids per token")
        if len(masks) != len(completion.token_ids):
            raise InvalidTurnError(f"{len(masks)} sampling masks for {len(completion.token_ids)} sampled tokens")
        sampled[SAMPLING_MASK] = _padded(masks)
    if (top := completion.top_logprobs) is not None:
        if (error := top_logprobs_error(top, len(completion.token_ids), None)) is not None:
            raise InvalidTurnError(error)
        sampled[TOP_IDS], sampled[TOP_LOGPROBS] = top.token_ids.astype(np.int32), top.logprobs.astype(np.float32)
    return ReportedExtras(prompt, sampled)


def _is_row_of_ids(mask: object) -> bool:
    return isinstance(mask, np.ndarray) and mask.ndim == 1 and (mask.dtype.kind in "iu" or not mask.size)


def _predicting(experts: np.ndarray, start: int, end: int) -> np.ndarray:
    """The rows of the passes that predicted tokens `start:end`, given those of the passes that read each token."""
    if start:
        return experts[start - 1 : end - 1]
    first_row = np.zeros((min(end, 1), *experts.shape[1:]), experts.dtype)
    return np.concatenate([first_row, experts[: max(end - 1, 0)]])


def _padded(masks: Sequence[np.ndarray]) -> np.ndarray:
    widths = np.array([len(mask) for mask in masks], dtype=np.intp)
    rows = np.full((len(masks), int(widths.max(initial=0))), NO_TOKEN, np.int32)
    rows[np.arange(rows.shape[1]) < widths[:, None]] = np.concatenate([*masks, np.empty(0, np.int32)])
    return rows
