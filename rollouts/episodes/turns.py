"""Turns of an episode: a prompt, the completion of the engine, and their place in the trajectory."""

from __future__ import annotations

import asyncio
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

from renderers import Message, ParsedResponse, ParsedToolCall, RenderedTokens, RendererError, RendererPool
from renderers.errors import MediaError, MessageError
from renderers.messages import is_media_part, with_medium
from rollouts.engines.protocol import (
    ChatEngine,
    Completion,
    Engine,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenListener,
    check_result,
    is_streaming,
)
from rollouts.episodes.calls import RendererCalls
from rollouts.episodes.deadlines import (
    EpisodeActivity,
    EpisodeDeadlines,
    EpisodeLimits,
    TurnCounts,
    TurnSeconds,
    UpdatePauses,
    max_turns_limit,
)
from rollouts.episodes.errors import EnvironmentProtocolError, EpisodeLimitError, raise_naming_origin, wrap_exceptions
from rollouts.errors import (
    ArgumentError,
    EngineFailedError,
    GenerationInterruptedError,
    RolloutsError,
    TrajectoryFinishedError,
    describe_exception,
)
from rollouts.trajectory.media_reference import MediaOfParts, media_counts
from rollouts.trajectory.storable import copied_mapping, plain_copy
from rollouts.trajectory.tree import Trajectory
from rollouts.values import whole_number

#: Models pad their embedding by fewer rows than this beyond the tokenizer's ids, and a policy may sample such a row.
_MAX_PADDING = 4096


async def generate_completions(
    engine: Engine, request: GenerateRequest, vocab_size: int | None, listen: TokenListener | None = None
) -> list[Completion]:
    """The completions of a request, by index, none of which was interrupted. Raises as `generated`."""
    completions = await generated(engine, request, vocab_size, listen)
    check_uninterrupted(request, completions)
    return completions


async def generated(
    engine: Engine, request: GenerateRequest, vocab_size: int | None, listen: TokenListener | None = None
) -> list[Completion]:
    """The completions of a request, by index. `listen` receives their tokens earlier, if the engine streams them.

    Raises `EngineError`; `EngineFailedError` if the engine raises an exception that is not of this distribution.
    """
    with wrap_exceptions(
        lambda error: EngineFailedError(
            request.request_id, f"{type(engine).__name__} raised {describe_exception(error)}"
        ),
        unchanged=(RolloutsError, RendererError),
    ):
        if listen is not None and is_streaming(engine):
            result = await engine.generate_streamed(request, listen)
        else:
            result = await engine.generate(request)
        check_result(request, result, vocab_size=vocab_size)
    return sorted(result.completions, key=lambda completion: completion.index)


def check_uninterrupted(request: GenerateRequest, completions: Iterable[Completion]) -> None:
    """Raises `GenerationInterruptedError` for a completion that the engine ended before its end."""
    for completion in completions:
        if completion.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            raise GenerationInterruptedError(
                request.request_id, f"generation ended with {completion.finish_reason.value!r}"
            )


def known_vocab_size(engine: object, renderer: object) -> int | None:
    """The number of token ids of the model: the engine's `vocab_size`, else the tokenizer's plus padding, else None."""
    engine_size = whole_number(getattr(engine, "vocab_size", None))
    if engine_size is not None:
        return engine_size
    tokenizer = getattr(getattr(renderer, "renderer", renderer), "tokenizer", None)
    tokenizer_size = whole_number(getattr(tokenizer, "vocab_size", None))
    return None if tokenizer_size is None else tokenizer_size + _MAX_PADDING


def expecting_request(engine: Any) -> AbstractContextManager[None]:
    """Announces a request that is being prepared to an engine that batches requests (see `Engine`)."""
    announce = getattr(engine, "expecting_request", nullcontext)
    announcement: AbstractContextManager[None] = announce()
    return announcement


# The messages of an episode as its prompts have them: what an environment changes afterwards has no effect on them.


