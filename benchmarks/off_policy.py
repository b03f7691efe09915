"""A bandit with a known optimum, sampled by stale policies that are truncated by top-k: with and without corrections.

    python benchmarks/off_policy.py [--plot FILE.png] [--check]

Four samplers, whose weights are never updated, draw arms among their three likeliest ones. The policy is a softmax of
one logit for each arm, and the objective its mean reward among the arms of each sampler, less 0.05 times the sum of the
squares of the logits. Its optimum is found by Newton's method on that formula.

Every step takes the expectation over the draws: each arm of a sampler once, its term times the probability that the
sampler draws it, and the reward less the mean reward of the sampler as its advantage, as in Dr. GRPO. Nothing is
random: where training ends is a property of the estimator alone.

Printed is KL(optimum || policy) at the end for each way to train. `--check` fails unless the corrected one is below
1e-6 and each of the others above 1e-2. `--plot` draws it over the steps.
"""

import argparse
import sys
from collections.abc import Mapping

import torch
from render import Report

from rollouts.training import Correction, importance_sampling_loss, rollout_correction
from rollouts.training.kept_tokens import scored_among
from rollouts.training.sequence_logprobs import SequenceLogprobs

REWARDS = torch.tensor([0.0, 0.2, 0.5, 0.7, 1.0, 0.9], dtype=torch.float64)
#: The logits of the samplers, each of which prefers other arms.
SAMPLERS = torch.tensor(
    [[3.0, 2.0, 1.5, 0, 0, 0], [0, 0, 2.5, 3.0, 1.0, 0], [0.5, 0, 0, 0, 2.0, 3.0], [2.0, 0, 0, 1.0, 0, 2.5]],
    dtype=torch.float64,
)
KEPT = SAMPLERS.topk(3, dim=1).indices
SAMPLER = torch.log_softmax(SAMPLERS.gather(1, KEPT), dim=1)
PENALTY = 0.05
STEPS, RATE = 1500, 0.5
#: By name: whether log-probabilities are those among the kept arms, and the options of the correction.
WAYS: Mapping[str, tuple[bool, Mapping[str, float] | None]] = {
    "uncorrected": (False, None),
    "weights alone": (False, {"token_weights": 1e3}),
    "kept ids alone": (True, None),
    "weights and kept ids": (True, {"token_weights": 1e3}),
}


def objective(logits: torch.Tensor) -> torch.Tensor:
    among = torch.softmax(logits[KEPT], dim=1)
    return (among * REWARDS[KEPT]).sum() - PENALTY * logits.square().sum()


def optimum() -> torch.Tensor:
    """The log-probabilities of the best policy."""
    logits = torch.zeros(len(REWARDS), dtype=torch.float64)
    for _ in range(50):
        gradient = torch.autograd.functional.jacobian(objective, logits)
        logits = logits - torch.linalg.solve(torch.autograd.functional.hessian(objective, logits), gradient)
    assert gradient.abs().max() < 1e-12
    return torch.log_softmax(logits, dim=0)


def trained(best: torch.Tensor, is_among_kept: bool, options: Mapping[str, float] | None) -> list[float]:
    """KL(optimum || policy) before each step."""
    logits = torch.zeros(len(REWARDS), dtype=torch.float64, requires_grad=True)
    mask, ids = torch.ones_like(KEPT, dtype=torch.bool), torch.arange(KEPT.numel()).reshape(KEPT.shape)
    kept = KEPT.repeat_interleave(KEPT.shape[1], dim=0) if is_among_kept else None
    rewards = REWARDS[KEPT]
    advantages = rewards - (SAMPLER.exp() * rewards).sum(dim=1, keepdim=True)
    divergences = []
    for _ in range(STEPS):
        policy = torch.log_softmax(logits, dim=0)
        divergences.append(float((best.exp() * (best - policy.detach())).sum()))

        def score(arms: torch.Tensor, policy: torch.Tensor = policy) -> SequenceLogprobs:
            return SequenceLogprobs(policy[arms], policy.new_zeros(len(arms)))

        logprobs = scored_among(kept, KEPT.reshape(-1), score).logprobs.reshape(KEPT.shape)
        old = logprobs.detach()
        chosen: torch.Tensor | Correction = mask
        if options is not None:
            chosen = rollout_correction(old, SAMPLER, mask, ids, options)
        loss = importance_sampling_loss(logprobs, old, advantages * SAMPLER.exp(), chosen, normaliser=1.0).loss
        (gradient,) = torch.autograd.grad(loss + PENALTY * logits.square().sum(), logits)
        with torch.no_grad():
            logits -= RATE * gradient
    return divergences


def plot(curves: Mapping[str, list[float]], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    for name, values in curves.items():
        style = "--" if name == "kept ids alone" else "-"  # it has the curve of no correction
        axes.semilogy([max(value, 1e-12) for value in values[:600]], style, label=name)
    axes.set(xlabel="step", ylabel="KL(optimum || policy), nats", ylim=(1e-8, 10))
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", help="the file of a plot")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    best = optimum()
    curves = {name: trained(best, *way) for name, way in WAYS.items()}
    report = Report()
    with report.table("A bandit with stale, truncated samplers", "KL(optimum || policy)") as table:
        for name, values in curves.items():
            is_corrected = name == "weights and kept ids"
            sign, target, text = (1, 1e-6, "<= 1e-6") if is_corrected else (-1, -1e-2, ">= 1e-2")
            table.add_row(name, f"{values[-1]:.1e}", *report.check(sign * values[-1], target, text))
    if options.plot:
        plot(curves, options.plot)
    return 1 if options.check and report.missed else 0


if __name__ == "__main__":
    sys.exit(main())
