"""The hyperparameters and targets of the demonstration."""

from __future__ import annotations

from dataclasses import dataclass

# On a CPU, plain matrix products are faster than the fused kernel for rows this short, but not for images.
ATTENTION = {"text_config": "eager", "vision_config": "sdpa"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Warm start: supervised on few labelled digits, stopped at accuracy `sft_target`. Then RL only.

    An RL step runs `group_size` episodes for each of `groups` digits and makes `epochs` optimizer steps on
    all of them. The learning rate decreases to the share `final_rate`. A pass over the digits keeps the share
    `kept_solved` of the solved ones.
    """

    rl_steps: int = 60
    groups: int = 128
    group_size: int = 4
    epochs: int = 2
    rl_learning_rate: float = 2e-3
    rl_warmup: int = 12
    final_rate: float = 0.03
    kept_solved: float = 0.25
    evaluate_every: int = 10
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


RECIPE = Recipe()


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of every run, in addition to its recipe's `target_accuracy`."""

    lift: float = 0.25
    blank: float = 0.20  # twice the accuracy of guessing: the images, and not the prompts, are read
    max_mismatch: float = 1e-4
    max_memory_gb: float = 3.0


TARGETS = Targets()
