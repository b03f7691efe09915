"""Rewards by a language model that reads a conversation: retries, the cache, and what a judge has cost."""

import asyncio
import hashlib
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from renderers import Message
from renderers.errors import MediaError
from renderers.media.policy import MediaPolicy
from renderers.media.reference import load_source
from renderers.media.store import MediaStore
from renderers.messages import check_messages, with_medium
from renderers.process.caches import ByteLRU
from renderers.tokens.length_bound import at_most_tokens
from rollouts.calls import call_on_thread
from rollouts.engines.event_loop import EngineLoop, SingleFlight
from rollouts.engines.protocol import ChatEngine, Engine, FinishReason, GenerateRequest, SamplingParams
from rollouts.episodes.limits import OVERLONG_ERRORS
from rollouts.errors import (
    ArgumentError,
    GenerationInterruptedError,
    RolloutsError,
    describe_exception,
    short_repr,
)
from rollouts.judge.answer import Parse, answer_reader
from rollouts.judge.prompt import compiled_prompt, printed_parts
from rollouts.values import check_integer

#: An answer that cannot be read is quoted in the error from its end, where the number should be.
_QUOTED_CHARACTERS: Final = 200


@dataclass(frozen=True, slots=True)
class Verdict:
    """The number that a judge gave, and its whole answer."""

    score: float
    text: str


@dataclass(frozen=True, slots=True)
class JudgeUsage:
    """What a judge has cost so far.

    `verdicts` were returned, `judged` of them by requests of their own, the others from the cache. `requests`
    were answered, `unreadable` of them without a number. `prompt_tokens` and `completion_tokens` are those of
    the answers; `uncounted` answers came from a server that reports none.
    """

    verdicts: int = 0
    judged: int = 0
    requests: int = 0
    unreadable: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    uncounted: int = 0


class _Answer(NamedTuple):
    text: str
    finish_reason: FinishReason
    prompt_tokens: int | None
    completion_tokens: int | None


