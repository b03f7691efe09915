"""Distillation: losses and advantages from a teacher's log-probabilities.

They are those of what the student sampled, or of the teacher's own likeliest tokens in the same places. The
module `losses` explains `mean_over`, `sequence_ids` and `normaliser`.
"""

import math

import torch

from rollouts.errors import ArgumentError
from rollouts.training.losses import PolicyLoss, importance_sampling_loss
from rollouts.training.masked_terms import Mask, MeanOver, checked_mask, log_ratios, masked_logprobs, masked_mean
from rollouts.values import check_positive, finite_number


def distillation_advantages(
    logprobs: torch.Tensor, teacher_logprobs: torch.Tensor, mask: Mask, *, coefficient: float = 1.0
) -> torch.Tensor:
    """coefficient * (log p(teacher) - log p(student)) on masked tokens, 0 elsewhere; (B, T), without gradient.

        advantages = batch.advantages + distillation_advantages(
            batch.logprobs, batch.column("teacher_logprobs"), batch.loss_mask, coefficient=0.1
        )

    A sampled token's part of -KL(student || teacher), as an advantage of a policy-gradient loss: on-policy
    distillation (Lu 2025, "On-Policy Distillation", Thinking Machines Lab; Gu et al. 2023, arXiv:2306.08543,
    equation 2). `logprobs` are the sampler's. float32, or float64 where an argument is float64. Raises
    `ArgumentError`.
    """
    factor = check_positive("coefficient", coefficient)
    trained = checked_mask(logprobs, mask, teacher_logprobs=teacher_logprobs)
    values = -factor * log_ratios(logprobs.detach(), teacher_logprobs, trained)
    return torch.zeros_like(logprobs, dtype=values.dtype, requires_grad=False).masked_scatter(trained, values)


def reverse_kl_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    teacher_logprobs: torch.Tensor,
    mask: Mask,
    *,
    mean_over: MeanOver = "tokens",
    sequence_ids: torch.Tensor | None = None,
    normaliser: float | None = None,
) -> PolicyLoss:
    """KL(student || teacher) from tokens that the student sampled: r (log p(old) - log p(teacher)), r = p / p(old).

    `importance_sampling_loss` with `distillation_advantages`: its value on policy is the mean of -d of
    `kl_loss`, and its gradient in expectation that of the divergence of the next token. A student that equals
    its teacher has a loss of 0. The other arguments are those of `policy_gradient_loss`.
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
    mask: Mask,
    *,
    mean_over: MeanOver = "tokens",
    sequence_ids: torch.Tensor | None = None,
    normaliser: float | None = None,
) -> torch.Tensor:
    """KL(teacher || student) over the teacher's k likeliest tokens, and the rest of the vocabulary as one token more.

        ids, teacher = batch.column("teacher_top_ids"), batch.column("teacher_top_logprobs")
        loss = forward_kl_loss(candidate_logprobs(model, batch, ids), teacher, batch.loss_mask)

    With p the teacher and q the student: the sum over the k tokens of p log(p / q), plus P log(P / Q) for the
    mass P = 1 - sum p and Q = 1 - sum q that is left (Hinton et al. 2015, arXiv:1503.02531, for distributions
    as targets; merging the rest of the vocabulary never increases the divergence). A mass below 1e-6 counts
    as 1e-6, which is what sums of float32 can tell. A scalar. The first two arguments are (B, T, k); the
    others are those of `sft_loss`.
    """
    teacher, student = _checked(top_logprobs, teacher_top_logprobs, mask)
    return masked_mean(_divergence(teacher, student), mask, mean_over, sequence_ids, normaliser)


def generalised_jsd_loss(
    top_logprobs: torch.Tensor,
    teacher_top_logprobs: torch.Tensor,
    mask: Mask,
    *,
    beta: float = 0.5,
    mean_over: MeanOver = "tokens",
    sequence_ids: torch.Tensor | None = None,
    normaliser: float | None = None,
) -> torch.Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m), with m = beta p + (1 - beta) q: between the two directions of KL.

    The generalised Jensen-Shannon divergence of GKD (Agarwal et al. 2024, arXiv:2306.13649, equation 1), p
    the teacher and q the student over k tokens and the rest, as in `forward_kl_loss`, whose arguments these
    are. Divided by beta it tends to KL(p || q) as beta falls to 0, and by 1 - beta to KL(q || p) as beta
    rises to 1. 0 < beta < 1.
    """
    weight = finite_number(beta)
    if weight is None or not 0 < weight < 1:
        raise ArgumentError("beta", beta, "pass a number above 0 and below 1; forward_kl_loss is the limit of beta 0")
    teacher, student = _checked(top_logprobs, teacher_top_logprobs, mask)
    mixture = torch.logaddexp(teacher + math.log(weight), student + math.log1p(-weight))
    terms = weight * _divergence(teacher, mixture) + (1 - weight) * _divergence(student, mixture)
    return masked_mean(terms, mask, mean_over, sequence_ids, normaliser)


def _divergence(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(one || other) of distributions as log-probabilities (n, k): (n,)."""
    return (one.exp() * (one - other)).sum(dim=-1)


def _with_rest(top_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The masked rows (n, k), and the log of the mass that their tokens leave: (n, k + 1)."""
    top = masked_logprobs(top_logprobs, mask)
    # What is left of the vocabulary beside k tokens is at least this mass: less is within the rounding of
    # their sum.
    rest = (1 - top.exp().sum(dim=-1, keepdim=True)).clamp(min=1e-6).log()
    return torch.cat([top, rest], dim=-1)


def _checked(student: torch.Tensor, teacher: torch.Tensor, mask: Mask) -> tuple[torch.Tensor, torch.Tensor]:
    """`_with_rest` of teacher and student, whose tensors are (B, T, k), after a check of both."""
    for name, tensor in {"top_logprobs": student, "teacher_top_logprobs": teacher}.items():
        if tensor.dim() != 3 or tensor.shape != student.shape or not tensor.is_floating_point():
            rule = "pass two tensors of floats (rows, tokens, k) of the same ids: candidate_logprobs"
            raise ArgumentError(name, f"{tensor.dtype} {tuple(tensor.shape)}", rule)
    # Sums (B, T), also for a k of 0: one of them is NaN where a value is.
    trained = checked_mask(student.detach().sum(dim=-1), mask, teacher_top_logprobs=teacher.sum(dim=-1))
    return _with_rest(teacher.detach(), trained), _with_rest(student, trained)
