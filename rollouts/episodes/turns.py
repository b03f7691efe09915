"""Turns of an episode: a prompt, the completion of the engine, and their place in the trajectory."""

import asyncio
import hashlib
import string
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast
from urllib.parse import quote

from renderers import Message, ParsedResponse, RenderedTokens, RendererPool
from renderers.errors import MediaError, MessageError
from rollouts.engines.protocol import ChatEngine, Completion, Engine, GenerateRequest, SamplingParams
from rollouts.episodes.activity import EpisodeActivity, TurnFinished
from rollouts.episodes.calls import RendererCalls
from rollouts.episodes.deadlines import EpisodeDeadlines, UpdatePauses
from rollouts.episodes.engine_calls import check_uninterrupted, generated, known_vocab_size, naming_engine
from rollouts.episodes.errors import EnvironmentProtocolError, EpisodeLimitError, raise_naming_origin
from rollouts.episodes.limits import EpisodeLimits, max_turns_limit
from rollouts.episodes.own_messages import keep_media, own_messages, own_tools
from rollouts.errors import ArgumentError, TrajectoryFinishedError
from rollouts.trajectory.media_reference import media_counts
from rollouts.trajectory.tree import Trajectory


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """What the episodes of a run have in common. A `ChatEngine` has no renderer."""

    engine: Engine | ChatEngine
    renderer: RendererPool | None
    sampling: SamplingParams
    limits: EpisodeLimits
    pauses: UpdatePauses = field(default_factory=UpdatePauses)


def check_sampling(sampling: object) -> None:
    """Raises `ArgumentError`."""
    if not isinstance(sampling, SamplingParams):
        raise ArgumentError("sampling", sampling, "pass a SamplingParams")
    if sampling.n != 1:
        raise ArgumentError(
            "sampling.n", sampling.n, "an episode continues from one completion; pass n=1 and run it n times"
        )


