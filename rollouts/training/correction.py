"""Off-policy correction: importance weights for tokens that another policy sampled, and rejection of some of them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from rollouts.errors import ArgumentError, short_repr
from rollouts.training.masked_terms import (
    Correction,
    checked_mask,
    limited_k3,
    log_ratios,
    sequence_sums,
    trained_sequences,
)
from rollouts.values import Bounded, number_field

#: The sum of a loss with larger weights is not finite in float32.
_MAX_WEIGHT = 1e30


@dataclass(frozen=True, slots=True)
class CorrectionOptions(Bounded):
    """What `rollout_correction` does, with r = p(policy) / p(sampler) of a token; all by default off.

    - `token_weights`: a token's weight is min(r, this) (TIS: Yao et al. 2025, "Your Efficient RL Framework
      Secretly Brings You Off-Policy RL Training").
    - `sequence_weights`: in its place min(product of r over the sequence, this) (Liu et al. 2025, "When Speed
      Kills Stability").
    - `normalise`: weights are divided by their mean over the tokens, or sequences, that are kept.
    - `token_low`, `token_high`: a token is rejected whose r is below or above (IcePop: Ring-1T, Ling Team
      2025, arXiv:2510.18855).
    - `product_low`, `product_high`: a sequence is, by the product of its r (masked importance sampling, Liu
      et al. 2025).
    - `mean_low`, `mean_high`: a sequence is, by their geometric mean, whatever its length (verl, "Rollout
      Correction").
    - `veto`: a sequence is, if r of one of its tokens is below (the same).
    - `max_lag`: a token is, whose weights are more versions than this behind the trainer's.
    """

    token_weights: float | None = number_field(None, above=0, most=_MAX_WEIGHT)
    sequence_weights: float | None = number_field(None, above=0, most=_MAX_WEIGHT)
    normalise: bool = False
    token_low: float | None = number_field(None, above=0)
    token_high: float | None = number_field(None, above=0)
    product_low: float | None = number_field(None, above=0)
    product_high: float | None = number_field(None, above=0)
    mean_low: float | None = number_field(None, above=0)
    mean_high: float | None = number_field(None, above=0)
    veto: float | None = number_field(None, above=0)
    max_lag: float | None = number_field(None, least=0)


def correction_options(given: Mapping[str, Any]) -> CorrectionOptions:
    """The options of a dictionary. Raises `ArgumentError`."""
    known = [each.name for each in fields(CorrectionOptions)]
    for name in given:
        if name not in known:
            raise ArgumentError("correction", short_repr(name), f"there is no such option; pass {', '.join(known)}")
    options = CorrectionOptions(**given)
    if options.normalise not in (0, 1):  # as JSON and a configuration of Tinker have it, a number too
        raise ArgumentError("normalise", options.normalise, "pass True or False")
    if options.token_weights is not None and options.sequence_weights is not None:
        rule = "a token has one weight; leave out sequence_weights or token_weights"
        raise ArgumentError("sequence_weights", options.sequence_weights, rule)
    return options


def has_weights(options: Mapping[str, Any]) -> bool:
    return bool(options.get("token_weights") or options.get("sequence_weights"))


def rollout_correction(
    logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    mask: torch.Tensor,
    sequence_ids: torch.Tensor,
    options: Mapping[str, Any],
    *,
    lags: torch.Tensor | None = None,
) -> Correction:
    """Weights and a mask for the losses, where `sampler_logprobs` are not those of the policy that is trained.

        correction = rollout_correction(
            old_logprobs, batch.logprobs, batch.loss_mask, batch.sequence_ids, {"token_weights": 2.0, "veto": 1e-4}
        )
        loss = policy_gradient_loss(logprobs, old_logprobs, batch.advantages, correction).loss

    - `logprobs`: the policy's, from before the first step on these episodes. A loss that compares with them
      and takes the weights is PPO with a policy of its own for the limits (Hilton et al. 2021,
      arXiv:2110.00641). A loss that compares with the sampler's has the ratio as its weight already: give it
      a correction that only rejects.
    - `mask` bool: the trained tokens; `sequence_ids` integers: the sequence of each. All tensors (B, T).
    - `options`: those of `CorrectionOptions`, by name. All rules are applied to the tokens of `mask`; a
      sequence's ratio is of all of these, whether or not one of them is rejected.
    - `lags`: of each token, for `max_lag`; `token_lags` has them.

    A rejected token is no part of the sum of a loss, nor of the number that divides it; a `normaliser` of
    several batches counts the `mask` of their corrections. The weights have no gradient. Log-probabilities
    below -1e4, -inf too, count as -1e4.

    `figures` are of the tokens of `mask`:

    - `rejected`, and `rejected_` with `token`, `product`, `mean`, `veto` or `lag`: the share that all rules,
      and each that is given, reject;
    - `ess`: the effective sample size (sum w)^2 / (n sum w^2) of the n weights that are kept, those of tokens
      or of sequences, from 1 / n to 1 (Kish 1965); 0 where none is kept;
    - `chi2_token`, `chi2_sequence`: the mean of r^2 - 1, and of the square of its product over a sequence;
    - `kl_sampler_policy`, the mean of r - 1 - log r, and `kl_policy_sampler`, the mean of r log r - r + 1:
      estimates of at least 0 in nats (Schulman 2020, "Approximating KL Divergence").

    In figures a log r above 20 counts as 20. Raises `ArgumentError`.
    """
    given = correction_options(options)
    if given.max_lag is not None and lags is None:
        raise ArgumentError("lags", None, "max_lag needs the lag of each token: pass token_lags(batch, current)")
    others = {"sampler_logprobs": sampler_logprobs} | ({} if lags is None else {"lags": lags.to(logprobs.dtype)})
    mask = checked_mask(logprobs, mask, **others)
    log_ratio = log_ratios(logprobs.detach(), sampler_logprobs, mask)
    ids = trained_sequences(sequence_ids, mask)
    counts = torch.bincount(ids)
    products = sequence_sums(log_ratio, ids)

    rejected = {}
    for rule, values, low, high in (
        ("token", log_ratio, given.token_low, given.token_high),
        ("product", products[ids], given.product_low, given.product_high),
        ("mean", (products / counts)[ids], given.mean_low, given.mean_high),
    ):
        if low is not None or high is not None:
            below, above = math.log(low) if low else -math.inf, math.log(high) if high else math.inf
            rejected[rule] = (values < below) | (values > above)
    if given.veto is not None:
        rejected["veto"] = sequence_sums((log_ratio < math.log(given.veto)).to(log_ratio), ids)[ids] > 0
    if given.max_lag is not None and lags is not None:
        rejected["lag"] = lags.to(mask.device)[mask] > given.max_lag
    kept = ~torch.stack([torch.zeros_like(ids, dtype=torch.bool), *rejected.values()]).any(dim=0)

    # The limit before the exponential: a ratio may be larger than any number.
    if given.sequence_weights is not None:
        of_sequences = products.clamp(max=math.log(given.sequence_weights))
        weights, counted = of_sequences[ids], of_sequences[torch.bincount(ids[kept], minlength=len(counts)) > 0]
    else:
        limit = given.token_weights
        weights = torch.zeros_like(log_ratio) if limit is None else log_ratio.clamp(max=math.log(limit))
        counted = weights[kept]
    # Beside the largest: the products of long sequences may all be smaller than any number.
    largest = counted.max() if len(counted) else counted.new_zeros(())
    relative = (counted - largest).double().exp()
    if given.normalise and len(counted):
        weights = weights - largest - relative.mean().log()
    weights = weights.exp()
    capped = log_ratio.clamp(max=20)
    figures = {
        "rejected": _mean(~kept),
        **{f"rejected_{rule}": _mean(of_tokens) for rule, of_tokens in rejected.items()},
        "ess": float(relative.sum() ** 2 / relative.square().sum()) / len(counted) if len(counted) else 0.0,
        "chi2_token": _mean(torch.expm1(2 * capped)),
        "chi2_sequence": _mean(torch.expm1(2 * products.clamp(max=20))),
        "kl_sampler_policy": _mean(limited_k3(capped)),
        "kl_policy_sampler": _mean((capped * capped.exp() - torch.expm1(capped)).clamp(min=0)),
    }
    scattered = torch.zeros(mask.shape, dtype=weights.dtype, device=mask.device)
    return Correction(scattered.masked_scatter(mask, weights.where(kept, 0)), mask.masked_scatter(mask, kept), figures)


def _mean(values: torch.Tensor) -> float:
    """The mean of (n,), 0 for none."""
    return float(values.double().sum()) / max(1, len(values))
