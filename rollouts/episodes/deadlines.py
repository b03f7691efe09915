"""When an episode ends truncated: its limits, what it waits for, its deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from renderers import MediaSource
from renderers.errors import OverlongPromptError as OverlongRenderError
from rollouts.engines.protocol import GenerateRequest, InFlight
from rollouts.episodes.errors import EpisodeLimitError
from rollouts.errors import ArgumentError, OverlongPromptError
from rollouts.values import check_integer, finite_number
from transport import wire_type

# Limits of an episode. An episode that reaches one ends `truncated`, with the reason, and is no failure.


@wire_type("rollouts.EpisodeLimits")
@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """When an episode ends `truncated`. None, the default of each: no limit.

    Without `max_turns` and `episode_seconds`, an episode whose environment is never done does not end; a `Runner` logs
    a warning when one has had 1,000 turns.

    - `max_turns`: completions of the model.
    - `max_tokens`: tokens of a prompt and its completion together. A completion has at most the tokens that are left; a
      prompt that leaves none ends the episode.
    - `max_images`: images, videos and sounds of a prompt.
    - `max_media_bytes`: encoded bytes of the images, videos and sounds of a prompt; equal ones count once.
    - `turn_seconds`: from the end of a turn (for the first one, the start of the episode) to the end of the next.
    - `episode_seconds`: one attempt at the episode.

    The time that a request of the episode waits for an update of the weights counts for neither of them.

    A deadline cancels what the episode waits for. It cannot interrupt a synchronous method of an environment: such a
    call ends first. Raises `ArgumentError` for counts that are not integers from 1 (images and bytes: from 0), and for
    seconds that are not above 0.
    """

    max_turns: int | None = None
    max_tokens: int | None = None
    max_images: int | None = None
    max_media_bytes: int | None = None
    turn_seconds: float | None = None
    episode_seconds: float | None = None

    def __post_init__(self) -> None:
        for name, lowest in (("max_turns", 1), ("max_tokens", 1), ("max_images", 0), ("max_media_bytes", 0)):
            if (value := getattr(self, name)) is not None:
                rule = f"pass an integer of at least {lowest}, or None for no limit"
                object.__setattr__(self, name, check_integer(name, value, least=lowest, rule=rule))
        for name in ("turn_seconds", "episode_seconds"):
            if (value := getattr(self, name)) is not None:
                seconds = None if isinstance(value, bool) else finite_number(value)
                if seconds is None or seconds <= 0:
                    raise ArgumentError(name, value, "pass a number of seconds above 0, or None for no limit")
                object.__setattr__(self, name, seconds)

    def check_prompt(self, request: GenerateRequest, turn: int) -> None:
        """Raises `EpisodeLimitError` if the prompt of `request` is over a limit."""
        tokens = len(request.prompt_ids)
        if self.max_tokens is not None and tokens >= self.max_tokens:
            raise _reached("max_tokens", turn, f"{tokens} tokens", self.max_tokens)
        if self.max_images is None and self.max_media_bytes is None:
            return
        self.check_media([item.source for item, _ in request.media], turn)

    def check_media(self, sources: Sequence[MediaSource], turn: int) -> None:
        """Raises `EpisodeLimitError` if a prompt has more media than a limit allows."""
        if self.max_images is not None and len(sources) > self.max_images:
            raise _reached("max_images", turn, f"{len(sources)} images, videos and sounds", self.max_images)
        if self.max_media_bytes is not None:
            total = sum({source.digest: source.nbytes for source in sources}.values())
            if total > self.max_media_bytes:
                raise _reached(
                    "max_media_bytes", turn, f"{total} bytes of images, videos and sounds", self.max_media_bytes
                )


#: Raised for a prompt that leaves no room for a completion, by an engine and by a renderer of a server.
OVERLONG_ERRORS = (OverlongPromptError, OverlongRenderError)


def max_turns_limit(turns: int) -> EpisodeLimitError:
    """The limit of an environment that has had all its turns."""
    return EpisodeLimitError("max_turns", f"the environment was not done after {turns} turns")


def overlong_limit(error: Exception) -> EpisodeLimitError:
    """The limit that one of `OVERLONG_ERRORS` stands for: the length of the model's context."""
    return EpisodeLimitError("overlong prompt", str(error))


def _reached(name: str, turn: int, amount: str, limit: int) -> EpisodeLimitError:
    return EpisodeLimitError(name, f"the prompt of turn {turn} has {amount}, the limit is {limit}")


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
        ...

    def requesting(self) -> AbstractContextManager[object]:
        """For the block from a request to the engine until its completion is in the trajectory.

        Several may run at once: those of sub-agents.
        """
        ...

    def turn_finished(self, turn: int, counts: TurnCounts, seconds: TurnSeconds, failed: bool) -> None:
        """A turn is part of the trajectory, with its reward unless its step in the environment `failed`."""
        ...


