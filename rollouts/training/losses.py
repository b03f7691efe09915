"""Advantages, and supervised and policy-gradient losses on token log-probabilities."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch

from rollouts.errors import AdvantageError, ArgumentError
from rollouts.numbers import finite_number

Scale = Literal["group", "batch", "none"]


class PolicyLoss(NamedTuple):
    """The loss to minimise (scalar), the fraction of tokens whose ratio was clipped, and the mean ratio."""

    loss: torch.Tensor
    clipped: float
    mean_ratio: float


def sft_loss(logprobs: torch.Tensor, mask: torch.Tensor, *, normaliser: float | None = None) -> torch.Tensor:
    """Negative log-likelihood of the masked tokens, divided by `normaliser` (default: their number).

    `logprobs` float32 and `mask` bool, both (B, T). A micro-batch passes the token count of the whole batch. Raises
    `ArgumentError` for other shapes, and for a normaliser that is not above 0.
    """
    _check_shapes(logprobs, mask=mask)
    mask = mask.to(logprobs.device)
    return -logprobs[mask].sum() / _divisor(normaliser, mask)


def policy_gradient_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip: float = 0.2,
    normaliser: float | None = None,
) -> PolicyLoss:
    """The clipped surrogate of PPO (Schulman et al. 2017, eq. 7). `old_logprobs` are the sampler's.

    All tensors (B, T). The sum over masked tokens is divided by `normaliser` (default: their number). Raises
    `ArgumentError` for tensors of different shapes, and for a normaliser that is not above 0.
    """
    _check_shapes(logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    mask = mask.to(logprobs.device)
    new, old = logprobs[mask], old_logprobs.to(logprobs.device)[mask]
    advantage = advantages.to(logprobs.device)[mask]
    ratio = torch.exp(new - old)
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    loss = -surrogate.sum() / _divisor(normaliser, mask)
    if not len(new):
        return PolicyLoss(loss, 0.0, 1.0)
    clipped = ((ratio - 1).abs() > clip).float().mean()
    return PolicyLoss(loss, float(clipped), float(ratio.detach().mean()))


def _check_shapes(logprobs: torch.Tensor, **others: torch.Tensor) -> None:
    for name, tensor in others.items():
        if tensor.shape != logprobs.shape:
            rule = f"pass the tensors of one batch, each {tuple(logprobs.shape)} like logprobs"
            raise ArgumentError(f"the shape of {name}", tuple(tensor.shape), rule)


def _divisor(normaliser: float | None, mask: torch.Tensor) -> float:
    if normaliser is None:
        return max(1, int(mask.sum()))
    number = finite_number(normaliser)
    if number is None or number <= 0:
        raise ArgumentError("normaliser", normaliser, "pass a number above 0, or None for the number of masked tokens")
    return number


def group_advantages(rewards: Sequence[float], groups: Sequence[Hashable], *, scale: Scale = "group") -> np.ndarray:
    """Each reward minus the mean of its group, float32 (n,); 0 in a group in which all rewards are equal.

    `scale` selects the standard deviation by which the difference is divided: "group", that of the group's rewards, as
    in GRPO (Shao et al. 2024, arXiv:2402.03300); "batch", that of all centred rewards, so that a group with almost
    equal rewards weighs less; "none", no division. Raises `AdvantageError` unless there is one finite reward per group
    entry.
    """
    if scale not in get_args(Scale):
        raise AdvantageError(f"scale is {scale!r}; pass one of {', '.join(get_args(Scale))}")
    values = _finite_rewards(rewards)
    if len(groups) != len(values):
        raise AdvantageError(f"{len(values)} rewards and {len(groups)} groups; pass the group of each reward")
    advantages = np.zeros(len(values))
    indices_by_group: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        indices_by_group.setdefault(group, []).append(index)
    for indices in indices_by_group.values():
        centred = values[indices] - values[indices].mean()
        spread = centred.std()
        if spread > 0:
            advantages[indices] = centred / spread if scale == "group" else centred
    if scale == "batch" and (spread := advantages.std()) > 0:
        advantages /= spread
    return advantages.astype(np.float32)


def _finite_rewards(rewards: Sequence[float]) -> np.ndarray:
    """The rewards as float64 (n,)."""
    try:
        values = np.asarray(rewards, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise AdvantageError(f"rewards are not one row of numbers: {error}") from error
    if values.ndim != 1:
        raise AdvantageError(f"rewards have shape {values.shape}; pass one number for each episode")
    if not np.isfinite(values).all():
        index = int(np.flatnonzero(~np.isfinite(values))[0])
        raise AdvantageError(f"reward {index} is {values[index]}, not a finite number; leave that episode out")
    return values
