"""What an episode reports while it runs, as values that cross processes.

`job` is the number that names the job between a worker and the process that gave it the job. The id of the episode does
not: an episode that was cancelled may begin again at the same worker, as another job.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias, get_args

from rollouts.episodes.activity import EpisodeObserver, Part, TurnSeconds
from rollouts.errors import ArgumentError
from rollouts.numbers import finite_number, whole_number
from transport import wire_type


@wire_type("rollouts.JobWaiting")
@dataclass(frozen=True, slots=True)
class JobWaiting:
    """An episode began to wait for `part`. Raises `ArgumentError` for values of other types, also when decoded."""

    job: int
    turn: int
    part: Part

    def __post_init__(self) -> None:
        _check_numbers(self.job, self.turn)
        if self.part not in get_args(Part):
            raise ArgumentError("part", self.part, f"pass one of {', '.join(get_args(Part))}")

    def report(self, observer: EpisodeObserver) -> None:
        """Call the observer's method for it."""
        observer.waiting(self.turn, self.part)


@wire_type("rollouts.JobTurn")
@dataclass(frozen=True, slots=True)
class JobTurn:
    """A turn ended; the fields are the arguments of `EpisodeObserver.turn_finished`.

    Raises `ArgumentError` for values of other types, also when decoded.
    """

    job: int
    turn: int
    prompt_tokens: int
    completion_tokens: int
    images: int
    engine_seconds: float
    renderer_seconds: float
    environment_seconds: float
    failed: bool = False

    def __post_init__(self) -> None:
        _check_numbers(self.job, self.turn)
        for name in ("prompt_tokens", "completion_tokens", "images"):
            if whole_number(getattr(self, name)) is None:
                raise ArgumentError(name, getattr(self, name), "pass an integer")
        for name in ("engine_seconds", "renderer_seconds", "environment_seconds"):
            if finite_number(getattr(self, name)) is None:
                raise ArgumentError(name, getattr(self, name), "pass a number of seconds")
        if type(self.failed) is not bool:
            raise ArgumentError("failed", self.failed, "pass True or False")

    def report(self, observer: EpisodeObserver) -> None:
        """Call the observer's method for it."""
        seconds = TurnSeconds(self.engine_seconds, self.renderer_seconds, self.environment_seconds)
        observer.turn_finished(self.turn, self.prompt_tokens, self.completion_tokens, self.images, seconds, self.failed)


#: What a worker reports of an episode while it runs.
Progress: TypeAlias = JobWaiting | JobTurn


class ProgressObserver:
    """An `EpisodeObserver` in a worker: passes what the episode reports to `send`, as `Progress`."""

    def __init__(self, job: int, send: Callable[[Progress], object]) -> None:
        self._job = job
        self._send = send

    def waiting(self, turn: int, part: Part) -> None:
        self._send(JobWaiting(self._job, turn, part))

    def requesting(self) -> AbstractContextManager[object]:
        return nullcontext()  # the runner counts the tokens of a job from its beginning

    def turn_finished(
        self, turn: int, prompt_tokens: int, completion_tokens: int, images: int, seconds: TurnSeconds, failed: bool
    ) -> None:
        self._send(
            JobTurn(
                self._job,
                turn,
                prompt_tokens,
                completion_tokens,
                images,
                seconds.engine,
                seconds.renderer,
                seconds.environment,
                failed,
            )
        )


def _check_numbers(job: object, turn: object) -> None:
    for name, value in (("job", job), ("turn", turn)):
        if whole_number(value) is None:
            raise ArgumentError(name, value, "pass an integer")
