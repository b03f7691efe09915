"""What a report keeps of each episode, so that memory holds one episode at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rollouts.numbers import finite_number, mean_and_spread
from rollouts.trajectory.tree import Trajectory
from rollouts.view.token_columns import ENTROPY


@dataclass(frozen=True, slots=True)
class EpisodeFigures:
    """One episode. `number` is its place in the file, `record` that of its record.

    `sampled` counts sampled tokens; `surprisal` is the sum of their negative log-probabilities, in nats, `entropy`
    the sum of their entropies over `entropy_tokens` tokens whose entropy is known.
    """

    number: int
    record: int
    episode_id: str
    group_id: str
    reward: float
    turns: int
    tokens: int
    sampled: int
    surprisal: float
    entropy: float
    entropy_tokens: int
    started_at: float
    seconds: float
    ending: str
    error: str
    truncation_reason: str
    metrics: Mapping[str, float]

    @property
    def failed(self) -> bool:
        return bool(self.error)


def episode_figures(trajectory: Trajectory, number: int, record: int) -> EpisodeFigures:
    """The figures of an episode. Its reward may be infinite: that is the sum of rewards of turns."""
    entropies = [
        node.extras[ENTROPY][node.sampled]
        for node in trajectory.nodes
        if ENTROPY in node.extras and node.extras[ENTROPY].ndim == 1 and node.extras[ENTROPY].dtype.kind in "biuf"
    ]
    entropy = np.concatenate([np.empty(0), *entropies]).astype(np.float64)
    entropy = entropy[np.isfinite(entropy)]
    metrics = {name: value for name, one in trajectory.metrics.items() if (value := finite_number(one)) is not None}
    return EpisodeFigures(
        number=number,
        record=record,
        episode_id=trajectory.episode_id,
        group_id=trajectory.group_id,
        reward=trajectory.reward,
        turns=len(trajectory.turns),
        tokens=sum(map(len, trajectory.nodes)),
        sampled=sum(len(node.logprobs) for node in trajectory.nodes),
        surprisal=-sum(float(node.logprobs.astype(np.float64).sum()) for node in trajectory.nodes),
        entropy=mean_and_spread(entropy).mean * len(entropy) if len(entropy) else 0.0,
        entropy_tokens=len(entropy),
        started_at=trajectory.started_at,
        seconds=max(trajectory.seconds, 0.0),
        ending=_ending(trajectory),
        error=trajectory.error,
        truncation_reason=trajectory.truncation_reason,
        metrics=metrics,
    )


def _ending(trajectory: Trajectory) -> str:
    if trajectory.error:
        return "error"
    if trajectory.truncated:
        return "truncated"
    return "done" if trajectory.done else "open"
