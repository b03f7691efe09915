"""Tasks, episodes and groups for tests of the journal, and a second record of what was written to it."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from renderers import RenderedTokens
from renderers.media.item import MediaSource
from rollouts import Completion, FinishReason, Trajectory
from rollouts.runner.group import Group
from rollouts.runner.journal_file import Recorder
from rollouts.task import Task
from transport import encode

CONFIGURATION = {"group_size": 2, "seed": 0}


def image(number: int) -> MediaSource:
    return MediaSource.of(f"image {number}".encode() * 100)


def task(number: int) -> Task:
    return Task(f"task-{number}", {"image": image(number), "numbers": np.arange(number)}, seed=number)


def episode(task_number: int, index: int, attempt: int = 0, turns: int = 2, error: str = "") -> Trajectory:
    """A finished episode that has the image of its task, and an image of its own in each turn."""
    trajectory = Trajectory(f"task-{task_number}-{index}-{attempt}", group_id=f"task-{task_number}")
    for turn in range(turns):
        ids = np.arange(1, 40 + index, dtype=np.int32)
        completion = Completion(0, ids, -np.ones(len(ids), np.float32), FinishReason.STOP)
        trajectory.add_turn(RenderedTokens([1, 2, 3 + turn]), completion, {"role": "assistant", "content": "x"})
        own = image(1000 + 100 * task_number + 10 * index + turn)
        trajectory.record_reward(float(turn), {"seen": [image(task_number), own]})
    trajectory.error = error
    trajectory.finish()
    return trajectory


def group(number: int, episodes: list[Trajectory], attempts: tuple[int, ...]) -> Group:
    rewards = np.array([each.reward + number for each in episodes])
    return Group(
        task=task(number),
        episodes=tuple(episodes),
        attempts=attempts,
        rewards=rewards,
        reward_parts={"episode": rewards - number},
        sample_weights=np.linspace(0.5, 1.0, len(episodes)),
        oldest_version=str(number),
        seconds=number / 4,
    )


def open_recorder(directory: Path) -> Recorder:
    return Recorder(directory, fsync=False)


@dataclass
class Expected:
    """What a journal should know, kept in the simplest way: encoded values by task number."""

    started: list[int] = field(default_factory=list)
    attempts: dict[int, dict[int, tuple[int, bool, bytes]]] = field(default_factory=dict)
    finished: dict[int, bytes] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)

    def apply(self, event: tuple[Any, ...]) -> None:
        match event:
            case ("start", number):
                self.started.append(number)
                self.attempts[number] = {}
            case ("attempt", number, index, attempt, final, encoded):
                self.attempts[number][index] = (attempt, final, encoded)
            case ("finish", number, encoded):
                self.finished[number] = encoded
            case ("close", number):
                self.closed.add(number)

    @property
    def undelivered(self) -> list[int]:
        return [number for number in self.finished if number not in self.closed]

    @property
    def unfinished(self) -> list[int]:
        return [number for number in self.started if number not in self.finished and number not in self.closed]


def encoded_attempts(recorder: Recorder, number: int) -> dict[int, tuple[int, bool, bytes]]:
    _, found = recorder.read_task(f"task-{number}")
    return {index: (each.attempt, each.final, encode(each.episode)) for index, each in found.items()}


def compare(recorder: Recorder, expected: Expected, damaged: Collection[int] = ()) -> None:
    """Resume the recorder and compare all that it knows with what is expected, but for tasks that are damaged."""
    resumed = recorder.resume(dict(CONFIGURATION))
    names = {f"task-{number}" for number in damaged}
    undelivered = [number for number in expected.undelivered if number not in damaged]
    unfinished = [number for number in expected.unfinished if number not in damaged]
    assert [name for name in resumed.undelivered if name not in names] == [f"task-{number}" for number in undelivered]
    assert [name for name in resumed.unfinished if name not in names] == [f"task-{number}" for number in unfinished]
    for number in undelivered:
        assert encode(recorder.read_group(f"task-{number}")) == expected.finished[number]
    for number in unfinished:
        assert encode(recorder.read_task(f"task-{number}")[0]) == encode(task(number))
        assert encoded_attempts(recorder, number) == expected.attempts[number]
    known = {number for number in range(20) if f"task-{number}" in recorder}
    assert known - {*damaged} == {*expected.started} - {*damaged}


def play(recorder: Recorder, calls: list[tuple[int, int, int]], expected: Expected) -> Iterator[tuple[Any, ...]]:
    """Make those of the drawn calls that a runner could make; yields what each has recorded, when it has returned.

    A call is (kind, task number, index). An episode's first attempt fails where its index is 1.
    """
    episodes: dict[tuple[int, int], Trajectory] = {}
    for kind, number, index in calls:
        attempts = expected.attempts.get(number, {})
        is_open = number in expected.started and number not in expected.finished and number not in expected.closed
        if kind == 0 and number not in expected.started:
            recorder.start(task(number))
            yield ("start", number)
        elif kind in (1, 2) and is_open and not (index in attempts and attempts[index][1]):
            attempt = attempts[index][0] + 1 if index in attempts else 0
            final = index == 0 or attempt == 1
            made = episodes[number, index] = episode(number, index, attempt, error="" if final else "failed")
            recorder.attempt(f"task-{number}", index, attempt, made, final)
            yield ("attempt", number, index, attempt, final, encode(made))
        elif kind == 3 and is_open and all(attempts.get(i, (0, False))[1] for i in (0, 1)):
            _, recorded = recorder.read_task(f"task-{number}")
            whole = group(number, [recorded[0].episode, recorded[1].episode], (1, 2))
            recorder.finish(whole)
            yield ("finish", number, encode(whole))
        elif kind == 4 and number in expected.finished and number not in expected.closed:
            recorder.close_task(f"task-{number}", "")
            yield ("close", number)