class EpisodeActivity:
    """What an episode waits for: the `part` that it began to wait for last, in `turn`."""

    __slots__ = ("_observer", "part", "turn")

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


class UpdatePauses:
    """Says when the weights of an engine are updated: the time that a request waits for an update does not count.

    Runners with one engine share it.
    """

    def __init__(self) -> None:
        self.requesting: set[EpisodeDeadlines] = set()
        self._updating: set[object] = set()  # who updates

    @classmethod
    def of(cls, engine: object) -> UpdatePauses:
        """Those of an engine: the same for one object. An engine that cannot be referred to weakly gets new ones."""
        try:
            return _pauses_of_engines.setdefault(engine, cls())
        except TypeError:  # it has `__slots__`, or compares by value and has no hash
            return cls()

    @property
    def is_updating(self) -> bool:
        return bool(self._updating)

    def begin(self, updater: object, in_flight: InFlight) -> None:
        """An update by `updater` begins. With "wait" requests that run are not stopped, and their time counts."""
        self._updating.add(updater)
        if in_flight != "wait":
            for deadlines in list(self.requesting):
                deadlines.hold()

    def end(self, updater: object) -> None:
        """The update by `updater` has ended. Has no effect where none was begun."""
        self._updating.discard(updater)
        if not self._updating:
            for deadlines in list(self.requesting):
                deadlines.release()


#: The event loop may call a timer earlier than due, by the resolution of its clock.
_TIMER_MARGIN = 1.0

#: An engine is passed to each of its runners by itself, and has no place for what they share.
_pauses_of_engines: WeakKeyDictionary[object, UpdatePauses] = WeakKeyDictionary()


class EpisodeDeadlines:
    """Cancels the block of `async with deadlines.scope` at the earlier deadline of turn and episode.

    The block then raises `TimeoutError`, and `passed` is not None. Made where the episode begins, on its event loop.
    """

    def __init__(self, limits: EpisodeLimits, pauses: UpdatePauses) -> None:
        self._limits = limits
        self._pauses = pauses
        self._requests = 0  # those that run
        self._held_since: float | None = None
        self._loop = asyncio.get_running_loop()
        self._episode_end = _later(self._loop.time(), limits.episode_seconds)
        self._turn_end: float | None = None
        self.scope = asyncio.timeout(None)

    def begin_turn(self) -> None:
        """Begin the time of a turn, inside the scope."""
        if self._limits.turn_seconds is None and (self._episode_end is None or self.scope.when() is not None):
            return  # there is no deadline, or that of the episode is set
        if self._held_since is not None:  # while another agent's request waits for an update
            self._turn_end = _later(self._held_since, self._limits.turn_seconds)
            return
        self._turn_end = _later(self._loop.time(), self._limits.turn_seconds)
        self._schedule()

    @contextmanager
    def requesting(self) -> Iterator[None]:
        """The block of a request to the engine, during which the time of weight updates does not count.

        Several requests may run at once.
        """
        self._requests += 1
        self._pauses.requesting.add(self)
        if self._requests == 1 and self._pauses.is_updating:
            self.hold()
        try:
            yield
        finally:
            self._requests -= 1
            if self._requests == 0:
                self._pauses.requesting.discard(self)
                self.release()

    def hold(self) -> None:
        """Let the time stand still until `release`."""
        if self._held_since is None:
            self._held_since = self._loop.time()
            with suppress(RuntimeError):  # the scope has ended
                self.scope.reschedule(None)

    def release(self) -> None:
        """Let the time go on. Has no effect unless it stands still."""
        if self._held_since is None:
            return
        held = self._loop.time() - self._held_since
        self._held_since = None
        self._turn_end, self._episode_end = (
            None if end is None else end + held for end in (self._turn_end, self._episode_end)
        )
        self._schedule()

    def _schedule(self) -> None:
        ends = [end for end in (self._turn_end, self._episode_end) if end is not None]
        if ends:
            with suppress(RuntimeError):  # the scope has ended
                self.scope.reschedule(min(ends))

    def passed(self, activity: EpisodeActivity) -> EpisodeLimitError | None:
        """The deadline that ended the scope; None if none did."""
        when = self.scope.when()
        if when is None or self._loop.time() + _TIMER_MARGIN < when or not self.scope.expired():
            return None
        name, seconds = "episode_seconds", self._limits.episode_seconds
        if self._episode_end is None or (self._turn_end is not None and self._turn_end < self._episode_end):
            name, seconds = "turn_seconds", self._limits.turn_seconds
        return EpisodeLimitError(
            name, f"{seconds:g} s passed in turn {activity.turn}, which waited for {activity.part}"
        )


def _later(now: float, seconds: float | None) -> float | None:
    return None if seconds is None else now + seconds
