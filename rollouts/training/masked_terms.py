"""Values of the trained tokens of a batch, limited to finite numbers, and the mean of a loss over them."""

import math
from typing import Literal, NamedTuple

import torch

from rollouts.errors import ArgumentError
from rollouts.values import check_choice, check_positive

MeanOver = Literal["tokens", "sequences"]

#: The exponential of a log-ratio continues linearly above this: that of 89 is not finite in float32, and 0 *
#: inf is no number.
_MAX_LOG_RATIO = 20.0


class Correction(NamedTuple):
    """What a loss takes in the place of its mask: a weight for the term of each token, and which tokens are trained.

    `weights` floats and `mask` bool, both (B, T), from `rollout_correction`; `figures` are numbers by name.
    """

    weights: torch.Tensor
    mask: torch.Tensor
    figures: dict[str, float]


Mask = torch.Tensor | Correction


def masked_values(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The masked values, (n,), on the device of `mask`; float32 where they are in half precision."""
    selected = values.to(mask.device)[mask]
    if not selected.is_floating_point():
        return selected
    return selected.to(torch.promote_types(selected.dtype, torch.float32))


def masked_logprobs(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The masked log-probabilities, (n,), each at least -1e4."""
    # Log-probabilities below this count as this: a difference with -inf is not finite.
    return masked_values(logprobs, mask).clamp(min=-1e4)


def log_ratios(logprobs: torch.Tensor, others: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """logprobs - others on masked tokens, (n,), of log-probabilities of at least -1e4."""
    return masked_logprobs(logprobs, mask) - masked_logprobs(others.detach(), mask)


def limited_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(x) up to x = 20, above it exp(20) (1 + x - 20): value and slope are continuous, and the slope is never 0."""
    limited = log_ratio.clamp(max=_MAX_LOG_RATIO)
    return torch.exp(limited) * (1 + (log_ratio - limited))


def limited_k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """limited_exp(x) - 1 - x, without the rounding of that difference near 0, and at least 0."""
    limited = log_ratio.clamp(max=_MAX_LOG_RATIO)
    beyond = limited_exp(log_ratio) - torch.exp(limited)
    return (torch.expm1(limited) + beyond - log_ratio).clamp(min=0)


def sequence_sums(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """For each sequence the sum of `values` (n,) over its tokens; `ids` int64 (n,)."""
    sums = torch.zeros(len(torch.bincount(ids)), dtype=values.dtype, device=values.device)
    return sums.index_add_(0, ids, values)


def masked_mean(
    terms: torch.Tensor,
    mask: Mask,
    mean_over: MeanOver,
    sequence_ids: torch.Tensor | None,
    normaliser: float | None,
) -> torch.Tensor:
    """The terms (n,) of the masked tokens as one number, as `losses` explains it; 0 without a masked token."""
    rule = "pass a number above 0, or None for the number of masked tokens or of their sequences"
    number = None if normaliser is None else check_positive("normaliser", normaliser, rule)
    check_choice("mean_over", mean_over, MeanOver)
    if isinstance(mask, Correction):
        terms = terms * masked_values(mask.weights, mask.mask.to(terms.device))
        mask = mask.mask
    if mean_over == "tokens":
        # Without a token the sum is 0, and 0 / 0 would be NaN.
        return terms.sum() / (number or max(1, len(terms)))
    if sequence_ids is None:
        raise ArgumentError("sequence_ids", None, "pass batch.sequence_ids, which say what tokens are one sequence")
    ids = trained_sequences(sequence_ids, mask.to(terms.device))
    counts = torch.bincount(ids)
    return (terms / counts[ids]).sum() / (number or max(1, len(counts)))


def trained_sequences(sequence_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The sequence of each masked token, int64 (n,): the sequences with a masked token, numbered from 0."""
    if sequence_ids.shape != mask.shape or sequence_ids.is_floating_point() or sequence_ids.dtype == torch.bool:
        kind = f"{sequence_ids.dtype} {tuple(sequence_ids.shape)}"
        raise ArgumentError("sequence_ids", kind, f"pass integers {tuple(mask.shape)}, such as batch.sequence_ids")
    ids = masked_values(sequence_ids, mask).long()
    if (ids < 0).any():
        row, column = (mask & (sequence_ids.to(mask.device) < 0)).nonzero()[0].tolist()
        rule = "the mask trains this position; pass the batch's own sequence_ids and loss_mask"
        raise ArgumentError(f"sequence_ids[{row}, {column}]", -1, rule)
    numbers: torch.Tensor = torch.unique(ids, return_inverse=True)[1]
    return numbers


def checked_mask(logprobs: torch.Tensor, mask: Mask, **others: torch.Tensor) -> torch.Tensor:
    """The mask on the device of `logprobs`, after a check of all shapes, dtypes and masked values."""
    if isinstance(mask, Correction):
        others["weights"] = mask.weights
        mask = mask.mask
    for name, tensor in {"logprobs": logprobs, **others, "mask": mask}.items():
        if tensor.shape != logprobs.shape:
            rule = f"pass the tensors of one batch, each {tuple(logprobs.shape)} like logprobs"
            raise ArgumentError(f"the shape of {name}", tuple(tensor.shape), rule)
    for name, tensor in {"logprobs": logprobs, **others}.items():
        if not tensor.is_floating_point():
            raise ArgumentError(f"the dtype of {name}", str(tensor.dtype), "pass float32")
    if mask.dtype != torch.bool:
        raise ArgumentError("the dtype of mask", str(mask.dtype), "pass torch.bool: integers would be used as indices")
    mask = mask.to(logprobs.device)
    for name, tensor in {"logprobs": logprobs, **others}.items():
        values = tensor.detach().to(mask.device)
        # A token may be impossible, and has log-probability -inf then.
        wrong = mask & ~(values < math.inf if name.endswith("logprobs") else values.isfinite())
        if wrong.any():
            place = tuple(wrong.nonzero()[0].tolist())
            rule = "the mask trains this position; leave it out, or pass what belongs there"
            raise ArgumentError(f"{name}[{', '.join(map(str, place))}]", float(values[place]), rule)
    return mask
