"""Supervised and policy-gradient losses on token log-probabilities.

Every loss is a sum over the trained tokens of a batch, divided by what `mean_over` and `normaliser` say:

- `mean_over="tokens"`: by the number of trained tokens (DAPO, Yu et al. 2025, arXiv:2503.14476);
- `mean_over="sequences"`: each sequence's terms by the number of its trained tokens, and the sum by the
  number of sequences with trained tokens (GRPO, Shao et al. 2024, arXiv:2402.03300);
- a `normaliser` replaces the number of tokens or sequences of this batch: that of all micro-batches, so that their
  gradients sum to the gradient of the whole; or a constant (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).

`sequence_ids` (B, T) says which sequence a token belongs to, so that padded and packed batches give the same loss.
Positions outside `mask` may hold anything: they get no gradient. Ratios are computed in float32 at least, also from
half-precision tensors. A token that the sampler found impossible leaves the loss finite: log-probabilities below -1e4,
-inf too, count as -1e4, and the exponential of a log-ratio above 20 continues linearly, so that the gradient keeps its
direction.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch

from rollouts.errors import ArgumentError
from rollouts.values import check_choice, check_positive, finite_number

MeanOver = Literal["tokens", "sequences"]
KLEstimator = Literal["k1", "k2", "k3"]

#: A float, the same limit on both sides of 1, or the limits below and above 1.
Clip = float | tuple[float, float]

#: The exponential of a log-ratio continues linearly above this: that of 89 is not finite in float32, and 0 * inf is no
#: number.
_MAX_LOG_RATIO = 20.0

#: Log-probabilities below this count as this: a difference with -inf is not finite.
_MIN_LOGPROB = -1e4

#: What is left of the vocabulary beside k tokens is at least this mass: less is within the rounding of their sum.
_LEAST_MASS = 1e-6


class PolicyLoss(NamedTuple):
    """The loss to minimise (scalar), the fraction of tokens whose ratio was clipped, and the mean ratio of tokens."""

    loss: torch.Tensor
    clipped: float
    mean_ratio: float


def sft_loss(
    logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    mean_over: MeanOver = "tokens",
    sequence_ids: torch.Tensor | None = None,
    normaliser: float | None = None,
) -> torch.Tensor:
    """Negative log-likelihood of the masked tokens, a scalar.

    `logprobs` float32 and `mask` bool, both (B, T). The module's docstring explains the other arguments. Raises
    `ArgumentError` for other shapes and dtypes, and for a normaliser that is not above 0.
    """
    mask = _checked_mask(logprobs, mask)
    return -_mean(_selected(logprobs, mask), mask, mean_over, sequence_ids, normaliser)


def policy_gradient_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip: Clip = 0.2,
    mean_over: MeanOver = "tokens",
    sequence_ids: torch.Tensor | None = None,
    normaliser: float | None = None,
) -> PolicyLoss:
    """The clipped surrogate of PPO: -min(r A, clip(r, 1 - low, 1 + high) A), with r = exp(logprobs - old_logprobs).

    Schulman et al. 2017, arXiv:1707.06347, equation 7. `clip` is one limit, or (low, high): DAPO (arXiv:2503.14476,
    "Clip-Higher") has (0.2, 0.28). `old_logprobs` are the sampler's, or the trainer's before its first step on these
    episodes. All tensors (B, T); the module's docstring explains the other arguments. Raises `ArgumentError` for
    tensors of other shapes and dtypes, and for values out of range.
    """
    low, high = _limits(clip)
    mask = _checked_mask(logprobs, mask, old_logprobs=old_logprobs, advantages=advantages)
    ratio = _limited_exp(_log_ratio(logprobs, old_logprobs, mask))
    surrogate = _clipped_surrogate(ratio, _selected(advantages, mask), 1 - low, 1 + high)
    return _policy_loss(-_mean(surrogate, mask, mean_over, sequence_ids, normaliser), ratio, 1 - low, 1 + high)


def importance_sampling_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    mean_over: MeanOver = "tokens",
    sequence_ids: torch.Tensor | None = None,
    normaliser: float | None = None,
) -> PolicyLoss:
    """The policy gradient with importance sampling: -r A, with r = exp(logprobs - old_logprobs), without any limit.

    The surrogate before the clipping of PPO: Schulman et al. 2017, arXiv:1707.06347, equation 6. The arguments are
    those of `policy_gradient_loss`; no ratio counts as clipped.
    """
    mask = _checked_mask(logprobs, mask, old_logprobs=old_logprobs, advantages=advantages)
    ratio = _limited_exp(_log_ratio(logprobs, old_logprobs, mask))
    loss = -_mean(ratio * _selected(advantages, mask), mask, mean_over, sequence_ids, normaliser)
    return _policy_loss(loss, ratio, 0.0, math.inf)


def cispo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip: Clip,
    mean_over: MeanOver = "tokens",
    sequence_ids: torch.Tensor | None = None,
    normaliser: float | None = None,
) -> PolicyLoss:
    """CISPO: -clip(r, 1 - low, 1 + high) A log p, where no gradient passes through the ratio r.

    MiniMax 2025, arXiv:2506.13585, equations 4 and 5. A clipped token keeps its gradient, unlike in PPO. The paper sets
    no lower limit (`clip=(1.0, high)`) and tunes the upper one. The arguments are those of `policy_gradient_loss`.
    """
    low, high = _limits(clip)
    mask = _checked_mask(logprobs, mask, old_logprobs=old_logprobs, advantages=advantages)
    ratio = _limited_exp(_log_ratio(logprobs.detach(), old_logprobs, mask))
    score = ratio.clamp(1 - low, 1 + high) * _selected(advantages, mask) * _selected_logprobs(logprobs, mask)
    return _policy_loss(-_mean(score, mask, mean_over, sequence_ids, normaliser), ratio, 1 - low, 1 + high)


def sequence_ratio_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    sequence_ids: torch.Tensor,
    clip: Clip = (3e-4, 4e-4),
    mean_over: MeanOver = "sequences",
    normaliser: float | None = None,
) -> PolicyLoss:
    """GSPO: the surrogate of PPO with one ratio for a sequence, the geometric mean of the ratios of its trained tokens.

    Zheng et al. 2025, arXiv:2507.18071; this is the form for advantages per token (GSPO-token, equations 13 and 14),
    whose value and gradient are those of GSPO (equation 5) where a sequence has one advantage. The default limits are
    the paper's. The arguments are those of `policy_gradient_loss`; `sequence_ids` integers (B, T).
    """
    low, high = _limits(clip)
    mask = _checked_mask(logprobs, mask, old_logprobs=old_logprobs, advantages=advantages)
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    constant = log_ratio.detach()
    means = _sequence_means(constant, _trained_sequences(sequence_ids, mask))
    ratio = _limited_exp(means + (log_ratio - constant))
    surrogate = _clipped_surrogate(ratio, _selected(advantages, mask), 1 - low, 1 + high)
    return _policy_loss(-_mean(surrogate, mask, mean_over, sequence_ids, normaliser), ratio, 1 - low, 1 + high)


def dro_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    beta: float,
    mean_over: MeanOver = "tokens",
    sequence_ids: torch.Tensor | None = None,
    normaliser: float | None = None,
) -> PolicyLoss:
    """DRO for each token: -(A log p - beta d^2 / 2), with d = logprobs - old_logprobs.

    Richemond et al. 2024, arXiv:2405.19107, in the form of Kimi k1.5 (2025, arXiv:2501.12599, equation 3): the square
    keeps the policy near the one that sampled, also where the advantage is 0. The arguments are those of
    `policy_gradient_loss`; no ratio counts as clipped.
    """
    penalty = check_positive("beta", beta)
    mask = _checked_mask(logprobs, mask, old_logprobs=old_logprobs, advantages=advantages)
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    terms = _selected(advantages, mask) * _selected_logprobs(logprobs, mask) - penalty / 2 * log_ratio.square()
    loss = -_mean(terms, mask, mean_over, sequence_ids, normaliser)
    return _policy_loss(loss, _limited_exp(log_ratio), 0.0, math.inf)


def kl_loss(
    logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    estimator: KLEstimator = "k3",
    mean_over: MeanOver = "tokens",
    sequence_ids: torch.Tensor | None = None,
    normaliser: float | None = None,
) -> torch.Tensor:
    """An estimate of KL(policy || reference) from tokens that the policy sampled, a scalar of at least 0 for k2 and k3.

    With d = reference - policy (Schulman 2020, "Approximating KL Divergence"): "k1" is -d, "k2" is d^2 / 2, "k3" is
    exp(d) - 1 - d, as in GRPO (arXiv:2402.03300, equation 4). As a loss, k2 has the gradient of the divergence in
    expectation, k3 approximately, and k1 none: it is for reports and for rewards. Above d = 20, k3 continues linearly
    with the gradient that it has at 20, which moves the policy towards the reference. The other arguments are those of
    `sft_loss`.
    """
    check_choice("estimator", estimator, KLEstimator)
    mask = _checked_mask(logprobs, mask, reference_logprobs=reference_logprobs)
    negative = _log_ratio(logprobs, reference_logprobs, mask)
    if estimator == "k1":
        terms = negative
    elif estimator == "k2":
        terms = negative.square() / 2
    else:
        terms = _limited_k3(-negative)
    return _mean(terms, mask, mean_over, sequence_ids, normaliser)


# Distillation: a teacher's log-probabilities of what the student sampled, or of its own likeliest tokens there.


def distillation_advantages(
    logprobs: torch.Tensor, teacher_logprobs: torch.Tensor, mask: torch.Tensor, *, coefficient: float = 1.0
) -> torch.Tensor:
    """coefficient * (log p(teacher) - log p(student)) on masked tokens, 0 elsewhere; (B, T), without gradient.

        advantages = batch.advantages + distillation_advantages(
            batch.logprobs, batch.column("teacher_logprobs"), batch.loss_mask, coefficient=0.1
        )

    A sampled token's part of -KL(student || teacher), as an advantage of a policy-gradient loss: on-policy distillation
    (Lu 2025, "On-Policy Distillation", Thinking Machines Lab; Gu et al. 2023, arXiv:2306.08543, equation 2). `logprobs`
    are the sampler's. float32, or float64 where an argument is float64. Raises `ArgumentError`.
    """
    factor = check_positive("coefficient", coefficient)
    mask = _checked_mask(logprobs, mask, teacher_logprobs=teacher_logprobs)
    values = -factor * _log_ratio(logprobs.detach(), teacher_logprobs, mask)
    return torch.zeros_like(logprobs, dtype=values.dtype, requires_grad=False).masked_scatter(mask, values)


def reverse_kl_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    teacher_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    mean_over: MeanOver = "tokens",
    sequence_ids: torch.Tensor | None = None,
    normaliser: float | None = None,
) -> PolicyLoss:
    """KL(student || teacher) from tokens that the student sampled: r (log p(old) - log p(teacher)), r = p / p(old).

    `importance_sampling_loss` with `distillation_advantages`: its value on policy is the estimate k1 of `kl_loss`, and
    its gradient in expectation that of the divergence of the next token. A student that equals its teacher has a loss
    of 0. The other arguments are those of `policy_gradient_loss`.
    """
    advantages = distillation_advantages(old_logprobs, teacher_logprobs, mask)
    return importance_sampling_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        mean_over=mean_over,
        sequence_ids=sequence_ids,
        normaliser=normaliser,
    )


def forward_kl_loss(
    top_logprobs: torch.Tensor,
    teacher_top_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    mean_over: MeanOver = "tokens",
    sequence_ids: torch.Tensor | None = None,
    normaliser: float | None = None,
) -> torch.Tensor:
    """KL(teacher || student) over the teacher's k likeliest tokens, and the rest of the vocabulary as one token more.

        ids, teacher = batch.column("teacher_top_ids"), batch.column("teacher_top_logprobs")
        loss = forward_kl_loss(candidate_logprobs(model, batch, ids), teacher, batch.loss_mask)

    With p the teacher and q the student: the sum over the k tokens of p log(p / q), plus P log(P / Q) for the mass
    P = 1 - sum p and Q = 1 - sum q that is left (Hinton et al. 2015, arXiv:1503.02531, for distributions as targets;
    merging the rest of the vocabulary never increases the divergence). A mass below 1e-6 counts as 1e-6, which is what
    sums of float32 can tell. A scalar. The first two arguments are (B, T, k); the others are those of `sft_loss`.
    """
    mask = _checked_mask_of_top(top_logprobs, teacher_top_logprobs, mask)
    teacher, student = _with_rest(teacher_top_logprobs.detach(), mask), _with_rest(top_logprobs, mask)
    return _mean(_divergence(teacher, student), mask, mean_over, sequence_ids, normaliser)


def generalised_jsd_loss(
    top_logprobs: torch.Tensor,
    teacher_top_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    beta: float = 0.5,
    mean_over: MeanOver = "tokens",
    sequence_ids: torch.Tensor | None = None,
    normaliser: float | None = None,
) -> torch.Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m), with m = beta p + (1 - beta) q: between the two directions of KL.

    The generalised Jensen-Shannon divergence of GKD (Agarwal et al. 2024, arXiv:2306.13649, equation 1), p the teacher
    and q the student over k tokens and the rest, as in `forward_kl_loss`, whose arguments these are. Divided by beta it
    tends to KL(p || q) as beta falls to 0, and by 1 - beta to KL(q || p) as beta rises to 1. 0 < beta < 1.
    """
    weight = finite_number(beta)
    if weight is None or not 0 < weight < 1:
        raise ArgumentError("beta", beta, "pass a number above 0 and below 1; forward_kl_loss is the limit of beta 0")
    mask = _checked_mask_of_top(top_logprobs, teacher_top_logprobs, mask)
    teacher, student = _with_rest(teacher_top_logprobs.detach(), mask), _with_rest(top_logprobs, mask)
    mixture = torch.logaddexp(teacher + math.log(weight), student + math.log1p(-weight))
    terms = weight * _divergence(teacher, mixture) + (1 - weight) * _divergence(student, mixture)
    return _mean(terms, mask, mean_over, sequence_ids, normaliser)


