"""Supervised and policy-gradient losses on token log-probabilities.

Every loss is a sum over the trained tokens of a batch, divided by what `mean_over` and `normaliser` say:

- `mean_over="tokens"`: by the number of trained tokens (DAPO, Yu et al. 2025, arXiv:2503.14476);
- `mean_over="sequences"`: each sequence's terms by the number of its trained tokens, and the sum by the
  number of sequences with trained tokens (GRPO, Shao et al. 2024, arXiv:2402.03300);
- a `normaliser` replaces the number of tokens or sequences of this batch: that of all micro-batches, so that
  their gradients sum to the gradient of the whole; or a constant (Dr. GRPO, Liu et al. 2025,
  arXiv:2503.20783).

In the place of `mask` a loss takes what `rollout_correction` returns: the mask without rejected tokens, and a
weight for the term of each other one.

`sequence_ids` (B, T) says which sequence a token belongs to, so that padded and packed batches give the same
loss. Positions outside `mask` may hold anything: they get no gradient. Ratios are computed in float32 at
least, also from half-precision tensors. A token that the sampler found impossible leaves the loss finite:
log-probabilities below -1e4, -inf too, count as -1e4, and the exponential of a log-ratio above 20 continues
linearly, so that the gradient keeps its direction.
"""

import math
from typing import NamedTuple

import torch

from rollouts.errors import ArgumentError
from rollouts.training.masked_terms import (
    Mask,
    MeanOver,
    checked_mask,
    limited_exp,
    limited_k3,
    log_ratios,
    masked_logprobs,
    masked_mean,
    masked_values,
    sequence_sums,
    trained_sequences,
)
from rollouts.values import check_positive, finite_number

#: A float, the same limit on both sides of 1, or the limits below and above 1.
Clip = float | tuple[float, float]


class PolicyLoss(NamedTuple):
    """The loss to minimise (scalar), the fraction of tokens whose ratio was clipped, and the mean ratio of tokens."""

    loss: torch.Tensor
    clipped: float
    mean_ratio: float


def sft_loss(
    logprobs: torch.Tensor,
    mask: Mask,
    *,
    mean_over: MeanOver = "tokens",
    sequence_ids: torch.Tensor | None = None,
    normaliser: float | None = None,
) -> torch.Tensor:
    """Negative log-likelihood of the masked tokens, a scalar.

    `logprobs` float32 and `mask` bool, both (B, T). The module's docstring explains the other arguments.
    Raises `ArgumentError` for other shapes and dtypes, and for a normaliser that is not above 0.
    """
    trained = checked_mask(logprobs, mask)
    return -masked_mean(masked_logprobs(logprobs, trained), mask, mean_over, sequence_ids, normaliser)


def policy_gradient_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: Mask,
    *,
    clip: Clip = 0.2,
    mean_over: MeanOver = "tokens",
    sequence_ids: torch.Tensor | None = None,
    normaliser: float | None = None,
) -> PolicyLoss:
    """The clipped surrogate of PPO: -min(r A, clip(r, 1 - low, 1 + high) A), with r = exp(logprobs - old_logprobs).

    Schulman et al. 2017, arXiv:1707.06347, equation 7. `clip` is one limit, or (low, high): DAPO
    (arXiv:2503.14476, "Clip-Higher") has (0.2, 0.28). `old_logprobs` are the sampler's, or the trainer's
    before its first step on these episodes. All tensors (B, T); the module's docstring explains the other
    arguments. Raises `ArgumentError` for tensors of other shapes and dtypes, and for values out of range.
    """
    low, high = _limits(clip)
    trained = checked_mask(logprobs, mask, old_logprobs=old_logprobs, advantages=advantages)
    ratio = limited_exp(log_ratios(logprobs, old_logprobs, trained))
    surrogate = _clipped_surrogate(ratio, masked_values(advantages, trained), 1 - low, 1 + high)
    return _policy_loss(-masked_mean(surrogate, mask, mean_over, sequence_ids, normaliser), ratio, 1 - low, 1 + high)


def importance_sampling_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: Mask,
    *,
    mean_over: MeanOver = "tokens",
    sequence_ids: torch.Tensor | None = None,
    normaliser: float | None = None,
) -> PolicyLoss:
    """The policy gradient with importance sampling: -r A, with r = exp(logprobs - old_logprobs), without any limit.

    The surrogate before the clipping of PPO: Schulman et al. 2017, arXiv:1707.06347, equation 6. The
    arguments are those of `policy_gradient_loss`; no ratio counts as clipped.
    """
    trained = checked_mask(logprobs, mask, old_logprobs=old_logprobs, advantages=advantages)
    ratio = limited_exp(log_ratios(logprobs, old_logprobs, trained))
    loss = -masked_mean(ratio * masked_values(advantages, trained), mask, mean_over, sequence_ids, normaliser)
    return _policy_loss(loss, ratio, 0.0, math.inf)


