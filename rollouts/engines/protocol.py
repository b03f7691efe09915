"""The engine protocol: requests, completions, their checks and limits."""

from __future__ import annotations

import math
import operator
import struct
import uuid
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeGuard, runtime_checkable

import numpy as np

from renderers import Message, MultiModalData, ParsedResponse
from renderers.placement import PlacedItem
from rollouts.errors import (
    ArgumentError,
    InvalidRequestError,
    MalformedResultError,
    MissingLogProbsError,
    OverlongPromptError,
    is_unicode,
    short_repr,
)
from rollouts.values import check_choice, check_integer, finite_number, has_members, whole_number
from transport import wire_type
from transport.errors import quoted

# Checks of token ids and log-probabilities. Each returns the text of an error, None where nothing is wrong.


#: Token ids are stored as int32.
MAX_TOKEN_ID: Final = 2**31 - 1

#: The log of a probability is at most 0. A log-softmax in float32 over a large vocabulary may exceed it by rounding.
MAX_LOGPROB: Final = 1e-4

#: Some servers write this number for a log-probability that they do not have.
MISSING_LOGPROB: Final = -9999.0


def token_ids_error(token_ids: object, vocab_size: int | None = None) -> str | None:
    """Token ids are an integer array (n,) of ids from 0 to 2**31 - 1, and below `vocab_size` where that is known."""
    if not isinstance(token_ids, np.ndarray):
        return f"token ids are {_type_name(token_ids)}, not a numpy array of integers"
    if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
        return f"token ids are {token_ids.dtype} of shape {token_ids.shape}, not one row of integers"
    largest = MAX_TOKEN_ID if vocab_size is None else vocab_size - 1
    if not token_ids.size or (token_ids.min() >= 0 and token_ids.max() <= largest):
        return None
    wrong = (token_ids < 0) | (token_ids > largest)
    index = int(wrong.argmax())
    return f"token {index} has id {token_ids[index]}; ids run from 0 to {largest}"


def prompt_error(token_ids: object) -> str | None:
    """A prompt is a list, or another sequence or array, of integers. The engine checks their range."""
    if isinstance(token_ids, np.ndarray):
        if token_ids.ndim == 1 and token_ids.dtype.kind in "iu":
            return None
        return f"the prompt is {token_ids.dtype} of shape {token_ids.shape}, not a row of integers"
    is_text = isinstance(token_ids, str | bytes | bytearray | memoryview)
    if type(token_ids) is not list and (is_text or not isinstance(token_ids, Sequence)):
        return f"the prompt is {type(token_ids).__name__}, not token ids"
    try:
        struct.pack(f"{len(token_ids)}q", *token_ids)  # the fastest check that each is an integer
    except struct.error:
        index, token = next((index, token) for index, token in enumerate(token_ids) if not _is_int64(token))
        return f"token {index} of the prompt is {short_repr(token)}, not an int of 64 bits"
    return None


def _is_int64(value: object) -> bool:
    return hasattr(type(value), "__index__") and -(2**63) <= operator.index(value) < 2**63  # type: ignore[arg-type]


def logprobs_error(logprobs: object, count: int) -> str | None:
    """Log-probabilities are a float array (count,), each finite, above -9999 and at most 0 but for rounding."""
    if not isinstance(logprobs, np.ndarray):
        return f"log-probabilities are {_type_name(logprobs)}, not a numpy array of float32"
    if logprobs.ndim != 1 or logprobs.dtype.kind != "f":
        return f"log-probabilities are {logprobs.dtype} of shape {logprobs.shape}, not one row of float32"
    if len(logprobs) != count:
        return f"{count} tokens and {len(logprobs)} log-probabilities"
    valid = (logprobs > MISSING_LOGPROB) & (logprobs <= MAX_LOGPROB)  # False for NaN, too
    if valid.all():
        return None
    index = int(valid.argmin())
    cause = ", as NaN in the weights gives" if np.isnan(logprobs[index]) else ""
    return f"token {index} has log-probability {logprobs[index]}{cause}"