def _divergence(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(one || other) of distributions as log-probabilities (n, k): (n,)."""
    return (one.exp() * (one - other)).sum(dim=-1)


def _with_rest(top_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The masked rows (n, k), and the log of the mass that their tokens leave: (n, k + 1)."""
    top = _selected_logprobs(top_logprobs, mask)
    rest = (1 - top.exp().sum(dim=-1, keepdim=True)).clamp(min=_LEAST_MASS).log()
    return torch.cat([top, rest], dim=-1)


def _checked_mask_of_top(top_logprobs: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mask (B, T) on the device of `top_logprobs` (B, T, k), after a check of all shapes and dtypes."""
    for name, tensor in {"top_logprobs": top_logprobs, "teacher_top_logprobs": teacher}.items():
        if tensor.dim() != 3 or tensor.shape != top_logprobs.shape or not tensor.is_floating_point():
            rule = "pass two tensors of floats (rows, tokens, k) of the same ids: candidate_logprobs"
            raise ArgumentError(name, f"{tensor.dtype} {tuple(tensor.shape)}", rule)
    each_token = top_logprobs[..., :1].sum(dim=-1).detach()  # (B, T), also for a k of 0
    return _checked_mask(each_token, mask)


def _clipped_surrogate(ratio: torch.Tensor, advantage: torch.Tensor, lowest: float, highest: float) -> torch.Tensor:
    """min(r A, clip(r, lowest, highest) A), the surrogate of PPO."""
    return torch.minimum(ratio * advantage, ratio.clamp(lowest, highest) * advantage)


def _policy_loss(loss: torch.Tensor, ratio: torch.Tensor, lower: float, upper: float) -> PolicyLoss:
    if not len(ratio):
        return PolicyLoss(loss, 0.0, 1.0)
    ratio = ratio.detach()
    clipped = ((ratio < lower) | (ratio > upper)).float().mean()
    return PolicyLoss(loss, float(clipped), float(ratio.mean()))


def _selected(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The masked values, (n,), on the device of `mask`; float32 where they are in half precision."""
    selected = values.to(mask.device)[mask]
    if not selected.is_floating_point():
        return selected
    return selected.to(torch.promote_types(selected.dtype, torch.float32))


def _selected_logprobs(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The masked log-probabilities, (n,), each at least -1e4."""
    return _selected(logprobs, mask).clamp(min=_MIN_LOGPROB)


def _log_ratio(logprobs: torch.Tensor, others: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """logprobs - others on masked tokens, (n,), of log-probabilities of at least -1e4."""
    return _selected_logprobs(logprobs, mask) - _selected_logprobs(others.detach(), mask)


def _limited_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(x) up to x = 20, above it exp(20) (1 + x - 20): value and slope are continuous, and the slope is never 0."""
    limited = log_ratio.clamp(max=_MAX_LOG_RATIO)
    return torch.exp(limited) * (1 + (log_ratio - limited))


def _limited_k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """_limited_exp(x) - 1 - x, without the rounding of that difference near 0, and at least 0."""
    limited = log_ratio.clamp(max=_MAX_LOG_RATIO)
    beyond = _limited_exp(log_ratio) - torch.exp(limited)
    return (torch.expm1(limited) + beyond - log_ratio).clamp(min=0)


def _sequence_means(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """For each token the mean of `values` (n,) over the tokens of its sequence; `ids` int64 (n,)."""
    counts = torch.bincount(ids)
    sums = torch.zeros(len(counts), dtype=values.dtype, device=values.device).index_add_(0, ids, values)
    return (sums / counts)[ids]


def _mean(
    terms: torch.Tensor,
    mask: torch.Tensor,
    mean_over: MeanOver,
    sequence_ids: torch.Tensor | None,
    normaliser: float | None,
) -> torch.Tensor:
    """The terms (n,) of the masked tokens as one number, see the module's docstring; 0 without a masked token."""
    rule = "pass a number above 0, or None for the number of masked tokens or of their sequences"
    number = None if normaliser is None else check_positive("normaliser", normaliser, rule)
    check_choice("mean_over", mean_over, MeanOver)
    if mean_over == "tokens":
        return terms.sum() / (number or max(1, len(terms)))
    if sequence_ids is None:
        raise ArgumentError("sequence_ids", None, "pass batch.sequence_ids, which say what tokens are one sequence")
    ids = _trained_sequences(sequence_ids, mask)
    counts = torch.bincount(ids)
    return (terms / counts[ids]).sum() / (number or max(1, int(counts.count_nonzero())))


def _trained_sequences(sequence_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The sequence of each masked token, int64 (n,)."""
    if sequence_ids.shape != mask.shape or sequence_ids.is_floating_point() or sequence_ids.dtype == torch.bool:
        kind = f"{sequence_ids.dtype} {tuple(sequence_ids.shape)}"
        raise ArgumentError("sequence_ids", kind, f"pass integers {tuple(mask.shape)}, such as batch.sequence_ids")
    ids = _selected(sequence_ids, mask).long()
    if (ids < 0).any():
        row, column = (mask & (sequence_ids.to(mask.device) < 0)).nonzero()[0].tolist()
        rule = "the mask trains this position; pass the batch's own sequence_ids and loss_mask"
        raise ArgumentError(f"sequence_ids[{row}, {column}]", -1, rule)
    return ids


def _checked_mask(logprobs: torch.Tensor, mask: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
    """The mask on the device of `logprobs`, after a check of all shapes and dtypes."""
    for name, tensor in {"logprobs": logprobs, **others, "mask": mask}.items():
        if tensor.shape != logprobs.shape:
            rule = f"pass the tensors of one batch, each {tuple(logprobs.shape)} like logprobs"
            raise ArgumentError(f"the shape of {name}", tuple(tensor.shape), rule)
    for name, tensor in {"logprobs": logprobs, **others}.items():
        if not tensor.is_floating_point():
            raise ArgumentError(f"the dtype of {name}", str(tensor.dtype), "pass float32")
    if mask.dtype != torch.bool:
        raise ArgumentError("the dtype of mask", str(mask.dtype), "pass torch.bool: integers would be used as indices")
    return mask.to(logprobs.device)


def _limits(clip: Clip) -> tuple[float, float]:
    low, high = (
        finite_number(limit) for limit in (clip if isinstance(clip, tuple) and len(clip) == 2 else (clip, clip))
    )
    if low is None or high is None or not 0 <= low <= 1 or high < 0:
        rule = "pass a number from 0 to 1, or (low, high) with low from 0 to 1 and high of at least 0"
        raise ArgumentError("clip", clip, rule)
    return low, high
