"""Reads the episodes of a trajectory file that may be damaged or hostile.

A file of a few hundred bytes can hold a tuple of which both members are one tuple, of which both members
are one tuple, and so on: it is decoded in no time, because a shared value is built once, but printing or
exporting it would not end.
"""

import dataclasses
import enum
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from renderers import MediaSource
from rollouts.errors import CommandFileError
from rollouts.trajectory.packed_episodes import PackedEpisodes
from rollouts.trajectory.tree import Trajectory
from transport import RecordReader, TransportError
from transport.errors import quoted

MAX_DEPTH: Final = 100
MAX_VALUES: Final = 1 << 24
MAX_BITS: Final = 1 << 13  # Python refuses to print an integer of more than about 14,000 bits
_WITHOUT_PARTS: Final = (str, int, float, bytes, type(None))


def limit_violation(value: Any, sizes: dict[int, tuple[int, int] | None]) -> str | None:
    """Why `value` cannot be walked in bounded time and recursion, or None: too deep, too many parts, an endless int.

    A part counts as often as it is found, and is looked at once: `sizes` has the number of parts and the
    depth of what was looked at, by id, None while those are not known.
    """
    waiting: list[tuple[Any, Collection[Any] | None]] = [(value, None)]
    while waiting:
        part, inside = waiting.pop()
        if inside is not None:
            of_parts = [sizes.get(id(one), (1, 0)) for one in inside]
            known = [one for one in of_parts if one is not None]
            if len(known) < len(of_parts):
                return "values that contain themselves"
            size, depth = 1 + sum(one[0] for one in known), 1 + max(one[1] for one in known)
            if depth > MAX_DEPTH:
                return f"values more than {MAX_DEPTH} deep"
            if size > MAX_VALUES:
                return f"more than {MAX_VALUES:,} values"
            sizes[id(part)] = size, depth
        elif type(part) is int and part.bit_length() > MAX_BITS:
            return f"an integer of {part.bit_length()} bits"
        elif isinstance(part, _WITHOUT_PARTS):
            continue
        elif isinstance(part, np.ndarray) and not part.nbytes:
            if (rows := math.prod(max(one, 1) for one in part.shape)) > MAX_VALUES:
                return f"{rows:,} rows of nothing"
            sizes[id(part)] = rows, 1
        elif id(part) not in sizes and (parts := _parts(part)):
            sizes[id(part)] = None
            waiting.append((part, parts))
            waiting += [(one, None) for one in parts]
    return None


def _parts(value: Any) -> Collection[Any]:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, MediaSource):
        return (value.digest,)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, (enum.Enum, type)):  # whose attributes lead everywhere
        return ()
    return list(getattr(value, "__dict__", {}).values())


@dataclass(frozen=True, slots=True)
class Episode:
    """The `number`th episode of a file, and the `place`th of record `record`, counted from 0."""

    number: int
    record: int
    place: int
    trajectory: Trajectory

    @property
    def name(self) -> str:
        return f"record {self.record}, episode {quoted(self.trajectory.episode_id)}"


def read_episodes(reader: RecordReader, problems: list[str], *, media: bool = True) -> Iterator[Episode]:
    """The episodes in order whose values can be printed and exported; one record holds one, or a list of them.

    Without `media`, the media have digests and no bytes (`RecordReader.without_media`). `problems` gets a
    line for each record, or part of one, that holds no such episode, and for an incomplete last record.
    """
    number = 0
    for record in range(len(reader)):
        try:
            found, episodes = episodes_of_record(reader, record, number, problems, media=media)
        except TransportError as error:
            problems.append(f"record {record}: {error}")
            continue
        number += found
        yield from episodes
    if reader.truncated_bytes:
        problems.append(f"the last {reader.truncated_bytes} bytes are an incomplete record")


def episodes_of_record(
    reader: RecordReader, record: int, number: int, problems: list[str], *, media: bool = True
) -> tuple[int, list[Episode]]:
    """How many episodes a record holds, of which the first is number `number`, and those that can be printed.

    `problems` and `media` as for `read_episodes`. Raises `TransportError` for a record that cannot be read.
    """
    held = reader[record] if media else reader.without_media(record)
    found = list(_members(held))
    if not found:
        problems.append(f"record {record}: it holds a {type(held).__name__} and no episode")
    place, episodes = 0, []
    for member in found:
        if not isinstance(member, Trajectory):
            problems.append(f"record {record}: it holds a {type(member).__name__} among its episodes")
            continue
        episode = Episode(number + place, record, place, member)
        place += 1
        if (violation := _unbounded_value(member)) is None:
            episodes.append(episode)
        else:
            problems.append(f"{episode.name}: {violation}")
    return place, episodes


def _members(held: object) -> Iterator[object]:
    """What a record holds: a group is a list of episodes, at any depth; what came over a connection may be packed.

    A list that occurs several times in a record is read once: a small record can hold exponentially many
    paths to it.
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
    sizes: dict[int, tuple[int, int] | None] = {}
    total = 0
    for name, value in parts.items():
        if (reason := limit_violation(value, sizes)) is not None:
            return f"{name} hold {reason}"
        total += (sizes.get(id(value)) or (1, 1))[0]
        if total > MAX_VALUES:
            return f"{name}, with all before, hold more than {MAX_VALUES:,} values"
    return None


#: The name of the trajectory file in the output directory of a run or demo.
TRAJECTORIES_FILE: Final = "trajectories.mmr"


def open_reader(path: Path) -> RecordReader:
    """Open a record file, or that of a run's directory. Raises `OSError`, and `CommandFileError` for other files."""
    file = trajectory_file(path)
    try:
        return RecordReader(file)
    except TransportError as error:
        raise CommandFileError(file, f"not a trajectory file: {error}") from error


def trajectory_file(path: Path) -> Path:
    """The file itself, or that of a run's directory. Raises `CommandFileError` for another directory."""
    if not path.is_dir():
        return path
    if not is_run_directory(path):
        raise CommandFileError(path, f"the directory has no {TRAJECTORIES_FILE}; name a trajectory file")
    return path / TRAJECTORIES_FILE


def title_of_file(path: Path) -> str:
    """The name of the run whose trajectory file this is, that of its directory; of another file its own name."""
    return path.name if path.name != TRAJECTORIES_FILE else path.parent.resolve().name or path.name


def is_run_directory(path: Path) -> bool:
    """Whether it is a directory with a trajectory file, as `rollouts run` and `rollouts demo` write it."""
    return (path / TRAJECTORIES_FILE).is_file()
