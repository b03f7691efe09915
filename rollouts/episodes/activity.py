"""What an episode waits for, and what it reports of its turns."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

#: What an episode waits for.
Part = Literal["environment.make", "environment.reset", "environment.step", "renderer", "engine"]


@dataclass(frozen=True, slots=True)
class TurnFinished:
    """A turn is part of the trajectory, with its reward unless its step in the environment `failed`.

    A step also failed if it was cancelled, by a deadline for example. `prompt_tokens` is the length of the whole
    prompt, `images` the number of images and videos in it, `sounds` that of sounds. The seconds include the time for
    which the call waited for a thread or for the event loop; the renderer's include the prompt of the turn.
    """

    episode_id: str
    turn: int
    prompt_tokens: int
    completion_tokens: int
    images: int
    engine_seconds: float
    renderer_seconds: float
    environment_seconds: float
    failed: bool = False
    sounds: int = 0


class EpisodeObserver:
    """Is called by an episode on its event loop; an exception fails the episode. This one does nothing."""

    def waiting(self, turn: int, part: Part) -> None:
        """The episode begins to wait for `part`."""

    def requesting(self) -> AbstractContextManager[object]:
        """For the block of a request until its completion is recorded; several may run at once."""
        return nullcontext()

    def turn_finished(self, turn: TurnFinished) -> None:
        """A turn is part of the trajectory."""


class EpisodeActivity:
    """What an episode waits for: the `part` that it began to wait for last, in `turn`."""

    def __init__(self, observer: EpisodeObserver | None = None) -> None:
        self.turn = 0
        self.part: Part = "environment.make"
        self.observer = observer or EpisodeObserver()

    def waits_for(self, part: Part, turn: int) -> None:
        self.part, self.turn = part, turn
        self.observer.waiting(turn, part)