def own_messages(messages: Sequence[Message]) -> Sequence[Message]:
    """Copies of messages. Their media are shared, until `keep_media` replaces them.

    What the renderer refuses is returned as it is.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        return messages
    return [_own_message(message) for message in messages]


def keep_media(messages: Sequence[Message], prompt: RenderedTokens) -> None:
    """Replace the media of messages, those of `own_messages`, by their sources.

    `prompt` ends with the messages. A buffer that an environment uses for every picture may change from now on.
    """
    contents: list[list[Any]] = [
        cast(list[Any], message["content"]) for message in messages if isinstance(message.get("content"), list)
    ]
    places = [(content, index) for content in contents for index, part in enumerate(content) if is_media_part(part)]
    if not places:
        return
    media = [] if prompt.multi_modal_data is None else prompt.multi_modal_data.items_with_ranges()
    items = MediaOfParts(item for item, _ in media[-len(places) :])
    for content, index in places:
        item = items.take(content[index])
        if item is None:
            return  # `Trajectory.add_turn` refuses messages with more media than the prompt
        part = {key: value for key, value in content[index].items() if key != "fps"}  # a source has its own
        content[index] = with_medium(part, item.source)


def own_tools(tools: Any) -> Any:
    """A copy of tools. What contains itself is returned as it is; the renderer refuses it."""
    try:
        return plain_copy(tools)
    except RecursionError:
        return tools


def _own_message(message: Message) -> Message:
    if not isinstance(message, Mapping):
        return message
    try:
        return cast(Message, {key: _own_value(key, value) for key, value in message.items()})
    except RecursionError:  # it contains itself; `Trajectory.add_turn` refuses it
        return message


def _own_value(key: str, value: Any) -> Any:
    if key == "content" and isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        return [_own_part(part) for part in value]
    if key == "tool_calls" and isinstance(value, (list, tuple)):
        return [_own_call(call) for call in value]
    return plain_copy(value)


def _own_part(part: Any) -> Any:
    if not isinstance(part, Mapping):
        return part
    return dict(part) if is_media_part(part) else copied_mapping(part)


def _own_call(call: Any) -> Any:
    if isinstance(call, ParsedToolCall):
        call = {"id": call.id, "name": call.name, "arguments": call.arguments}
    return copied_mapping(call) if isinstance(call, Mapping) else call


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
    """

    rendered: RenderedTokens
    messages: Sequence[Message]
    conversation: Sequence[Message]
    tools: Any
    sampled: Sequence[tuple[int, int]]
    seconds: float
    previous_turn: int | None = None


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A completion in the trajectory: its prompt, its token ids, the parsed message, and the index of the turn.

    The seconds are those of the call of the engine, and of the renderer for prompt and completion.
    """

    prompt: Prompt
    completion_ids: Sequence[int]
    message: Message
    parsed: ParsedResponse
    index: int
    engine_seconds: float
    renderer_seconds: float


class EpisodeRecorder(ABC):
    """Samples turns of one episode, for all of its agents, into its trajectory. The limits hold for all together.

    Made on the event loop of the episode, where the episode begins.
    """

    def __init__(self, trajectory: Trajectory, settings: EpisodeSettings, activity: EpisodeActivity) -> None:
        self.trajectory = trajectory
        self.sampling = settings.sampling
        self.limits = settings.limits
        self.activity = activity
        self.deadlines = EpisodeDeadlines(settings.limits, settings.pauses)
        self._in_flight = 0
        self._closed = False
        self.tasks: set[asyncio.Task[Any]] = set()  # those that wait for a turn or a child of an environment

    @property
    @abstractmethod
    def engine(self) -> Engine | ChatEngine: ...

    @property
    @abstractmethod
    def renderer(self) -> RendererPool | None: ...

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
        request_id = "-".join(map(str, (self.trajectory.episode_id, *path)))
        number = len(self.trajectory.turns) + self._in_flight
        return await self._sample(prompt, agent, sampling, seed, request_id, number)

    @abstractmethod
    async def _sample(
        self, prompt: Prompt, agent: str, sampling: SamplingParams, seed: int | None, request_id: str, number: int
    ) -> SampledTurn:
        """Sample the turn `number`, with `seed` for that of `sampling`, inside of `_requesting`."""

    @contextmanager
    def _requesting(self, number: int) -> Iterator[None]:
        """The block in which a turn is sampled and recorded."""
        self._in_flight += 1
        try:
            self.activity.waits_for("engine", number)
            with self.activity.requesting():
                yield
        finally:
            self._in_flight -= 1

    def check_open(self) -> None:
        """Raises `TrajectoryFinishedError` if the episode has ended."""
        if self._closed:
            raise TrajectoryFinishedError(self.trajectory.episode_id, "turns")

    def finish_turn(self, turn: SampledTurn, environment_seconds: float, *, failed: bool = False) -> None:
        """Report a turn of the trajectory, whose reward is recorded unless its step `failed`.

        Nothing is reported of an episode that was left: it has been reported as ended.
        """
        if self.trajectory.finished:
            return
        seconds = TurnSeconds(turn.engine_seconds, turn.renderer_seconds, environment_seconds)
        self.activity.turn_finished(turn.index, self.counts(turn), seconds, failed)

    @abstractmethod
    def counts(self, turn: SampledTurn) -> TurnCounts:
        """The numbers of tokens and media of a turn."""

    def limit_reached(self) -> EpisodeLimitError | None:
        """The limit that allows no further turn, those that are being sampled included."""
        max_turns = self.limits.max_turns
        if max_turns is not None and len(self.trajectory.turns) + self._in_flight >= max_turns:
            return max_turns_limit(max_turns)
        return self.deadlines.passed(self.activity)

    def refuse_turns(self) -> None:
        """From now on `check_open` raises."""
        self._closed = True

    async def close(self) -> None:
        """Refuse further turns, and cancel the tasks that still wait for one."""
        self.refuse_turns()
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel("the episode has ended")
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)


class TurnRecorder(EpisodeRecorder):
    """Samples turns as tokens, from an engine and a renderer."""

    def __init__(self, trajectory: Trajectory, settings: EpisodeSettings, activity: EpisodeActivity) -> None:
        super().__init__(trajectory, settings, activity)
        self._engine = cast(Engine, settings.engine)
        self._renderer = cast(RendererPool, settings.renderer)
        self._calls = RendererCalls(self._renderer)
        self.vocab_size = known_vocab_size(self._engine, self._renderer)
        self.stop_token_ids = self.sampling.stop_token_ids or self._calls.stop_token_ids()

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def renderer(self) -> RendererPool:
        return self._renderer

    async def first_prompt(self, messages: Sequence[Message], tools: Any, origin: str) -> Prompt:
        """The prompt of a conversation. `origin` says in errors where the messages come from."""
        began = time.perf_counter()
        messages, tools = own_messages(messages), own_tools(tools)
        with expecting_request(self.engine):
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
        messages = own_messages(messages)
        self.activity.waits_for("renderer", self.trajectory.num_turns)
        with expecting_request(self.engine):
            return await self._next_prompt(turn, messages, origin, began)

    async def _next_prompt(self, turn: SampledTurn, messages: Sequence[Message], origin: str, began: float) -> Prompt:
        previous = turn.prompt
        try:
            bridged = await self._calls.bridge(
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
        return Prompt(rendered, conversation, conversation, previous.tools, sampled, seconds, turn.index)

    async def _sample(
        self, prompt: Prompt, agent: str, sampling: SamplingParams, seed: int | None, request_id: str, number: int
    ) -> SampledTurn:
        request = self.request(prompt, sampling, seed, request_id)
        self.limits.check_prompt(request, number)
        with self._requesting(number):
            sent_at = time.perf_counter()
            with self.deadlines.requesting():
                (completion,) = await generate_completions(self._engine, request, self.vocab_size)
            self.activity.waits_for("renderer", number)
            return await self.record(prompt, completion, agent=agent, engine_seconds=time.perf_counter() - sent_at)

    async def record(self, prompt: Prompt, completion: Completion, *, agent: str, engine_seconds: float) -> SampledTurn:
        """Parse a completion of a prompt and add it to the trajectory."""
        received_at = time.perf_counter()
        ids = completion.token_ids.tolist()
        with expecting_request(self.engine):
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
        index = len(trajectory.turns) - 1
        return SampledTurn(prompt, ids, message, parsed, index, engine_seconds, renderer_seconds)

    def counts(self, turn: SampledTurn) -> TurnCounts:
        rendered = turn.prompt.rendered
        media = {} if rendered.multi_modal_data is None else rendered.multi_modal_data.mm_hashes
        modalities = (modality for modality, hashes in media.items() for _ in hashes)
        return TurnCounts(len(rendered), len(turn.completion_ids), **media_counts(modalities))

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
            session_id=self.trajectory.episode_id,
            request_id=request_id,
            placeholder_token_ids=rendered.placeholder_token_ids,
            sampled=prompt.sampled,
        )


def _sampled_ranges(prompt: RenderedTokens) -> list[tuple[int, int]]:
    """The token ranges of a rendered prompt that the model would have sampled: its assistant turns."""
    return [(span.start, span.end) for span in prompt.spans if span.sampled]


def derived_seed(seed: int, *path: str | int) -> int:
    """A seed below 2**63 for `path`, unrelated to the seeds of other paths and of neighbouring values of `seed`."""
    name = "/".join(map(str, (seed, *path)))
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
