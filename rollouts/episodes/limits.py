"""Limits of an episode. An episode that reaches one ends `truncated`, with the reason, and is no failure."""

from collections.abc import Sequence
from dataclasses import dataclass

from renderers import MediaSource
from renderers.errors import OverlongPromptError
from rollouts.engines.protocol import GenerateRequest
from rollouts.episodes.errors import EpisodeLimitError
from rollouts.errors import ContextLengthError
from rollouts.values import Bounded, number_field, whole_field
from transport import wire_type


@wire_type("rollouts.EpisodeLimits")
@dataclass(frozen=True, slots=True)
class EpisodeLimits(Bounded):
    """When an episode ends `truncated`. None, the default of each: no limit.

    `TurnRecorder` counts the turns, `EpisodeDeadlines` has the seconds. Without `max_turns` and
    `episode_seconds`, an episode whose environment is never done does not end; a `Runner` logs a warning when
    one has had 1,000 turns.

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

    max_turns: int | None = whole_field(None)
    max_tokens: int | None = whole_field(None)
    max_images: int | None = whole_field(None, least=0)
    max_media_bytes: int | None = whole_field(None, least=0)
    turn_seconds: float | None = number_field(None, above=0)
    episode_seconds: float | None = number_field(None, above=0)

    def check_prompt(self, request: GenerateRequest, turn: int) -> None:
        """Raises `EpisodeLimitError` if the prompt of `request` is over a limit."""
        tokens = len(request.prompt_ids)
        if self.max_tokens is not None and tokens >= self.max_tokens:
            raise _reached("max_tokens", turn, f"{tokens} tokens", self.max_tokens)
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
OVERLONG_ERRORS = (ContextLengthError, OverlongPromptError)


def max_turns_limit(turns: int) -> EpisodeLimitError:
    """The limit of an environment that has had all its turns."""
    return EpisodeLimitError("max_turns", f"the environment was not done after {turns} turns")


def overlong_limit(error: Exception) -> EpisodeLimitError:
    """The limit that one of `OVERLONG_ERRORS` stands for: the length of the model's context."""
    return EpisodeLimitError("overlong prompt", str(error))


def _reached(name: str, turn: int, amount: str, limit: int) -> EpisodeLimitError:
    return EpisodeLimitError(name, f"the prompt of turn {turn} has {amount}, the limit is {limit}")
