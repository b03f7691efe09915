"""Counts what a runner does."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class RunnerCounters:
    """The counts of a runner. Their names are those of `rollouts.observability.METRICS`."""

    episodes_started: int = 0
    episodes_retried: int = 0
    episodes_ended: Counter[str] = field(default_factory=Counter)
    forks: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_images: int = 0
    engine_seconds: float = 0.0
    renderer_seconds: float = 0.0
    environment_seconds: float = 0.0
    groups_finished: int = 0
    groups_delivered: int = 0
    groups_skipped: Counter[str] = field(default_factory=Counter)
    groups_stale: Counter[str] = field(default_factory=Counter)
    weight_updates: int = 0
    weight_update_failures: int = 0

    def as_dict(self) -> dict[str, float]:
        """The counts by name; those with a label are `name/label`."""
        values: dict[str, float] = {
            name: getattr(self, name)
            for name in (
                "episodes_started",
                "episodes_retried",
                "forks",
                "turns",
                "prompt_tokens",
                "completion_tokens",
                "prompt_images",
                "groups_finished",
                "groups_delivered",
                "weight_updates",
                "weight_update_failures",
            )
        }
        for part in ("engine", "renderer", "environment"):
            values[f"turn_seconds_sum/{part}"] = getattr(self, f"{part}_seconds")
        for name in ("episodes_ended", "groups_skipped", "groups_stale"):
            values |= {f"{name}/{label}": count for label, count in getattr(self, name).items()}
        values["episodes_running"] = self.episodes_started - self.episodes_ended.total()
        return values
