"""What an episode waits for, and what it reports of its turns."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple, Protocol

#: What an episode waits for, in the names of `rollouts.runner.events`.
Part = Literal["environment.make", "environment.reset", "environment.step", "renderer", "engine"]


class TurnSeconds(NamedTuple):
    """How long the parts of a turn took. The renderer's includes the prompt of the turn."""

    engine: float
    renderer: float
    environment: float


class TurnCounts(NamedTuple):
    """The tokens of the prompt and the completion of a turn, and the media of its prompt. Videos count as images."""

    prompt_tokens: int
    completion_tokens: int
    images: int
    sounds: int


class EpisodeObserver(Protocol):
    """Is called by an episode on its event loop; an exception fails the episode."""

    def waiting(self, turn: int, part: Part) -> None:
        """The episode begins to wait for `part`."""

    def requesting(self) -> AbstractContextManager[object]:
        """For the block of a request until its completion is recorded; several may run at once."""

    def turn_finished(self, turn: int, counts: TurnCounts, seconds: TurnSeconds, failed: bool) -> None:
        """A turn is part of the trajectory, with its reward unless its step in the environment `failed`."""


class EpisodeActivity:
    """What an episode waits for: the `part` that it began to wait for last, in `turn`."""

    def __init__(self, observer: EpisodeObserver | None = None) -> None:
        self.turn = 0
        self.part: Part = "environment.make"
        self._observer = observer

    def waits_for(self, part: Part, turn: int) -> None:
        self.part, self.turn = part, turn
        if self._observer is not None:
            self._observer.waiting(turn, part)

    def requesting(self) -> AbstractContextManager[object]:
        return nullcontext() if self._observer is None else self._observer.requesting()

    def turn_finished(self, turn: int, counts: TurnCounts, seconds: TurnSeconds, failed: bool) -> None:
        if self._observer is not None:
            self._observer.turn_finished(turn, counts, seconds, failed)
