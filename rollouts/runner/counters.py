"""The counts of a runner."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class RunnerCounters:
    """The counts of a runner. Their names are those of `rollouts.observability.METRICS`."""

    episodes_started: int = 0
    episodes_retried: int = 0
    episodes_ended: Counter[str] = field(default_factory=Counter)
    forks: int = 0
    length_stops: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_images: int = 0
    prompt_sounds: int = 0
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
        values: dict[str, float] = {}
        for name in (one.name for one in fields(self)):
            value = getattr(self, name)
            if isinstance(value, Counter):
                values |= {f"{name}/{label}": count for label, count in value.items()}
            elif name.endswith("_seconds"):
                values[f"turn_seconds_sum/{name.removesuffix('_seconds')}"] = value
            else:
                values[name] = value
        values["episodes_running"] = self.episodes_started - self.episodes_ended.total()
        return values
