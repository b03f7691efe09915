"""The arrays of samples, of which each adapter makes a trainer's type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from renderers.rendered import TOKEN_TYPE_IDS
from rollouts.training.samples import TrainingSample


class TokenArrays(NamedTuple):
    """Rows of tokens, each tensor (rows, longest row): int64, `logprobs` and `advantages` float32.

    `is_token` is 1 on tokens and 0 on padding, where `token_ids` has the padding id and all others 0.
    `loss_mask` is 1 on trained tokens; `logprobs` and `advantages` are 0 on the others. `media_types` are
    those of the function of that name.
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
    side: Literal["left", "right"] = "right",
    part: Literal["all", "prompt", "response"] = "all",
) -> TokenArrays:
    """The tokens of samples, padded on `side`: all, those before the first trained one, or those from it on."""
    rows = []
    for sample in samples:
        start = response_start(sample)
        tokens = {"all": slice(None), "prompt": slice(start), "response": slice(start, None)}[part]
        trained = sample.loss_mask
        columns = (
            sample.token_ids,
            np.ones(len(sample)),
            trained,
            np.where(trained, sample.logprobs, 0),
            np.where(trained, sample.advantages, 0),
            media_types(sample),
        )
        rows.append([column[tokens] for column in columns])
    width = max(len(row[0]) for row in rows)
    tensors = []
    for name, column in zip(TokenArrays._fields, zip(*rows, strict=True), strict=True):
        dtype = np.float32 if name in ("logprobs", "advantages") else np.int64
        table = np.full((len(rows), width), pad_id if name == "token_ids" else 0, dtype)
        for line, row in zip(table, column, strict=True):
            line[width - len(row) if side == "left" else 0 :][: len(row)] = row
        tensors.append(torch.from_numpy(table))
    return TokenArrays(*tensors)


def response_start(sample: TrainingSample) -> int:
    """The index of the first trained token, where the response begins."""
    return int(sample.loss_mask.argmax())


def media_types(sample: TrainingSample) -> np.ndarray:
    """Int64 (n,): 1 on the feature tokens of images, 2 on those of videos, 3 on those of sounds, 0 elsewhere;
    by range, not by token id."""
    types = np.zeros(len(sample), dtype=np.int64)
    for item, placeholder in sample.media:
        for modality, start, end in placeholder.runs_of(item):
            types[start:end] = TOKEN_TYPE_IDS[modality]
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