def _type_name(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


# The interface of engines: prompts (token ids and media) in, completions (token ids and log-probabilities) out.


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

    Numbers may be numpy scalars. Raises `InvalidRequestError`, which names the field, for a value of another type or
    range. The engine limits `n`, `max_tokens` and `top_logprobs` (`EngineLimits`).

    With a `seed`, a completion depends on (weights, prompt, seed, index) alone, not on other requests. `extra` holds
    sampling options under the engine's own names (`min_p`, `repetition_penalty`...); an engine refuses options that it
    does not know, because servers ignore them without an error. `top_logprobs` k requests the k likeliest tokens in the
    place of each sampled one, under the raw distribution (`Completion.top_logprobs`); 0: none.
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
            value = getattr(self, name)
            self._set(name, None if isinstance(value, bool) else finite_number(value), "a finite number")
        self._set("stop_token_ids", _token_ids(self.stop_token_ids), "a sequence of token ids")
        object.__setattr__(self, "extra", dict(self.extra))
        for name, is_allowed, allowed in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0, up to 1"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("n", self.n >= 1, "at least 1"),
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
    ids = [whole_number(value) for value in values]
    return None if None in ids else tuple(number for number in ids if number is not None)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt. `prompt_ids` holds expanded placeholders; `multi_modal_data` holds their media.

    `placeholder_token_ids` (as in `RenderedTokens`) maps each modality to the token of an unexpanded item; an engine
    whose server processes media needs it. `sampled` holds the half-open ranges of the prompt that earlier completions
    sampled: a media token inside them is text, a media token elsewhere outside of a placeholder is an error.
    `session_id` is the same for all turns of an episode. A server that schedules by priority serves a smaller
    `priority` earlier. `prompt_logprobs` requests the log-probability of each prompt token too, `prompt_top_logprobs` k
    the k likeliest tokens in the place of each (0: none). `adapter` names a LoRA adapter that the engine has loaded;
    None samples with the weights of the model alone. Raises `InvalidRequestError` for other ids and numbers.
    """

    prompt_ids: Sequence[int]
    sampling: SamplingParams
    multi_modal_data: MultiModalData | None = None
    session_id: str | None = None
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    placeholder_token_ids: Mapping[str, int] = field(default_factory=dict, kw_only=True)
    sampled: Sequence[tuple[int, int]] = field(default=(), kw_only=True)
    priority: int = field(default=0, kw_only=True)
    prompt_logprobs: bool = field(default=False, kw_only=True)
    adapter: str | None = field(default=None, kw_only=True)
    prompt_top_logprobs: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        for name, least in (("priority", -math.inf), ("prompt_top_logprobs", 0)):
            number = whole_number(value := getattr(self, name))
            if number is None or number < least:
                expected = "an integer" if least else "an integer, 0 (none) or more"
                raise InvalidRequestError(self.request_id, f"{name} is {short_repr(value)}, not {expected}")
            object.__setattr__(self, name, number)
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

    `token_ids` int32 (n, k); `logprobs` float32 (n, k), under the raw distribution, as `Completion.logprobs`. Each row
    has exactly k tokens, the sampled one only if it is among them; more than the vocabulary has are refused. In the
    place of a token that nothing predicts, as the first of a prompt, the ids are -1 and the log-probabilities NaN.
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
    `top_logprobs`, if requested, has a row for each token. Some engines also report `routed_experts`, integers (prompt
    + n - 1, layers, experts per token), and `sampling_masks`, for each token the ids (int32) that it was sampled from.
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
    """The completions of one request. `prompt_logprobs`, if requested: float32 (prompt,), NaN for the first token;
    `prompt_top_logprobs`, if requested: a row for each token of the prompt, the first one without a prediction."""

    request_id: str
    completions: list[Completion]
    prompt_logprobs: np.ndarray | None = None
    prompt_top_logprobs: TopLogprobs | None = None


@runtime_checkable
class Engine(Protocol):
    """Samples from a model. Many requests may be awaited at once, on one event loop.

    An engine may have two further attributes, which `run_episode` uses where they exist: `vocab_size`, the limit for
    token ids, and `expecting_request()`, a context manager that is entered while a request is being prepared, for an
    engine that collects requests into batches.
    """

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample `request.sampling.n` completions. Raises an `EngineError`."""
        ...

    async def close(self) -> None:
        """Refuse further requests and release what the engine holds."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ChatTokens:
    """The tokens of an answer: ids int32 (prompt,) of the prompt as the server rendered it, ids int32 (n,) of the
    completion with its stop token, and their log-probabilities float32 (n,)."""

    prompt_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """An assistant message of a chat endpoint.

    `message` is the message for the conversation, `parsed` the same with malformed tool calls, as `step_parsed` of an
    environment takes it. `finish_reason` is `STOP` (also for tool calls) or `LENGTH`. The numbers of tokens are the
    server's, None where it reports none; `model` is the model that the server reported. `tokens` are those of an answer
    to messages without media, where an endpoint was made to request them.
    """

    message: Message
    parsed: ParsedResponse
    finish_reason: FinishReason
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    model: str | None = None
    tokens: ChatTokens | None = None


@runtime_checkable
class ChatEngine(Protocol):
    """Answers conversations: a chat endpoint.

    Episodes run on it as on an `Engine`, without a renderer. Where answers have no tokens, nothing can be trained on
    them (`Trajectory.has_tokens`).
    """

    async def chat(
        self, messages: Sequence[Message], *, tools: Any = None, sampling: SamplingParams, seed: int | None = None
    ) -> ChatAnswer:
        """Answer checked messages, whose media are `MediaSource`s. Raises an `EngineError`."""
        ...

    async def close(self) -> None:
        """Refuse further calls and release what the engine holds."""
        ...


@runtime_checkable
class StreamingEngine(Engine, Protocol):
    """An engine that reports tokens as they are sampled."""

    async def generate_streamed(self, request: GenerateRequest, listen: TokenListener) -> GenerateResult:
        """As `generate`; `listen` is called on the event loop with the new tokens, before the result has them all.

        The tokens of each completion, joined in order, are those of the result. Raises `InvalidRequestError` for a
        request that `scores_prompt`, and what `generate` raises.
        """
        ...


@runtime_checkable
class AbortableEngine(Engine, Protocol):
    """An engine whose requests can be ended early."""

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests by their ids: their `generate` returns the tokens so far, with `FinishReason.ABORT`.

        Ids of requests that do not run are ignored.
        """
        ...


#: What happens to running requests while weights are replaced. "abort": they end, and continue from their tokens with
#: the new weights. "wait": they finish with the old weights first. "keep": they stay in the engine, and continue with
#: the new weights.
InFlight = Literal["abort", "wait", "keep"]


@runtime_checkable
class UpdatableEngine(Engine, Protocol):
    """An engine whose weights can be replaced while it serves."""

    @property
    def weight_version(self) -> str:
        """The version of the weights in use, as `WeightSpan.version` names it."""
        ...

    async def update_weights(self, weights: Any, version: str, *, in_flight: InFlight = "abort") -> None:
        """Replace the weights; `generate` labels tokens with `version` from then on.

        `weights` is what the engine takes: a checkpoint directory, a mapping from names to tensors. No call of
        `generate` ends because of the update: a completion that was cut off continues, and has spans of both versions.

        Raises `WeightUpdateError`, or another `EngineError`, if the weights in use are not those that were passed; the
        text says which are. Raises `ArgumentError` for arguments of other types.
        """
        ...


def is_chat(engine: object) -> TypeGuard[ChatEngine]:
    """Whether an engine has the members of `ChatEngine`, also by `__getattr__` from an engine that it wraps."""
    return has_members(engine, ChatEngine)


def is_streaming(engine: object) -> TypeGuard[StreamingEngine]:
    """Whether an engine has the members of `StreamingEngine`, also by `__getattr__` from an engine that it wraps."""
    return has_members(engine, StreamingEngine)


def is_abortable(engine: object) -> TypeGuard[AbortableEngine]:
    """Whether an engine has the members of `AbortableEngine`, also by `__getattr__` from an engine that it wraps."""
    return has_members(engine, AbortableEngine)


def is_updatable(engine: object) -> TypeGuard[UpdatableEngine]:
    """Whether an engine has the members of `UpdatableEngine`, also by `__getattr__` from an engine that it wraps."""
    return has_members(engine, UpdatableEngine)


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


_INTEGERS: Final = (int, np.integer)
_LISTS: Final = (list, tuple)


def check_result(request: GenerateRequest, result: GenerateResult, *, vocab_size: int | None = None) -> None:
    """Raise unless the result holds n completions with valid ids, each with one valid log-probability.

    The result has the id of the request, and no completion has more than `max_tokens` tokens. Token ids are integers
    from 0, below `vocab_size` where it is given. Log-probabilities are finite and at most 0 (but for rounding); values
    at or below -9999 are refused too: some servers write that number for a missing one. Those of a prompt, where the
    request asks for them, are NaN for its first token and may be anything on the tokens of media. Where it asks for the
    likeliest tokens, each place has as many of them, in descending order.
    Raises `MalformedResultError`, `MissingLogProbsError`.
    """
    name = request.request_id
    if result.request_id != name:
        raise MalformedResultError(name, f"the engine returned the result of request {short_repr(result.request_id)}")
    if len(result.completions) != request.sampling.n:
        raise MalformedResultError(
            name, f"the engine returned {len(result.completions)} completions, the request has n={request.sampling.n}"
        )
    for completion in result.completions:
        _check_completion(name, completion, request.sampling.max_tokens, vocab_size)
    if request.prompt_logprobs:
        _check_prompt_logprobs(request, result)
    if request.sampling.top_logprobs or request.prompt_top_logprobs:
        _check_top_logprobs(request, result, vocab_size)
    if len(result.completions) == 1 and result.completions[0].index == 0:
        return
    indices = sorted([completion.index for completion in result.completions])
    if indices != list(range(request.sampling.n)):
        raise MalformedResultError(
            name,
            f"the completions have indices {short_repr(indices)}; they must run from 0 to {request.sampling.n - 1}",
        )


def _check_completion(name: str, completion: Completion, max_tokens: int, vocab_size: int | None) -> None:
    if (error := token_ids_error(completion.token_ids, vocab_size) or ending_error(completion)) is not None:
        raise MalformedResultError(name, f"{_which(completion)}: {error}")
    count = len(completion.token_ids)
    if count > max_tokens:
        text = f"{_which(completion)} holds {count} tokens; the request has max_tokens={max_tokens}"
        raise MalformedResultError(name, text)
    if (error := logprobs_error(completion.logprobs, count)) is not None:
        raise MissingLogProbsError(name, f"{_which(completion)}: {error}")
    if not count and completion.finish_reason is not FinishReason.ABORT:
        raise MalformedResultError(name, f"{_which(completion)} holds no token")


def _check_prompt_logprobs(request: GenerateRequest, result: GenerateResult) -> None:
    name, logprobs, count = request.request_id, result.prompt_logprobs, len(request.prompt_ids)
    if logprobs is None:
        if _is_aborted(result):
            return
        raise MissingLogProbsError(name, "the engine returned no log-probabilities of the prompt; use one that does")
    if isinstance(logprobs, np.ndarray) and logprobs.shape == (count,) and logprobs.dtype.kind == "f":
        if count and not np.isnan(logprobs[0]):
            text = f"prompt: the first token has log-probability {logprobs[0]}, and nothing predicts it; it must be NaN"
            raise MalformedResultError(name, text)
        logprobs = logprobs.copy()
        logprobs[:1] = 0
        for _, placeholder in request.media:  # some models never predict such a token
            logprobs[placeholder.offset : placeholder.end] = 0
    if (error := logprobs_error(logprobs, count)) is not None:
        raise MissingLogProbsError(name, f"prompt: {error}")


def _is_aborted(result: GenerateResult) -> bool:
    return all(completion.finish_reason is FinishReason.ABORT for completion in result.completions)


def _check_top_logprobs(request: GenerateRequest, result: GenerateResult, vocab_size: int | None) -> None:
    for completion in result.completions:
        count = len(completion.token_ids)
        # A completion that was aborted before its first token may have none.
        if request.sampling.top_logprobs and (count or completion.top_logprobs is not None):
            error = top_logprobs_error(completion.top_logprobs, count, request.sampling.top_logprobs, vocab_size)
            if error is not None:
                raise MissingLogProbsError(request.request_id, f"{_which(completion)}: {error}")
    top = result.prompt_top_logprobs
    if request.prompt_top_logprobs and not (top is None and _is_aborted(result)):
        error = top_logprobs_error(top, len(request.prompt_ids), request.prompt_top_logprobs, vocab_size, unpredicted=1)
        if error is not None:
            raise MissingLogProbsError(request.request_id, f"prompt: {error}")


def top_logprobs_error(
    top: object, count: int, k: int | None, vocab_size: int | None = None, *, unpredicted: int = 0
) -> str | None:
    """The likeliest tokens in the places of `count` tokens are a `TopLogprobs` of valid rows, the likeliest first.

    `k`: how many there are in each place; None: any number. The first `unpredicted` rows are without a prediction.
    """
    if not isinstance(top, TopLogprobs):
        wanted = "the likeliest" if k is None else f"the {k} likeliest"
        given = "none" if top is None else f"a {type(top).__name__}"
        return f"{wanted} tokens in the place of each are requested, and {given} reported; use an engine that has them"
    ids, logprobs = top
    for what, rows, kinds in (("ids", ids, "iu"), ("log-probabilities", logprobs, "f")):
        if not isinstance(rows, np.ndarray) or rows.dtype.kind not in kinds or rows.ndim != 2:
            described = f"{rows.dtype} {rows.shape}" if isinstance(rows, np.ndarray) else _type_name(rows)
            return f"the {what} of the likeliest tokens are {described}, not numbers (tokens, k)"
    columns = ids.shape[1] if k is None else k
    if ids.shape != logprobs.shape or ids.shape != (count, columns):
        return (
            f"the likeliest tokens are ids {ids.shape} and log-probabilities {logprobs.shape}; {count} tokens with "
            f"{columns} each need ({count}, {columns}) of both"
        )
    first, ids, logprobs = ids[:unpredicted], ids[unpredicted:], logprobs[unpredicted:]
    if (first != NO_TOKEN).any():
        return f"the likeliest tokens in the place of the first one are {first[0].tolist()}; nothing predicts it"
    error = token_ids_error(ids.ravel(), vocab_size) or logprobs_error(logprobs.ravel(), ids.size)
    if error is not None:
        return f"of {columns} likeliest tokens a place: {error}"
    if (wrong := (logprobs[:, 1:] > logprobs[:, :-1]).any(axis=1)).any():
        return f"the likeliest tokens in place {int(wrong.argmax()) + unpredicted} are not in descending order"
    return None


def _which(completion: Completion) -> str:
    return f"completion {quoted(completion.index)}"


def ending_error(completion: Completion) -> str | None:
    """The text of an error in `finish_reason`, `stop_token_id` or `weight_spans`; None where they are valid."""
    if not isinstance(completion.finish_reason, FinishReason):
        reasons = ", ".join(f"FinishReason.{reason.name}" for reason in FinishReason)
        return f"finish_reason is {short_repr(completion.finish_reason)}; pass one of {reasons}"
    if completion.stop_token_id is not None and not isinstance(completion.stop_token_id, _INTEGERS):
        return f"stop_token_id is {short_repr(completion.stop_token_id)}, not a token id or None"
    return weight_span_error(completion.weight_spans, len(completion.token_ids))


def weight_span_error(spans: object, count: int) -> str | None:
    """Check that spans are ascending ranges within `count` sampled tokens; a sentence about the first wrong one."""
    if not isinstance(spans, _LISTS):
        return "weight_spans are not WeightSpans; pass a tuple of them"
    previous_end: int | np.integer = 0
    for span in spans:
        if not isinstance(span, WeightSpan):
            return "weight_spans are not WeightSpans; pass a tuple of them"
        if not isinstance(span.version, str):
            return f"a weight span has the version {quoted(span.version)}, not a text"
        if not isinstance(span.start, _INTEGERS) or not isinstance(span.end, _INTEGERS):
            return f"weight span {quoted(span.start)}:{quoted(span.end)} has no integers for its range"
        if not previous_end <= span.start <= span.end <= count:
            return (
                f"weight span {quoted(span.start)}:{quoted(span.end)} does not begin at {previous_end} or later within "
                f"{count} sampled tokens"
            )
        previous_end = span.end
    return None


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Upper bounds, checked before anything is reserved for a request: for `n`, `max_tokens` and `top_logprobs` of
    `SamplingParams`, the last one also for `GenerateRequest.prompt_top_logprobs`."""

    n: int = 1024
    max_tokens: int = 2**20
    top_logprobs: int = 1024

    def __post_init__(self) -> None:
        for name, least in (("n", 1), ("max_tokens", 1), ("top_logprobs", 0)):
            rule = f"pass an integer of at least {least}" + (": a smaller limit admits no request" if least else "")
            check_integer(f"EngineLimits.{name}", getattr(self, name), least=least, rule=rule)

    def check(self, request: GenerateRequest) -> None:
        """Raise `InvalidRequestError`, naming the field, for a request that exceeds a bound."""
        sampling = request.sampling
        for name, value, limited in (
            ("n", sampling.n, "n"),
            ("max_tokens", sampling.max_tokens, "max_tokens"),
            ("top_logprobs", sampling.top_logprobs, "top_logprobs"),
            ("prompt_top_logprobs", request.prompt_top_logprobs, "top_logprobs"),
        ):
            if value > (limit := getattr(self, limited)):
                raise InvalidRequestError(
                    request.request_id,
                    f"{name} is {short_repr(value)} and this engine takes at most {limit}. Use a smaller one, or give "
                    f"the engine other EngineLimits({limited}=...)",
                )


def check_streamable(request: GenerateRequest) -> None:
    """Raise `InvalidRequestError` for a request that a stream cannot answer."""
    if request.scores_prompt:
        name = "prompt_logprobs" if request.prompt_logprobs else "prompt_top_logprobs"
        raise InvalidRequestError(request.request_id, f"a stream cannot return {name}; use generate")


def check_prompt(request: GenerateRequest, max_length: int, vocab_size: int | None) -> np.ndarray:
    """The prompt as int64 (tokens,). `max_length` bounds prompt and completion; `vocab_size` None: any id from 0.

    Raises `OverlongPromptError` and `InvalidRequestError`.
    """
    name, prompt = request.request_id, request.prompt_ids
    if not len(prompt):
        raise InvalidRequestError(name, "the prompt is empty")
    if len(prompt) >= max_length:
        raise OverlongPromptError(name, len(prompt), max_length)
    if isinstance(prompt, np.ndarray):
        ids = prompt.astype(np.int64, copy=False)
    else:
        ids = np.frombuffer(array("q", prompt), dtype=np.int64)  # twice as fast as numpy with a list
    limit = 2**63 - 1 if vocab_size is None else vocab_size
    if ids.min() < 0 or ids.max() >= limit:
        position = int(np.argmax((ids < 0) | (ids >= limit)))
        size = "" if vocab_size is None else f" of {vocab_size}"
        raise InvalidRequestError(
            name, f"token {position} of the prompt is {ids[position]}, which is not in the vocabulary{size}"
        )
    return ids
