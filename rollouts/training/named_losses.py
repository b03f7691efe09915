"""The losses of a `Trainer` by name: sums over tokens, with the names of inputs and options that Tinker's API has.

Definitions: https://tinker-docs.thinkingmachines.ai/losses; those with a teacher are our own. A loss gets the
values of all tokens of several rows, one after another, as tensors (1, n).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from rollouts.errors import ArgumentError, short_repr
from rollouts.training.correction import correction_options, has_weights
from rollouts.training.distillation import distillation_advantages, forward_kl_loss, generalised_jsd_loss
from rollouts.training.losses import (
    PolicyLoss,
    cispo_loss,
    dro_loss,
    importance_sampling_loss,
    policy_gradient_loss,
    sequence_ratio_loss,
)
from rollouts.training.masked_terms import Correction, Mask
from rollouts.values import check_positive, finite_number

#: The weight of each token, which a correction adds to the inputs of a row.
CORRECTION_WEIGHTS = "correction_weights"


class Given(NamedTuple):
    """What a loss is computed of: log-probabilities (1, n), the inputs of the rows, and int64 (1, n) which
    row a token belongs to; the options as numbers."""

    logprobs: torch.Tensor
    inputs: Mapping[str, torch.Tensor]
    rows: torch.Tensor
    options: Mapping[str, float]


class Outcome(NamedTuple):
    """The sum of a loss over the tokens. Of the tokens that count: how many, the sum of ratios, how many clipped."""

    loss: torch.Tensor
    tokens: int = 0
    ratios: float = 0.0
    clipped: float = 0.0


@dataclass(frozen=True, slots=True)
class NamedLoss:
    """`compute` gives the loss.

    `required` and `optional` are the inputs that a row has besides its target tokens. Without a `mask`, the
    tokens of a row that count are those with an advantage, or with `counts_all` all of them. `options` are
    the defaults of the numbers that a caller may set; None: it must set it. With `has_candidates` a row has
    the inputs `CANDIDATES` (n, k), and `compute` gets the trained model's log-probabilities of these ids as
    the input `candidate_logprobs`. With `takes_several` a row may have k targets for each token, whose
    log-probabilities and inputs are (1, n, k). `has_ratio`: a term is multiplied with the ratio to the sampler,
    in whose place weights of a correction come.
    """

    compute: Callable[[Given], Outcome]
    required: frozenset[str]
    optional: frozenset[str] = frozenset()
    options: Mapping[str, float | None] = field(default_factory=dict)
    counts_all: bool = False
    has_ratio: bool = True
    has_candidates: bool = False
    takes_several: bool = False

    @property
    def mask_name(self) -> str:
        """The input that says which tokens count."""
        return "sequence_ratio_mask" if "sequence_ratio_mask" in self.required else "mask"

    def inputs_of(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The inputs of a row with a `mask`, where the loss takes one."""
        if "mask" not in self.optional or "mask" in inputs:
            return dict(inputs)
        advantages = inputs["advantages"]
        return {**inputs, "mask": np.ones_like(advantages) if self.counts_all else advantages != 0}


def _cross_entropy(given: Given) -> Outcome:
    """The sum of -w log p; a weight may be negative, as those are that a client computes for a loss of its own."""
    weights = given.inputs.get("weights")
    return Outcome(-(given.logprobs if weights is None else weights * given.logprobs).sum())


def _mask(given: Given) -> Mask:
    """The tokens that count, with their weights where the rows were corrected."""
    mask, weights = given.inputs["mask"] != 0, given.inputs.get(CORRECTION_WEIGHTS)
    return mask if weights is None else Correction(weights, mask, {})


def _policy(loss: Callable[..., PolicyLoss], given: Given, **options: Any) -> Outcome:
    """A loss of which tokens with an advantage of 0 are no part."""
    inputs, mask = given.inputs, _mask(given)
    result = loss(given.logprobs, inputs["logprobs"], inputs["advantages"], mask, normaliser=1.0, **options)
    tokens = int((inputs["mask"] != 0).sum())
    return Outcome(result.loss, tokens, result.mean_ratio * tokens, result.clipped * tokens)


def _clipped(loss: Callable[..., PolicyLoss], given: Given) -> Outcome:
    """A loss whose ratios are limited to thresholds, which are absolute: 0.8 and not 1 - 0.8."""
    return _policy(loss, given, clip=_clip(given.options))


def _dro(given: Given) -> Outcome:
    """DRO as Tinker has it: tokens of the prompt and of advantage 0 count unless `mask` leaves them out."""
    return _policy(dro_loss, given, beta=given.options["beta"])


def _gspo(given: Given) -> Outcome:
    given = given._replace(inputs={**given.inputs, "mask": given.inputs["sequence_ratio_mask"]})
    options = {"sequence_ids": given.rows, "clip": _clip(given.options), "mean_over": "tokens"}
    return _policy(sequence_ratio_loss, given, **options)


