"""The entries of a journal: small records, which refer to tasks and episodes by their position in another file.

Each entry is complete in itself: to lose one changes what is known about its own task only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from transport import wire_type


@wire_type("rollouts.JournalBegun")
@dataclass(frozen=True, slots=True)
class JournalBegun:
    """The first entry: the configuration of the run, as names and plain values."""

    configuration: dict[str, Any]


@wire_type("rollouts.JournalStarted")
@dataclass(frozen=True, slots=True)
class JournalStarted:
    """A task was started. `record` is the position of the `Task`."""

    task_id: str
    record: int


@wire_type("rollouts.JournalAttempted")
@dataclass(frozen=True, slots=True)
class JournalAttempted:
    """An attempt at episode `index` of a task ended. `attempt` counts from 0; after a `final` one there is no other.

    `record` is the position of the episode. The entry is written before the episode, so that every episode has an
    entry; it counts only if the record at this position is the episode `episode_id`.
    """

    task_id: str
    index: int
    attempt: int
    episode_id: str
    final: bool
    record: int


@wire_type("rollouts.JournalFinished")
@dataclass(frozen=True, slots=True)
class JournalFinished:
    """A group is complete. `values` are the fields of the `Group` other than task and episodes.

    `task_record` and `records` are the positions of its task and of its episodes, in order of their index.
    """

    task_id: str
    values: dict[str, Any]
    task_record: int
    records: tuple[int, ...]
    episode_ids: tuple[str, ...]


@wire_type("rollouts.JournalClosed")
@dataclass(frozen=True, slots=True)
class JournalClosed:
    """Nothing is left to do for a task: its group was delivered, or discarded for a `reason` that is not empty."""

    task_id: str
    reason: str = ""


@wire_type("rollouts.JournalWeights")
@dataclass(frozen=True, slots=True)
class JournalWeights:
    """The weights of `version` came into use."""

    version: str


Entry: TypeAlias = JournalBegun | JournalStarted | JournalAttempted | JournalFinished | JournalClosed | JournalWeights
