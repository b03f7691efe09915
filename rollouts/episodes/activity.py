"""What an episode waits for, and how long each part of a turn took."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Final, Literal, Protocol

#: What an episode waits for, in the names of `rollouts.runner.events`.
Part = Literal["environment.make", "environment.reset", "environment.step", "renderer", "engine"]


class EpisodeObserver(Protocol):
    """Is called by an episode on its event loop; an exception fails the episode."""

    def waiting(self, turn: int, part: Part) -> None:
        """The episode begins to wait for `part`."""
        ...

    def turn_finished(
        self,
        turn: int,
        *,
        prompt_tokens: int,
        completion_tokens: int,
        images: int,
        engine_seconds: float,
        renderer_seconds: float,
        environment_seconds: float,
    ) -> None:
        """A turn is part of the trajectory, with its reward. `images` counts the images and videos of its prompt."""
        ...


class EpisodeActivity:
    """Measures the calls of an episode: `with activity.during("engine"): ...`.

    `turn` is the index of the current turn, `waiting_for` the last part that was begun. Seconds are those since the end
    of the previous turn.
    """

    __slots__ = ("_observer", "_started", "seconds", "turn", "waiting_for")

    def __init__(self, observer: EpisodeObserver | None = None) -> None:
        self.turn = 0
        self.waiting_for: Part = "environment.make"
        self.seconds: dict[str, float] = dict.fromkeys(_COMPONENTS, 0.0)
        self._observer = observer
        self._started = 0.0

    def during(self, part: Part) -> EpisodeActivity:
        """A context manager for a call of `part`."""
        self.waiting_for = part
        if self._observer is not None:
            self._observer.waiting(self.turn, part)
        return self

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds[self.waiting_for.partition(".")[0]] += time.perf_counter() - self._started

    def finish_turn(self, *, prompt_tokens: int, completion_tokens: int, images: int) -> None:
        """Report the current turn; the next one begins."""
        if self._observer is not None:
            self._observer.turn_finished(
                self.turn,
                prompt_tokens=prompt_tokens,
                completion_tokens=completion_tokens,
                images=images,
                engine_seconds=self.seconds["engine"],
                renderer_seconds=self.seconds["renderer"],
                environment_seconds=self.seconds["environment"],
            )
        self.seconds = dict.fromkeys(_COMPONENTS, 0.0)
        self.turn += 1


_COMPONENTS: Final = ("engine", "renderer", "environment")