def _reverse_kl(given: Given) -> Outcome:
    """The policy gradient of the advantages and of `coefficient` times what a teacher thinks of the sampled tokens."""
    inputs, mask = given.inputs, _mask(given)
    teacher, coefficient = inputs["teacher_logprobs"], given.options["coefficient"]
    taught = distillation_advantages(inputs["logprobs"], teacher, mask, coefficient=coefficient)
    advantages = inputs["advantages"] + taught
    return _policy(importance_sampling_loss, given._replace(inputs={**inputs, "advantages": advantages}))


def _with_divergence(loss: Callable[..., torch.Tensor], given: Given) -> Outcome:
    """The policy gradient of the advantages, and `coefficient` times a divergence from a teacher's likeliest tokens."""
    own = {name: number for name, number in given.options.items() if name != "coefficient"}
    policy = _policy(importance_sampling_loss, given)
    teacher = given.inputs["teacher_top_logprobs"]
    divergence = loss(given.inputs["candidate_logprobs"], teacher, _mask(given), normaliser=1.0, **own)
    return policy._replace(loss=policy.loss + given.options["coefficient"] * divergence)


def _clip(options: Mapping[str, float]) -> tuple[float, float]:
    return 1 - options["clip_low_threshold"], options["clip_high_threshold"] - 1


_POLICY = frozenset({"logprobs", "advantages"})
_MASK = frozenset({"mask"})
#: A teacher's likeliest ids in the place of each target, and their log-probabilities under it.
CANDIDATES = frozenset({"teacher_top_ids", "teacher_top_logprobs"})
#: Of PPO and CISPO: the limits of PPO's authors (Schulman et al. 2017, table 1), which Tinker documents as
#: its own.
_THRESHOLDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

NAMED_LOSSES: Mapping[str, NamedLoss] = MappingProxyType(
    {
        "cross_entropy": NamedLoss(_cross_entropy, frozenset(), frozenset({"weights"}), takes_several=True),
        "importance_sampling": NamedLoss(partial(_policy, importance_sampling_loss), _POLICY, _MASK),
        "ppo": NamedLoss(partial(_clipped, policy_gradient_loss), _POLICY, _MASK, _THRESHOLDS),
        "cispo": NamedLoss(partial(_clipped, cispo_loss), _POLICY, _MASK, _THRESHOLDS),
        "dro": NamedLoss(_dro, _POLICY, _MASK, {"beta": None}, counts_all=True, has_ratio=False),
        # Of GSPO: those of its authors (Zheng et al. 2025, section 5.1). A mean over a sequence varies much
        # less.
        "gspo": NamedLoss(
            _gspo,
            _POLICY | {"sequence_ratio_mask"},
            frozenset(),
            {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
        ),
        "reverse_kl": NamedLoss(_reverse_kl, _POLICY | _MASK | {"teacher_logprobs"}, options={"coefficient": 1.0}),
        "forward_kl": NamedLoss(
            partial(_with_divergence, forward_kl_loss),
            _POLICY | _MASK | CANDIDATES,
            options={"coefficient": 1.0},
            has_candidates=True,
        ),
        "jsd": NamedLoss(
            partial(_with_divergence, generalised_jsd_loss),
            _POLICY | _MASK | CANDIDATES,
            options={"coefficient": 1.0, "beta": 0.5},
            has_candidates=True,
        ),
    }
)


def named_loss(name: object) -> NamedLoss:
    """The loss of a name. Raises `ArgumentError`."""
    loss = NAMED_LOSSES.get(name) if isinstance(name, str) else None
    if loss is None:
        raise ArgumentError("loss", name, f"pass one of {', '.join(NAMED_LOSSES)}")
    return loss


def loss_options(name: str, given: Mapping[str, Any] | None) -> dict[str, float]:
    """The options of a loss, its defaults in place of those that are not given. Raises `ArgumentError`."""
    known = named_loss(name).options
    options: dict[str, Any] = {**known, **(given or {})}
    for key, value in options.items():
        if key not in known:
            taken = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ArgumentError("options", short_repr(key), f"{name} has no such option; {taken}")
        if key in ("beta", "coefficient"):
            options[key] = check_positive(f"options[{key!r}]", value)
            if (name, key) == ("jsd", "beta") and options[key] >= 1:
                raise ArgumentError("options['beta']", value, "pass a number above 0 and below 1")
            continue
        number = finite_number(value)
        if key == "clip_low_threshold" and (number is None or not 0 <= number <= 1):
            raise ArgumentError(f"options[{key!r}]", value, "pass the smallest ratio, from 0 to 1, such as 0.8")
        if key == "clip_high_threshold" and (number is None or number < 1):
            raise ArgumentError(f"options[{key!r}]", value, "pass the largest ratio, at least 1, such as 1.2")
        options[key] = number
    return options


def check_correction(loss: str, options: Mapping[str, Any]) -> None:
    """Raise `ArgumentError` for a correction that does not exist, or that is not defined for the loss."""
    correction_options(options)
    if has_weights(options) and loss == "reverse_kl":
        rule = "the teacher is compared with the sampler's log-probabilities; pass rules that reject, no weights"
        raise ArgumentError("correction", dict(options), rule)
    if "logprobs" not in named_loss(loss).required:
        rule = "the loss has no log-probabilities of a sampler; leave it out, or pass importance_sampling"
        raise ArgumentError("correction", dict(options), rule)
