"""The arrays of samples, of which each adapter makes a trainer's type."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from rollouts.models.placed_rows import Side, laid_out, placed_rows
from rollouts.training.samples import TrainingSample


class TokenArrays(NamedTuple):
    """Rows of tokens, each tensor (rows, longest row): int64, `logprobs` and `advantages` float32.

    `is_token` is 1 on tokens and 0 on padding, where `token_ids` has the padding id and all others 0.
    `loss_mask` is 1 on trained tokens; `logprobs` and `advantages` are 0 on the others. `media_types` are
    `PlacedRows.token_types`.
    """

    token_ids: torch.Tensor
    is_token: torch.Tensor
    loss_mask: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor
    media_types: torch.Tensor


def token_arrays(
    samples: Sequence[TrainingSample],
    *,
    pad_id: int = 0,
    side: Side = "right",
    part: Literal["all", "prompt", "response"] = "all",
) -> TokenArrays:
    """The tokens of samples, padded on `side`: all; the prompt, before the first trained one; or the response."""
    parts, columns = [], []
    for sample in samples:
        start, end = int(sample.loss_mask.argmax()), len(sample)
        begin, end = {"all": (0, end), "prompt": (0, start), "response": (start, end)}[part]
        parts.append(sample.part(begin, end))
        trained = sample.loss_mask[begin:end]
        columns.append(
            [trained, *(np.where(trained, each[begin:end], 0) for each in (sample.logprobs, sample.advantages))]
        )
    placed = placed_rows(parts, pad_id=pad_id, side=side)
    laid = [
        laid_out(rows, placed.starts, np.zeros(placed.input_ids.shape, dtype))
        for rows, dtype in zip(zip(*columns, strict=True), (np.int64, np.float32, np.float32), strict=True)
    ]
    arrays = (placed.input_ids, placed.attention_mask.astype(np.int64), *laid, placed.token_types())
    return TokenArrays(*map(torch.from_numpy, arrays))


def media_types(sample: TrainingSample) -> np.ndarray:
    """`PlacedRows.token_types` of one sample, (n,)."""
    types: np.ndarray = placed_rows([sample], pad_id=0).token_types()[0]
    return types


def other_columns(samples: Sequence[TrainingSample]) -> dict[str, list[Any]]:
    """Entries of a trainer's own dict, each with a value for a row.

    `weight_spans`, (version, start, end) for each span; `routed_experts`, integers (n, layers, experts a
    token); `top_ids` int32 and `top_logprobs` float32 (n, k), those of `TrainingSample.top_logprobs`. The
    last three are None in a row that has none, and absent where no row has any.
    """
    columns = {
        "routed_experts": [sample.routed_experts for sample in samples],
        "top_ids": [None if sample.top_logprobs is None else sample.top_logprobs.token_ids for sample in samples],
        "top_logprobs": [None if sample.top_logprobs is None else sample.top_logprobs.logprobs for sample in samples],
    }
    return {
        "weight_spans": [[(span.version, span.start, span.end) for span in sample.weight_spans] for sample in samples],
        **{name: rows for name, rows in columns.items() if any(row is not None for row in rows)},
    }