class Judge:
    """A language model that scores conversations: a function for `Reward`, `ScoredPrompt`, `ToolEnvironment`.

        judge = Judge(
            ChatEndpoint("https://api.openai.com/v1", "gpt-5-mini"),
            "Which colour is it? {{ task.data.image }} A student says: {{ completion.content }}\\n"
            "Is the student right? End with a line that is only yes or no.",
            parse={"yes": 1.0, "no": 0.0},
        )
        ScoredPrompt(task, question, score=judge)

    - `engine`: a chat endpoint, or any engine with the `renderer` of its model.
    - `prompt`: a Jinja template, or the `Path` of one, whose text is one message of the user. Its variables
      are the `messages` of the conversation, the last message as `completion`, and the `task`; a name that
      does not exist is an error. `content` of a message prints its texts and its media, in order. An image
      that is printed (a PIL image, a uint8 array, bytes, a `MediaSource` or a part of a message) becomes an
      image of the judge's message; the filter `image` does so for URLs and paths: `{{ task.data.path | image
      }}`. A sound that is printed (a part of a message, `{"array": ..., "sampling_rate": ...}` as rows of
      `datasets` have it, a file as bytes or `MediaSource`) becomes a sound; the filter `audio` does so for
      URLs and paths.
    - `parse`: what the answer must be. A dict of labels to numbers: its last line is a label. A regular
      expression: it matches the whole last line, and its group `score` is the number:
      `r"Score: (?P<score>\\d+)"`. A function gets the answer, and returns the number or raises ValueError.
    - `bounds`: the least and the greatest number that is accepted.
    - `messages`: a function of the task, such as that of `ScoredPrompt` or `messages_of_row`, for what
      precedes a completion that is passed alone.
    - `sampling`: temperature 0.7 and 1,024 tokens by default. The seed depends on the prompt alone, so that a
      conversation gets the same verdict in every run on an engine that honours seeds.
    - `attempts`: an answer that has no number, or was cut off, is sampled again, with another seed.
    - `concurrency`: the number of conversations that are judged at a time.
    - `media_policy`: which URLs and paths of media are read; by default none.
    - `cache_bytes`: of verdicts that are kept. Prompts with equal text and media are judged once, and
      requests for them are made once while one is running.
    - `name`: the name of the judge in errors.

    A judge that fails, or gives no number, raises an error: the episode has failed, and has no reward.
    `usage` has the numbers of requests and tokens. Raises `ArgumentError`.
    """

    def __init__(
        self,
        engine: ChatEngine | Engine,
        prompt: str | Path,
        *,
        parse: Parse,
        bounds: tuple[float, float] | None = None,
        messages: Callable[[Any], Sequence[Message] | Awaitable[Sequence[Message]]] | None = None,
        renderer: Any = None,
        sampling: SamplingParams | None = None,
        attempts: int = 3,
        concurrency: int = 32,
        media_policy: MediaPolicy | None = None,
        cache_bytes: int = 64 * 2**20,
        name: str = "judge",
    ) -> None:
        if not isinstance(engine, ChatEngine) and renderer is None:
            raise ArgumentError("renderer", renderer, "pass the renderer of the engine's model, or a ChatEndpoint")
        self.name = name
        self._engine = engine
        self._renderer = renderer
        self._template = compiled_prompt(prompt)
        self._number = answer_reader(parse, bounds)
        self._messages = messages
        self._sampling = sampling or SamplingParams(max_tokens=1024, temperature=0.7)
        if self._sampling.n != 1:
            raise ArgumentError("sampling.n", self._sampling.n, "pass 1: a verdict is one answer")
        self._attempts = check_integer("attempts", attempts)
        self._concurrency = check_integer("concurrency", concurrency)
        self._policy = MediaPolicy() if media_policy is None else media_policy
        self._store = MediaStore()
        self._cache: ByteLRU[bytes, Verdict] = ByteLRU(check_integer("cache_bytes", cache_bytes, least=0))
        self._running: SingleFlight[Verdict] = SingleFlight()
        self._loop = EngineLoop()
        self._slots: asyncio.Semaphore | None = None
        self.usage = JudgeUsage()

    def __repr__(self) -> str:
        return f"Judge({self._engine!r}, name={self.name!r})"

    async def __call__(self, conversation: Sequence[Message] | Message, task: Any = None) -> float:
        """The number for a conversation, or for a completion alone. Raises what `verdict` raises."""
        return (await self.verdict(conversation, task)).score

    async def verdict(self, conversation: Sequence[Message] | Message, task: Any = None) -> Verdict:
        """The number for a conversation, or for a completion alone, and the judge's answer.

        Raises `RolloutsError` where the prompt cannot be rendered, or none of the answers has a number;
        `MediaError` and `MessageError` for the conversation; `EngineError`.
        """
        if isinstance(conversation, Mapping):
            before = [] if self._messages is None else self._messages(task)
            conversation = [*(await before if inspect.isawaitable(before) else before), conversation]
        if not conversation:
            raise ArgumentError("conversation", conversation, f"pass {self.name} at least one message")
        parts = self._parts(check_messages(conversation), task)
        if any(part["type"] != "text" for part in parts):
            parts = await call_on_thread(self._with_sources, parts)  # media are fetched, read and hashed
        key = self._key(parts)
        verdict = self._cache.get(key)
        if verdict is None:
            verdict = await self._running.run(key, partial(self._judged, key, parts))
        self._count(verdicts=1)
        return verdict

    def _parts(self, messages: Sequence[Mapping[str, Any]], task: Any) -> list[dict[str, Any]]:
        """The texts and media of the judge's message."""
        try:
            return printed_parts(self._template, messages, task)
        except Exception as error:  # a template may do to the values of a task whatever Python does
            raise RolloutsError(
                f"{self.name}: its prompt cannot be rendered: {describe_exception(error)}; the template has messages, "
                "completion and task"
            ) from error

    def _with_sources(self, parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        loaded = []
        for index, part in enumerate(parts):
            if part["type"] != "text":
                try:
                    part = with_medium(part, load_source(part, self._policy, self._store))
                except MediaError as error:
                    raise error.at(0, index) from error.__cause__
            loaded.append(part)
        return loaded

    def _key(self, parts: Sequence[Mapping[str, Any]]) -> bytes:
        """A digest of all that a verdict depends on."""
        kinds = [
            (part["type"], part["text"] if part["type"] == "text" else part[part["type"]].digest) for part in parts
        ]
        engine = self._engine
        model = engine.model if isinstance(engine, ChatEngine) else engine.weight_version
        content = json.dumps([kinds, model, asdict(self._sampling)], default=repr)
        return hashlib.blake2b(content.encode(), digest_size=16).digest()

    async def _judged(self, key: bytes, parts: Sequence[Any]) -> Verdict:
        # A semaphore belongs to the event loop that waits on it, and a judge may be used on another one
        # later.
        if self._loop.enter(self.name) or self._slots is None:
            self._slots = asyncio.Semaphore(self._concurrency)
        reasons: list[str] = []
        async with self._slots:
            for attempt in range(self._attempts):
                seed = int.from_bytes(hashlib.blake2b(key + attempt.to_bytes(4), digest_size=8).digest()) >> 1
                answer = await self._ask([{"role": "user", "content": list(parts)}], seed)
                self._count(
                    requests=1,
                    prompt_tokens=answer.prompt_tokens or 0,
                    completion_tokens=answer.completion_tokens or 0,
                    uncounted=None in (answer.prompt_tokens, answer.completion_tokens),
                )
                try:
                    if answer.finish_reason is not FinishReason.STOP:
                        raise ValueError(f"it was cut off at {self._sampling.max_tokens} tokens")
                    verdict = Verdict(self._number(answer.text), answer.text)
                except ValueError as error:
                    self._count(unreadable=1)
                    reasons.append(f"{error}: {short_repr(answer.text[-_QUOTED_CHARACTERS:], _QUOTED_CHARACTERS + 20)}")
                    continue
                # A character of a text takes up to 4 bytes.
                self._cache.put(key, verdict, len(verdict.text) * 4 + 512)
                self._count(judged=1)
                return verdict
        raise RolloutsError(
            f"{self.name}: none of {self._attempts} answers has a number ({'; '.join(dict.fromkeys(reasons))}). Say in "
            "the prompt how the answer ends, or raise max_tokens of the sampling"
        )

    async def _ask(self, messages: list[Message], seed: int) -> _Answer:
        try:
            if isinstance(self._engine, ChatEngine):
                reply = await self._engine.chat(messages, sampling=self._sampling, seed=seed)
                return _Answer(reply.parsed.content, reply.finish_reason, reply.prompt_tokens, reply.completion_tokens)
            with at_most_tokens(await self._engine.context_length()):
                prompt = await call_on_thread(partial(self._renderer.render, messages, add_generation_prompt=True))
            stops = self._sampling.stop_token_ids or tuple(self._renderer.get_stop_token_ids())
            request = GenerateRequest(
                prompt.token_ids,
                replace(self._sampling, seed=seed, stop_token_ids=stops),
                prompt.multi_modal_data,
                placeholder_token_ids=prompt.placeholder_token_ids,
            )
            (completion,) = (await self._engine.generate(request)).completions
        except OVERLONG_ERRORS as error:
            # As it is, this error would end the judged episode as if its own prompt were too long.
            raise RolloutsError(f"{self.name}: its prompt does not fit into the model's context: {error}") from error
        if completion.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            reason = f"the answer of {self.name} ended with {completion.finish_reason.value!r}"
            raise GenerationInterruptedError(request.request_id, reason)
        ids = completion.token_ids.tolist()
        parsed = self._renderer.parse_response(ids, prompt_ids=prompt.token_ids)
        return _Answer(parsed.content, completion.finish_reason, len(prompt.token_ids), len(ids))

    def _count(self, **added: int) -> None:
        self.usage = replace(
            self.usage, **{field: getattr(self.usage, field) + number for field, number in added.items()}
        )