def cispo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: Mask,
    *,
    clip: Clip,
    mean_over: MeanOver = "tokens",
    sequence_ids: torch.Tensor | None = None,
    normaliser: float | None = None,
) -> PolicyLoss:
    """CISPO: -clip(r, 1 - low, 1 + high) A log p, where no gradient passes through the ratio r.

    MiniMax 2025, arXiv:2506.13585, equations 4 and 5. A clipped token keeps its gradient, unlike in PPO. The
    paper sets no lower limit (`clip=(1.0, high)`) and tunes the upper one. The arguments are those of
    `policy_gradient_loss`.
    """
    low, high = _limits(clip)
    trained = checked_mask(logprobs, mask, old_logprobs=old_logprobs, advantages=advantages)
    # Detached: the ratio is a weight here, and the gradient is that of the log-probability alone.
    ratio = limited_exp(log_ratios(logprobs.detach(), old_logprobs, trained))
    score = ratio.clamp(1 - low, 1 + high) * masked_values(advantages, trained) * masked_logprobs(logprobs, trained)
    return _policy_loss(-masked_mean(score, mask, mean_over, sequence_ids, normaliser), ratio, 1 - low, 1 + high)


def sequence_ratio_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: Mask,
    *,
    sequence_ids: torch.Tensor,
    clip: Clip = (3e-4, 4e-4),
    mean_over: MeanOver = "sequences",
    normaliser: float | None = None,
) -> PolicyLoss:
    """GSPO: the surrogate of PPO with one ratio for a sequence, the geometric mean of the ratios of its trained tokens.

    Zheng et al. 2025, arXiv:2507.18071; this is the form for advantages per token (GSPO-token, equations 13
    and 14), whose value and gradient are those of GSPO (equation 5) where a sequence has one advantage. The
    default limits are the paper's. The arguments are those of `policy_gradient_loss`; `sequence_ids` integers
    (B, T).
    """
    low, high = _limits(clip)
    trained = checked_mask(logprobs, mask, old_logprobs=old_logprobs, advantages=advantages)
    log_ratio = log_ratios(logprobs, old_logprobs, trained)
    constant = log_ratio.detach()
    ids = trained_sequences(sequence_ids, trained)
    means = (sequence_sums(constant, ids) / torch.bincount(ids))[ids]
    # The difference is 0 and has the gradient of the token's own log-probability.
    ratio = limited_exp(means + (log_ratio - constant))
    surrogate = _clipped_surrogate(ratio, masked_values(advantages, trained), 1 - low, 1 + high)
    return _policy_loss(-masked_mean(surrogate, mask, mean_over, sequence_ids, normaliser), ratio, 1 - low, 1 + high)


def dro_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: Mask,
    *,
    beta: float,
    mean_over: MeanOver = "tokens",
    sequence_ids: torch.Tensor | None = None,
    normaliser: float | None = None,
) -> PolicyLoss:
    """DRO for each token: -(A log p - beta d^2 / 2), with d = logprobs - old_logprobs.

    Richemond et al. 2024, arXiv:2405.19107, in the form of Kimi k1.5 (2025, arXiv:2501.12599, equation 3):
    the square keeps the policy near the one that sampled, also where the advantage is 0. The arguments are
    those of `policy_gradient_loss`; no ratio counts as clipped.
    """
    penalty = check_positive("beta", beta)
    trained = checked_mask(logprobs, mask, old_logprobs=old_logprobs, advantages=advantages)
    log_ratio = log_ratios(logprobs, old_logprobs, trained)
    terms = masked_values(advantages, trained) * masked_logprobs(logprobs, trained) - penalty / 2 * log_ratio.square()
    loss = -masked_mean(terms, mask, mean_over, sequence_ids, normaliser)
    return _policy_loss(loss, limited_exp(log_ratio), 0.0, math.inf)


def kl_loss(
    logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    mask: Mask,
    *,
    mean_over: MeanOver = "tokens",
    sequence_ids: torch.Tensor | None = None,
    normaliser: float | None = None,
) -> torch.Tensor:
    """An estimate of KL(policy || reference) from tokens that the policy sampled, a scalar of at least 0.

    With d = reference - policy it is k3, exp(d) - 1 - d (Schulman 2020, "Approximating KL Divergence"), as in
    GRPO (arXiv:2402.03300, equation 4). Above d = 20 it continues linearly with the gradient that it has at
    20, which moves the policy towards the reference. The other arguments are those of `sft_loss`.
    """
    trained = checked_mask(logprobs, mask, reference_logprobs=reference_logprobs)
    terms = limited_k3(-log_ratios(logprobs, reference_logprobs, trained))
    return masked_mean(terms, mask, mean_over, sequence_ids, normaliser)


def _clipped_surrogate(ratio: torch.Tensor, advantage: torch.Tensor, lowest: float, highest: float) -> torch.Tensor:
    """min(r A, clip(r, lowest, highest) A), the surrogate of PPO."""
    return torch.minimum(ratio * advantage, ratio.clamp(lowest, highest) * advantage)


def _policy_loss(loss: torch.Tensor, ratio: torch.Tensor, lower: float, upper: float) -> PolicyLoss:
    if not len(ratio):
        return PolicyLoss(loss, 0.0, 1.0)
    ratio = ratio.detach()
    clipped = ((ratio < lower) | (ratio > upper)).float().mean()
    return PolicyLoss(loss, float(clipped), float(ratio.mean()))


def _limits(clip: Clip) -> tuple[float, float]:
    low, high = (
        finite_number(limit) for limit in (clip if isinstance(clip, tuple) and len(clip) == 2 else (clip, clip))
    )
    if low is None or high is None or not 0 <= low <= 1 or high < 0:
        rule = "pass a number from 0 to 1, or (low, high) with low from 0 to 1 and high of at least 0"
        raise ArgumentError("clip", clip, rule)
    return low, high
