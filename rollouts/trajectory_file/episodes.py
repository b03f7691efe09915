"""The episodes of a trajectory file, one after the other, with what is wrong with the file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rollouts.task import Task
from rollouts.trajectory.packed_episodes import PackedEpisodes
from rollouts.trajectory.tree import Trajectory
from rollouts.trajectory_file.value_limits import limit_violation
from transport import RecordReader, TransportError
from transport.wire.error_texts import quoted


@dataclass(frozen=True, slots=True)
class Episode:
    """The `number`th episode of a file, from record `record`.

    `violation` says why its values cannot be printed or exported; None if they can.
    """

    number: int
    record: int
    trajectory: Trajectory
    violation: str | None

    @property
    def name(self) -> str:
        return f"record {self.record}, episode {quoted(self.trajectory.episode_id)}"


def read_episodes(reader: RecordReader, problems: list[str]) -> Iterator[Episode]:
    """Every episode in order; one record holds one, or a list of them.

    `problems` gets a line for each record, or part of one, that holds no episode, and for an incomplete last record.
    """
    number = 0
    for record in range(len(reader)):
        try:
            for episode in episodes_of_record(reader, record, number, problems):
                yield episode
                number += 1
        except TransportError as error:
            problems.append(f"record {record}: {error}")
    if reader.truncated_bytes:
        problems.append(f"the last {reader.truncated_bytes} bytes are an incomplete record")


def episodes_of_record(reader: RecordReader, record: int, number: int, problems: list[str]) -> Iterator[Episode]:
    """The episodes of one record; the first is number `number`. `problems` as for `read_episodes`.

    Raises `TransportError` before the first episode for a record that cannot be read.
    """
    held = reader[record]
    if isinstance(held, Task):  # the journal of a run has the tasks with the episodes
        return
    found = list(_members(held))
    if not found:
        problems.append(f"record {record}: it holds a {type(held).__name__} and no episode")
    for member in found:
        if isinstance(member, Trajectory):
            yield Episode(number, record, member, _unbounded_value(member))
            number += 1
        else:
            problems.append(f"record {record}: it holds a {type(member).__name__} among its episodes")


def _members(held: object) -> Iterator[object]:
    """What a record holds: a group is a list of episodes, at any depth; what came over a connection may be packed.

    A list that occurs several times in a record is read once: a small record can hold exponentially many paths to it.
    """
    waiting = [held]
    visited: set[int] = set()
    while waiting:
        member = waiting.pop()
        group = member.episodes if isinstance(member, PackedEpisodes) else member
        if isinstance(group, (list, tuple)):
            if id(group) not in visited:
                visited.add(id(group))
                waiting.extend(reversed(group))
        elif isinstance(member, Trajectory) or member is not held:
            yield member


def _unbounded_value(trajectory: Trajectory) -> str | None:
    """The first value of an episode that is too large or too deep to be printed or exported."""
    parts: dict[str, object] = {"metrics or provenance": (trajectory.metrics, trajectory.provenance)}
    for index, node in enumerate(trajectory.nodes):
        parts[f"node {index}: messages or extras"] = node.messages, dict(node.extras)
    for index, turn in enumerate(trajectory.turns):
        parts[f"turn {index}: message or info"] = turn.message, turn.info
    for name, value in parts.items():
        if (reason := limit_violation(value)) is not None:
            return f"{name} hold {reason}"
    return None
