"""The numbers of the demonstration."""

from __future__ import annotations

from dataclasses import dataclass

# For rows this short, plain matrix products beat the fused kernel on a CPU; for images they do not.
ATTENTION = {"text_config": "eager", "vision_config": "sdpa"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Warm start: supervised on few labelled digits, stopped when the policy is mediocre. Then RL only.

    An RL step plays `groups` digits, `group_size` episodes each, and makes `epochs` optimizer steps on all of them; the
    learning rate falls to `final_rate` of its value. Of the digits that a whole group answered at once, the next pass
    keeps the share `kept_solved`.
    """

    rl_steps: int
    groups: int = 128
    group_size: int = 4
    epochs: int = 2
    rl_learning_rate: float = 2e-3
    rl_warmup: int = 12
    final_rate: float = 0.03
    kept_solved: float = 0.25
    evaluate_every: int = 15
    labelled: int = 120
    sft_batch: int = 32
    sft_learning_rate: float = 2e-3
    sft_warmup: int = 20
    sft_first_check: int = 40
    sft_chunk: int = 4
    sft_max_steps: int = 200
    sft_target: float = 0.55
    probe_digits: int = 200
    held_out_digits: int = 360
    max_tokens: int = 4
    clip_gradient: float = 1.0
    micro_batch: int = 256
    target_accuracy: float = 0.90


QUICK = Recipe(rl_steps=40, rl_learning_rate=2.5e-3, evaluate_every=20, target_accuracy=0.85)
FULL = Recipe(rl_steps=150)


@dataclass(frozen=True, slots=True)
class Targets:
    """What every run must reach, beside its recipe's `target_accuracy`."""

    lift: float = 0.25
    blank_low: float = 0.05
    blank_high: float = 0.20
    max_mismatch: float = 1e-4
    max_memory_gb: float = 3.0


TARGETS = Targets()
