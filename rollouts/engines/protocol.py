"""The interface of engines: prompts (token ids and media) in, completions (token ids and log-probabilities) out."""

from __future__ import annotations

import os
import uuid
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple, NoReturn

import numpy as np

from renderers import Message, MultiModalData, ParsedResponse
from renderers.media.policy import MediaPolicy
from renderers.placement import PlacedItem
from rollouts.calls import ClosedAtEnd
from rollouts.engines.token_checks import prompt_error
from rollouts.errors import ArgumentError, CapabilityError, InvalidRequestError, is_unicode, short_repr
from rollouts.values import check_choice, real_number, whole_number
from transport import wire_type


@wire_type("rollouts.FinishReason")
class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@wire_type("rollouts.SamplingParams")
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options. `top_k` 0 and `top_p` 1 switch those filters off; `temperature` 0 is greedy.

    Numbers may be numpy scalars. Raises `InvalidRequestError`, which names the field, for a value of another
    type or range. An engine takes `n` to 1,024, `max_tokens` to 2**20 and `top_logprobs` to 1,024.

    With a `seed`, a completion depends on (weights, prompt, seed, index) alone, not on other requests.
    `extra` holds sampling options under the engine's own names (`min_p`, `repetition_penalty`...); an engine
    refuses options that it does not know, because servers ignore them without an error. `top_logprobs` k
    requests the k likeliest tokens in the place of each sampled one, under the raw distribution
    (`Completion.top_logprobs`); 0: none.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    n: int = 1
    stop_token_ids: tuple[int, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k", "n", "top_logprobs"):
            if type(value := getattr(self, name)) is not int:
                self._set(name, whole_number(value), "an integer")
        if self.seed is not None:
            self._set("seed", whole_number(self.seed), "an integer or None")
        for name in ("temperature", "top_p"):
            self._set(name, real_number(getattr(self, name)), "a finite number")
        kind = "a sequence of token ids, each from 0 to 2**31 - 1"
        self._set("stop_token_ids", _token_ids(self.stop_token_ids), kind)
        object.__setattr__(self, "extra", dict(self.extra))
        for name, is_allowed, allowed in (
            ("max_tokens", 1 <= self.max_tokens < 2**31, "at least 1, below 2**31"),
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0, up to 1"),
            ("top_k", 0 <= self.top_k < 2**31, "0 (off, -1 in vLLM) or more, below 2**31: no vocabulary is larger"),
            ("n", 1 <= self.n < 2**31, "at least 1, below 2**31"),
            ("top_logprobs", self.top_logprobs >= 0, "0 (none) or more"),
        ):
            if not is_allowed:
                text = f"SamplingParams.{name} is {short_repr(getattr(self, name))}; pass {allowed}"
                raise InvalidRequestError("sampling", text)

    def _set(self, name: str, value: object, kind: str) -> None:
        """Set a field to its value as a built-in type. Raises `InvalidRequestError` for None: it is not `kind`."""
        if value is None:
            given = getattr(self, name)
            raise InvalidRequestError("sampling", f"{name} is {short_repr(given)} ({type(given).__name__}), not {kind}")
        object.__setattr__(self, name, value)


def _token_ids(values: object) -> tuple[int, ...] | None:
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if isinstance(values, str | bytes) or not isinstance(values, Sequence | Set):
        return None
    ids = tuple(number for value in values if (number := whole_number(value)) is not None and 0 <= number < 2**31)
    return ids if len(ids) == len(values) else None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt. `prompt_ids` holds expanded placeholders; `multi_modal_data` holds their media.

    `placeholder_token_ids` (as in `RenderedTokens`) maps each modality to the token of an unexpanded item; an
    engine whose server processes media needs it. `sampled` holds the half-open ranges of the prompt that
    earlier completions sampled: a media token inside them is text, a media token elsewhere outside of a
    placeholder is an error. `session_id` is the same for all turns of an episode. `prompt_logprobs` requests
    the log-probability of each prompt token too, `prompt_top_logprobs` k the k likeliest tokens in the place
    of each (0: none). `adapter` names a LoRA adapter that the engine has loaded; None samples with the
    weights of the model alone. Raises `InvalidRequestError` for other ids and numbers.
    """

    prompt_ids: Sequence[int]
    sampling: SamplingParams
    multi_modal_data: MultiModalData | None = None
    session_id: str | None = None
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    placeholder_token_ids: Mapping[str, int] = field(default_factory=dict, kw_only=True)
    sampled: Sequence[tuple[int, int]] = field(default=(), kw_only=True)
    prompt_logprobs: bool = field(default=False, kw_only=True)
    adapter: str | None = field(default=None, kw_only=True)
    prompt_top_logprobs: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        number = whole_number(self.prompt_top_logprobs)
        if number is None or number < 0:
            given = short_repr(self.prompt_top_logprobs)
            raise InvalidRequestError(self.request_id, f"prompt_top_logprobs is {given}, not an integer, 0 or more")
        object.__setattr__(self, "prompt_top_logprobs", number)
        if (error := prompt_error(self.prompt_ids)) is not None:
            raise InvalidRequestError(self.request_id, error)

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities in the places of the prompt are requested; a stream has none."""
        return self.prompt_logprobs or self.prompt_top_logprobs > 0

    @property
    def media(self) -> list[PlacedItem]:
        """The media items with their placeholder ranges, in prompt order."""
        return [] if self.multi_modal_data is None else self.multi_modal_data.items_with_ranges()


@wire_type("rollouts.WeightSpan")
@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Tokens `start:end` of a completion were sampled from weights `version`."""

    version: str
    start: int
    end: int


@wire_type("rollouts.TopLogprobs")
class TopLogprobs(NamedTuple):
    """The k likeliest tokens in the place of each of n tokens, the likeliest first.

        completion.top_logprobs.token_ids[0]  # the k likeliest first tokens of the completion

    `token_ids` int32 (n, k); `logprobs` float32 (n, k), under the raw distribution, as `Completion.logprobs`.
    Each row has exactly k tokens, the sampled one only if it is among them; more than the vocabulary has are
    refused. Where a server reports log-probabilities after all options, that of a token that these left out
    is -9998. In the place of a token that nothing predicts, as the first of a prompt, the ids are -1 and the
    log-probabilities NaN.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray

    @classmethod
    def joined(cls, parts: Iterable[TopLogprobs]) -> TopLogprobs:
        """The rows of all parts, which have one k, one after another."""
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    @classmethod
    def unpredicted(cls, count: int, k: int) -> TopLogprobs:
        """`count` rows without a prediction."""
        return cls(np.full((count, k), NO_TOKEN, np.int32), np.full((count, k), np.nan, np.float32))

    def rows(self, selected: slice | np.ndarray) -> TopLogprobs:
        """The rows that a slice or an array of numbers selects."""
        return TopLogprobs(self.token_ids[selected], self.logprobs[selected])


#: The id in places of `TopLogprobs` without a prediction.
NO_TOKEN: Final = -1


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One sample: ids int32 (n,), their log-probabilities float32 (n,) under the raw model distribution.

    Raw means before temperature, top-k and top-p, as vLLM reports by default. The ids include the stop token.
    `top_logprobs`, if requested, has a row for each token. Some engines also report `routed_experts`,
    integers (prompt + n - 1, layers, experts per token). Where options left ids out (top_p, top_k, min_p...),
    `sampling_masks` has for each token the ids (int32) that it was sampled from, empty where they are not
    known; a server that reports processed log-probabilities gives those among these ids.
    """

    index: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    stop_token_id: int | None = None
    weight_spans: tuple[WeightSpan, ...] = ()
    routed_experts: np.ndarray | None = None
    sampling_masks: tuple[np.ndarray, ...] | None = None
    top_logprobs: TopLogprobs | None = None

    @classmethod
    def aborted(cls, index: int) -> Completion:
        """A sample that was ended before it had any token."""
        return cls(index, np.empty(0, np.int32), np.empty(0, np.float32), FinishReason.ABORT)


@dataclass(frozen=True, slots=True, eq=False)
class TokenDelta:
    """New tokens of completion `index`: ids int32 (n,), their log-probabilities float32 (n,), and `top_logprobs`."""

    index: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    top_logprobs: TopLogprobs | None = None


#: Receives the tokens of a request as they are sampled.
TokenListener = Callable[[TokenDelta], None]


@dataclass(frozen=True, slots=True, eq=False)
class GenerateResult:
    """The completions of one request. `prompt_logprobs`, if requested: float32 (prompt,), NaN for the first
    token; `prompt_top_logprobs`, if requested: a row for each token of the prompt, the first one without a
    prediction."""

    request_id: str
    completions: list[Completion]
    prompt_logprobs: np.ndarray | None = None
    prompt_top_logprobs: TopLogprobs | None = None


#: What happens to running requests while weights are replaced. "abort": they end, and continue from their
#: tokens with the new weights. "wait": they finish with the old weights first. "keep": they stay in the
#: engine, and continue with the new weights.
InFlight = Literal["abort", "wait", "keep"]

#: Sends the tensors of a trainer by a transport of its own. It is called once, with a function that it awaits
#: for each bucket while it sends the bucket: `receive({"names": ..., "dtype_names": ..., "shapes": ...})`.
SendTensors = Callable[[Callable[[Mapping[str, Any]], Awaitable[None]]], Awaitable[None]]


class Engine(ClosedAtEnd):
    """Samples from a model. Many requests may be awaited at once, on one event loop.

        class Sevens(Engine):
            async def generate(self, request, listen=None):
                ids, logprobs = np.array([7], np.int32), np.array([-0.1], np.float32)
                return GenerateResult(request.request_id, [Completion(0, ids, logprobs, FinishReason.LENGTH)])

            async def close(self):
                pass

    Each engine has these two methods. What else it cannot do raises `CapabilityError`, and what it does not
    know is None or empty. A subclass overrides the properties with properties or with attributes of the
    class; `listen` is passed only where it `streams`.
    """

    @property
    def vocab_size(self) -> int | None:
        """The limit for token ids, those without a token of the tokenizer included."""
        return None

    @property
    def max_model_len(self) -> int | None:
        """The most tokens of a prompt and its completion together; of a server, None before it was asked."""
        return None

    @property
    def weight_version(self) -> str:
        """The version of the weights in use, as `WeightSpan.version` names it."""
        return ""

    @property
    def streams(self) -> bool:
        """Whether `generate` reports tokens as they are sampled."""
        return False

    @property
    def base_url(self) -> str:
        """The address of its server, without credentials; empty for an engine without one."""
        return ""

    #: The control calls of its server: pauses, sleep, caches, weights, metrics.
    control: Any = None

    @abstractmethod
    async def generate(self, request: GenerateRequest, listen: TokenListener | None = None) -> GenerateResult:
        """Sample `request.sampling.n` completions. Raises an `EngineError`.

        Where the engine `streams`, `listen` is called on the event loop with new tokens before the result has
        them all. The tokens of each completion, joined in order, are those of the result. With `listen`, a
        request that `scores_prompt` raises `InvalidRequestError`.
        """

    async def capabilities(self) -> Any:
        """What its server supports, which is asked once. Raises an `EngineError`."""
        return None

    async def context_length(self) -> int | None:
        """`max_model_len`, for which a server is asked. Raises as `capabilities`."""
        if self.max_model_len is None:
            await self.capabilities()
        return self.max_model_len

    async def check_health(self) -> None:
        """Raise the `EngineError` because of which a request could not be served now."""

    async def served_version(self) -> str | None:
        """`weight_version`, read from a server; None where it cannot be known. Raises an `EngineError`."""
        return self.weight_version

    def expecting_request(self) -> AbstractContextManager[None]:
        """A block in which a request is prepared, for an engine that collects requests into batches."""
        return nullcontext()

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests by their ids: their `generate` returns the tokens so far, with `FinishReason.ABORT`.

        Ids of requests that do not run are ignored.
        """
        self._refuse("abort", "cannot end requests")

    async def abort_all(self) -> None:
        """End every request of this engine, and none of other clients."""
        self._refuse("abort_all", "cannot end requests")

    async def update_weights(self, weights: Any, version: str, *, in_flight: InFlight = "abort") -> None:
        """Replace the weights; `generate` labels tokens with `version` from then on.

        `weights` is what the engine takes: a checkpoint directory, a mapping from names to tensors,
        `SendTensors`. No call of `generate` ends because of the update: a completion that was cut off
        continues, with spans of both versions.

        Raises `WeightUpdateError`, or another `EngineError`, if the weights in use are not those that were
        passed; the text says which are. Raises `ArgumentError` for arguments of other types.
        """
        self._refuse("update_weights", "cannot replace its weights")

    async def load_adapter(self, name: str, directory: str | os.PathLike[str]) -> None:
        """Load a LoRA adapter, the directory that `save_pretrained` of peft writes, for `GenerateRequest.adapter`.

        Raises `WeightUpdateError` where it is not loaded, also for a name that is in use: a name stands for
        one set of weights.
        """
        self._refuse("load_adapter", "takes no adapters")

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter, after its requests have ended. Raises `UnknownAdapterError`."""
        self._refuse("unload_adapter", "takes no adapters")

    async def adapters(self) -> Mapping[str, str]:
        """The loaded adapters: the directory of each by its name."""
        return {}

    def _refuse(self, call: str, lack: str) -> NoReturn:
        raise CapabilityError(call, f"{type(self).__name__} {lack}")


@dataclass(frozen=True, slots=True, eq=False)
class ChatTokens:
    """The tokens of an answer: ids int32 (prompt,) of the prompt as the server rendered it, ids int32 (n,) of
    the completion with its stop token, and their log-probabilities float32 (n,)."""

    prompt_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """An assistant message of a chat endpoint.

    `message` is the message for the conversation, `parsed` the same with malformed tool calls, as
    `step_parsed` of an environment takes it. `finish_reason` is `STOP` (also for tool calls) or `LENGTH`. The
    numbers of tokens are those that the server reports, else None; `model` is the model that it reports.
    `tokens` are those of an answer to messages without media, where an endpoint was made to request them; the
    numbers are theirs then.
    """

    message: Message
    parsed: ParsedResponse
    finish_reason: FinishReason
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    model: str | None = None
    tokens: ChatTokens | None = None


class ChatEngine(ClosedAtEnd):
    """Answers conversations: a chat endpoint.

    Episodes run on it as on an `Engine`, without a renderer. Where answers have no tokens, nothing can be
    trained on them (`Trajectory.has_tokens`).
    """

    #: The name of the model.
    model: str = ""
    #: Which URLs and paths of media are read.
    media_policy: MediaPolicy = MediaPolicy()

    @abstractmethod
    async def chat(
        self, messages: Sequence[Message], *, tools: Any = None, sampling: SamplingParams, seed: int | None = None
    ) -> ChatAnswer:
        """Answer checked messages, whose media are `MediaSource`s. Raises an `EngineError`."""


async def generate_at(engine: Engine, request: GenerateRequest, listen: TokenListener | None) -> GenerateResult:
    """What `engine.generate` returns; an engine that does not stream needs no parameter for a listener."""
    if listen is None or not engine.streams:
        return await engine.generate(request)
    return await engine.generate(request, listen)


def check_engine(engine: object, *, allows_chat: bool = True) -> None:
    """Raises `ArgumentError` for what is neither an `Engine` nor, where `allows_chat`, a `ChatEngine`."""
    if isinstance(engine, Engine) or (allows_chat and isinstance(engine, ChatEngine)):
        return
    example = "VLLMEngine(url) or a ChatEndpoint" if allows_chat else "VLLMEngine(url)"
    rule = f"pass an engine, such as {example}; one of your own is a subclass of Engine"
    raise ArgumentError("engine", engine, rule)


def check_update_arguments(version: object, in_flight: object) -> None:
    """Raises `ArgumentError` for a version that is no text, empty or not for UTF-8, and for an unknown `in_flight`."""
    check_version("version", version)
    check_choice("in_flight", in_flight, InFlight)


def check_version(argument: str, version: object) -> None:
    """Raises `ArgumentError`, which names `argument`, for a version that is no text, empty or not for UTF-8."""
    if not isinstance(version, str) or not version or not is_unicode(version):
        rule = 'pass a name for the weights, text that is not empty and that UTF-8 can encode, such as "3"'
        raise ArgumentError(argument, version, rule)


def check_adapter_name(name: object) -> None:
    """Raises `ArgumentError` for a name that is not 1 to 256 printable ASCII characters without spaces."""
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= 256
        or not (name.isascii() and name.isprintable() and " " not in name)
    ):
        rule = "pass a name for the adapter's weights: 1 to 256 printable ASCII characters without spaces"
        raise ArgumentError("name", name, rule)