class Prompt(NamedTuple):
    """A prompt of an agent. `messages` are those that the message indices of `rendered` refer to, `conversation` all.

    `sampled` are the half-open ranges of the prompt that earlier completions sampled, `seconds` is how long the
    renderer took. `previous_turn` is the index of the turn that it continues, None for the first of a conversation.
    `refusal` is why the renderer did not bridge from that turn, if it says so.
    """

    rendered: RenderedTokens
    messages: Sequence[Message]
    conversation: Sequence[Message]
    tools: Any
    sampled: Sequence[tuple[int, int]]
    seconds: float
    previous_turn: int | None = None
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A completion in the trajectory: its prompt, its token ids, the parsed message, and the index of the turn.

    The seconds are those of the call of the engine, and of the renderer for prompt and completion.
    `counts` has the `prompt_tokens` and `completion_tokens`, and the `images` and `sounds` of the prompt.
    """

    prompt: Prompt
    completion_ids: Sequence[int]
    message: Message
    parsed: ParsedResponse
    index: int
    engine_seconds: float
    renderer_seconds: float
    counts: Mapping[str, int] = field(default_factory=dict)


class EpisodeRecorder(ABC):
    """Samples turns of one episode, for all of its agents, into its trajectory. The limits hold for all together.

    Made on the event loop of the episode, where the episode begins.
    """

    engine: Engine | ChatEngine
    renderer: RendererPool | None

    def __init__(self, trajectory: Trajectory, settings: EpisodeSettings, activity: EpisodeActivity) -> None:
        self.trajectory = trajectory
        self.sampling = settings.sampling
        self.limits = settings.limits
        self.activity = activity
        self.deadlines = EpisodeDeadlines(settings.limits, settings.pauses)
        self._in_flight = 0
        self.is_closed = False  # once it is, `check_open` raises
        self.tasks: set[asyncio.Task[Any]] = set()  # those that wait for a turn or a child of an environment

    @abstractmethod
    async def first_prompt(self, messages: Sequence[Message], tools: Any, origin: str) -> Prompt:
        """The prompt of a conversation. `origin` says in errors where the messages come from."""

    @abstractmethod
    async def next_prompt(self, turn: SampledTurn, messages: Sequence[Message], origin: str) -> Prompt:
        """The prompt after a turn and new messages."""

    async def sample(
        self, prompt: Prompt, *, agent: str, path: tuple[int, ...], sampling: SamplingParams | None = None
    ) -> SampledTurn:
        """Sample a turn of `agent` and add it to the trajectory. Raises `EpisodeLimitError` where a limit is reached.

        `path` distinguishes the turns of an episode, whatever order they are sampled in: the request's id and its seed
        derive from it.
        """
        self.check_open()
        if (limit := self.limit_reached()) is not None:
            raise limit
        sampling = sampling or self.sampling
        seed = None if sampling.seed is None else derived_seed(sampling.seed, *path)
        request_id = _header_name("-".join(map(str, (self.trajectory.episode_id, *path))))
        number = len(self.trajectory.turns) + self._in_flight
        return await self._sample(prompt, agent, sampling, seed, request_id, number)

    @abstractmethod
    async def _sample(
        self, prompt: Prompt, agent: str, sampling: SamplingParams, seed: int | None, request_id: str, number: int
    ) -> SampledTurn:
        """Sample the turn `number`, with `seed` for that of `sampling`, inside of `_requesting`."""

    @contextmanager
    def _requesting(self, number: int) -> Iterator[None]:
        self._in_flight += 1
        try:
            self.activity.waits_for("engine", number)
            with self.activity.observer.requesting():
                yield
        finally:
            self._in_flight -= 1

    def check_open(self) -> None:
        """Raises `TrajectoryFinishedError` if the episode has ended."""
        if self.is_closed:
            raise TrajectoryFinishedError(self.trajectory.episode_id, "turns")

    def finish_turn(self, turn: SampledTurn, environment_seconds: float, *, failed: bool = False) -> None:
        """Report a turn, whose reward is recorded unless its step `failed`, of an episode that goes on."""
        if self.trajectory.finished:
            return
        finished = TurnFinished(
            self.trajectory.episode_id,
            turn.index,
            engine_seconds=turn.engine_seconds,
            renderer_seconds=turn.renderer_seconds,
            environment_seconds=environment_seconds,
            failed=failed,
            **turn.counts,
        )
        self.activity.observer.turn_finished(finished)

    def limit_reached(self) -> EpisodeLimitError | None:
        """The limit that allows no further turn, those that are being sampled included."""
        max_turns = self.limits.max_turns
        if max_turns is not None and len(self.trajectory.turns) + self._in_flight >= max_turns:
            return max_turns_limit(max_turns)
        return self.deadlines.passed(self.activity)

    async def close(self) -> None:
        """Refuse further turns, and cancel the tasks that still wait for one."""
        self.is_closed = True
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel("the episode has ended")
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)


class TurnRecorder(EpisodeRecorder):
    """Samples turns as tokens, from an engine and a renderer."""

    engine: Engine
    renderer: RendererPool

    def __init__(self, trajectory: Trajectory, settings: EpisodeSettings, activity: EpisodeActivity) -> None:
        super().__init__(trajectory, settings, activity)
        self.engine = cast(Engine, settings.engine)
        self.renderer = cast(RendererPool, settings.renderer)
        self._calls = RendererCalls(self.renderer)
        self.vocab_size = known_vocab_size(self.engine, self.renderer)
        self.stop_token_ids = self.sampling.stop_token_ids or self._calls.stop_token_ids()

    async def first_prompt(self, messages: Sequence[Message], tools: Any, origin: str) -> Prompt:
        if self._calls.longest is None:
            self._calls.longest = await self._context_length()
        began = time.perf_counter()
        messages, tools = own_messages(messages), own_tools(tools)
        with self.engine.expecting_request():
            self.activity.waits_for("renderer", self.trajectory.num_turns)
            try:
                rendered = await self._calls.render(messages, tools)
            except (MediaError, MessageError) as error:
                raise_naming_origin(error, origin, messages)
        keep_media(messages, rendered)
        return Prompt(rendered, messages, messages, tools, _sampled_ranges(rendered), time.perf_counter() - began)

    async def next_prompt(self, turn: SampledTurn, messages: Sequence[Message], origin: str) -> Prompt:
        """The prompt after a turn and new messages: bridged, or rendered again where the bridge refuses."""
        began = time.perf_counter()
        previous, messages = turn.prompt, own_messages(messages)
        self.activity.waits_for("renderer", self.trajectory.num_turns)
        with self.engine.expecting_request():
            try:
                bridged, refusal = await self._calls.bridge(
                    previous.rendered, turn.completion_ids, messages, previous.tools, previous.conversation
                )
            except (MediaError, MessageError) as error:
                raise_naming_origin(error, f"what {origin} returned for turn {turn.index}", messages)
            # The message of the trajectory: the environment may have changed the one that its step received.
            conversation = [*previous.conversation, self.trajectory.turns[turn.index].message, *messages]
            if bridged is not None:
                keep_media(messages, bridged)
                start = len(previous.rendered.token_ids)
                sampled = [*previous.sampled, (start, start + len(turn.completion_ids))]
                seconds = time.perf_counter() - began
                return Prompt(bridged, messages, conversation, previous.tools, sampled, seconds, turn.index)
            try:
                rendered = await self._calls.render(conversation, previous.tools)
            except (MediaError, MessageError) as error:
                raise_naming_origin(error, f"the conversation after {origin} of turn {turn.index}", conversation)
            keep_media(messages, rendered)
            seconds, sampled = time.perf_counter() - began, _sampled_ranges(rendered)
            return Prompt(rendered, conversation, conversation, previous.tools, sampled, seconds, turn.index, refusal)

    async def _context_length(self) -> int | None:
        """The most tokens of a prompt, for which a server is asked; None if the engine never knows."""
        if self.engine.max_model_len is None:
            self.activity.waits_for("engine", self.trajectory.num_turns)
            with self.deadlines.requesting(), naming_engine(self.engine, "context_length"):
                return await self.engine.context_length()
        return self.engine.max_model_len

    async def _sample(
        self, prompt: Prompt, agent: str, sampling: SamplingParams, seed: int | None, request_id: str, number: int
    ) -> SampledTurn:
        request = self.request(prompt, sampling, seed, request_id)
        self.limits.check_prompt(request, number)
        with self._requesting(number):
            sent_at = time.perf_counter()
            with self.deadlines.requesting():
                (completion,) = await generated(self.engine, request, self.vocab_size)
            check_uninterrupted(request_id, [completion])
            self.activity.waits_for("renderer", number)
            return await self.record(prompt, completion, agent=agent, engine_seconds=time.perf_counter() - sent_at)

    async def record(self, prompt: Prompt, completion: Completion, *, agent: str, engine_seconds: float) -> SampledTurn:
        """Parse a completion of a prompt and add it to the trajectory."""
        received_at = time.perf_counter()
        ids = completion.token_ids.tolist()
        with self.engine.expecting_request():
            message, parsed = await self._calls.parse(ids, prompt.tools, prompt.rendered)
        renderer_seconds = prompt.seconds + time.perf_counter() - received_at
        previous, trajectory = prompt.previous_turn, self.trajectory
        trajectory.add_turn(
            prompt.rendered,
            completion,
            message,
            messages=prompt.messages,
            seconds=engine_seconds,
            agent=agent,
            after=None if previous is None else trajectory.turns[previous].node,
        )
        media = {} if prompt.rendered.multi_modal_data is None else prompt.rendered.multi_modal_data.mm_hashes
        counts = media_counts(modality for modality, hashes in media.items() for _ in hashes)
        counts |= {"prompt_tokens": len(prompt.rendered), "completion_tokens": len(ids)}
        index = len(trajectory.turns) - 1
        return SampledTurn(prompt, ids, message, parsed, index, engine_seconds, renderer_seconds, counts)

    def request(self, prompt: Prompt, sampling: SamplingParams, seed: int | None, request_id: str) -> GenerateRequest:
        """The request for a prompt, with `seed` for that of `sampling`, whose stop tokens default to the renderer's."""
        rendered, max_tokens = prompt.rendered, sampling.max_tokens
        if self.limits.max_tokens is not None:
            max_tokens = max(1, min(max_tokens, self.limits.max_tokens - len(rendered)))
        stop_token_ids = sampling.stop_token_ids or self.stop_token_ids
        sampling = replace(sampling, max_tokens=max_tokens, seed=seed, stop_token_ids=stop_token_ids)
        return GenerateRequest(
            prompt_ids=rendered.token_ids,
            sampling=sampling,
            multi_modal_data=rendered.multi_modal_data,
            session_id=_header_name(self.trajectory.episode_id),
            request_id=request_id,
            placeholder_token_ids=rendered.placeholder_token_ids,
            sampled=prompt.sampled,
        )


def _header_name(name: str) -> str:
    """At most 200 printable ASCII characters without spaces, others for each name: servers get ids in HTTP headers."""
    quoted = quote(name, safe=string.punctuation.replace("%", ""))
    digest = hashlib.sha256(quoted.encode()).hexdigest()
    return quoted if len(quoted) <= 200 else f"{quoted[:135]}~{digest}"


def _sampled_ranges(prompt: RenderedTokens) -> list[tuple[int, int]]:
    """The token ranges of a rendered prompt that the model would have sampled: its assistant turns."""
    return [(span.start, span.end) for span in prompt.spans if span.sampled]


def derived_seed(seed: int, *path: str | int) -> int:
    """A seed below 2**63 for `path`, unrelated to the seeds of other paths and of neighbouring values of `seed`."""
    name = "/".join(map(str, (seed, *path)))
    # A hash, because sums of seeds would give neighbouring seeds the same streams.
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def check_only_new(messages: Sequence[Message], turn: SampledTurn, origin: str) -> None:
    """Raises `EnvironmentProtocolError` if messages for the prompt after `turn` begin with what that prompt has.

    That is the answer of the turn, or all messages of its conversation and then the answer: the model would read them,
    and their images, twice.
    """
    if not any(message.get("role") == "assistant" for message in messages):
        return  # the usual case
    conversation = turn.prompt.conversation
    for expected in ([turn.message], [*conversation, turn.message]):
        if len(messages) >= len(expected) and all(map(_look_equal, messages, expected)):
            raise EnvironmentProtocolError(
                f"{origin} returned for turn {turn.index} messages of which the first {len(expected)} are in the "
                "conversation already, the answer of the model included; return only the messages that come after it"
            )


def _look_equal(one: Message, other: Message) -> bool:
    """Whether role, texts and number of tool calls are equal: what can be compared without loading media."""
    return (
        one.get("role") == other.get("role")
        and _texts(one) == _texts(other)
        and len(one.get("tool_calls") or ()) == len(other.get("tool_calls") or ())
    )


def _texts(message: Message) -> list[Any]:
    content: Any = message.get("content")
    if isinstance(content, (list, tuple)):
        return [part.get("text") if isinstance(part, dict) else part for part in content]
    return [content or ""]
