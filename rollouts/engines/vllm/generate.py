"""Bodies of requests to generate, and their responses."""

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rollouts.engines.http.exchange import Body, open_object
from rollouts.engines.http.responses import reading, reported_spans, server_error
from rollouts.engines.kept_ids import LEFT_OUT
from rollouts.engines.protocol import Completion, FinishReason, GenerateRequest, TokenDelta, TopLogprobs
from rollouts.engines.token_checks import MISSING_LOGPROB, float32_array
from rollouts.errors import MalformedResultError, MissingLogProbsError

#: How a response is sent: whole (None), the first token and then the rest ("first"), or token by token
#: ("each").
Chunks = Literal["first", "each"] | None


def request_body(
    request: GenerateRequest,
    prompt_ids: Sequence[int],
    media: Body,
    *,
    model: str,
    cache_salt: str,
    chunks: Chunks,
    return_prompt: bool,
    cuts_likeliest: bool = False,
) -> Body:
    """The body of a request. `media` is `MediaPayload.body_field`: one member of the object, or empty.

    `cuts_likeliest`: the server puts the sampled token before the likeliest ones and cuts the list, up to
    vLLM 0.32.

    Raises `InvalidRequestError` for sampling options that JSON cannot represent.
    """
    fields: dict[str, Any] = {
        "request_id": request.request_id,
        "model": model,
        "sampling_params": _sampling(request, chunks, cuts_likeliest),
        "stream": chunks is not None,
        "return_token_ids": return_prompt,
        "cache_salt": cache_salt,
        # JSON takes no integers of numpy.
        "token_ids": prompt_ids if isinstance(prompt_ids, list) else np.asarray(prompt_ids).tolist(),
    }
    opening = open_object(request.request_id, fields)
    return [opening, b",", *media, b"}"] if media else [opening, b"}"]


def _sampling(request: GenerateRequest, chunks: Chunks, cuts_likeliest: bool) -> Mapping[str, Any]:
    """Every sampling parameter, explicitly: a server fills missing ones with its own defaults."""
    sampling = request.sampling
    # One more than the likeliest leaves them all in a list that is cut.
    cut = 1 if cuts_likeliest and sampling.top_logprobs else 0
    fields: dict[str, Any] = {
        "n": sampling.n,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": sampling.top_logprobs + cut,  # 0: of the sampled token only
        "detokenize": False,
        **sampling.extra,
    }
    if request.scores_prompt:
        fields["prompt_logprobs"] = request.prompt_top_logprobs  # 0: of the tokens of the prompt only
    if chunks == "first":
        # Tokens in a chunk, so many that a streamed response has two chunks: the first token, which shows
        # that the prompt and its media have reached the engine, and all other tokens.
        fields["stream_interval"] = 1_000_000
    return fields


@dataclass(slots=True)
class _Choice:
    """The part of one sample that was received so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None
    weight_versions: list[Mapping[str, Any]] = field(default_factory=list)
    routed_experts: list[str] = field(default_factory=list)
    sampling_mask: list[list[int]] = field(default_factory=list)


class Generation:
    """Accumulates the samples of one request, from a response or its chunks; `top` likeliest tokens."""

    def __init__(self, name: str, count: int, *, top: int = 0) -> None:
        self._name = name
        self._count = count
        self._top = top
        self.clear()

    def clear(self) -> None:
        """Remove everything that was received."""
        self._choices = [_Choice() for _ in range(self._count)]
        self._usage: Mapping[str, Any] = {}
        self._prompt_logprobs: Any = None
        self._prompt_ids: Any = None
        self._placeholders: Any = None

    def add_response(self, text: bytes) -> list[TokenDelta]:
        """Add a response or a chunk and return its tokens.

        Raises `MalformedResultError`, `MissingLogProbsError`, and `ServerError` for an error in a streamed
        response.
        """
        try:
            payload = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._malformed(f"the response is not JSON ({error}): {text[:200]!r}") from error
        try:
            if isinstance(failure := payload.get("error"), dict):  # in a streamed response it follows HTTP 200
                status = failure["code"] if isinstance(failure.get("code"), int) else 500
                message = str(failure.get("message"))[:500]
                raise server_error(self._name, "the server stopped generating", status, message)
            self._usage = payload.get("usage") or self._usage
            if payload.get("prompt_logprobs") is not None:
                self._prompt_logprobs = payload["prompt_logprobs"]
            if payload.get("prompt_token_ids") is not None:
                self._prompt_ids = payload["prompt_token_ids"]
            if payload.get("mm_placeholders") is not None:
                self._placeholders = payload["mm_placeholders"]
            return [self._extend(part["index"], part) for part in payload["choices"]]
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise self._malformed(f"the response does not have vLLM's shape ({error!r}): {text[:200]!r}") from error

    @property
    def has_tokens(self) -> bool:
        """Whether a token was received."""
        return any(choice.token_ids for choice in self._choices)

    def end_by_abort(self) -> None:
        """End the samples that have not ended: they have the tokens that were received, and were aborted."""
        for choice in self._choices:
            if choice.finish_reason is None:
                choice.finish_reason = FinishReason.ABORT
                choice.routed_experts = []  # those of a part of the tokens

    def completions(self, prompt_tokens: int, fallback_version: str) -> list[Completion]:
        """The samples by index, checked. `fallback_version` labels tokens without a weight version of the server."""
        sampled = sum(len(choice.token_ids) for choice in self._choices)
        for name, count in (("prompt_tokens", prompt_tokens), ("completion_tokens", sampled)):
            if self._usage.get(name, count) not in (None, count):
                raise self._malformed(f"the server counts {self._usage[name]!r:.40} {name}, and there are {count}")
        return [
            self._completion(index, choice, prompt_tokens, fallback_version)
            for index, choice in enumerate(self._choices)
        ]

    def has_prompt_logprobs(self, prompt_tokens: int) -> bool:
        """Whether log-probabilities of the whole prompt were received; an aborted response may lack them."""
        return isinstance(self._prompt_logprobs, list) and len(self._prompt_logprobs) == prompt_tokens

    def prompt_logprobs(self, prompt_ids: Sequence[int]) -> np.ndarray:
        """float32 (prompt,), NaN for the first token. Raises `MissingLogProbsError`."""
        entries, count = self._prompt_logprobs, len(prompt_ids)
        with reading(self._name, f"no log-probability for each of {count} tokens", MissingLogProbsError):
            given = [entry[str(token)]["logprob"] for entry, token in zip(entries[1:], prompt_ids[1:], strict=True)]
            values = float32_array([0.0, *given])
        values[0] = np.nan
        return values

    def prompt_top_logprobs(self, prompt_tokens: int, k: int) -> TopLogprobs:
        """The k likeliest tokens in the place of each, the first row without any. Raises `MissingLogProbsError`."""
        if not self.has_prompt_logprobs(prompt_tokens):
            raise MissingLogProbsError(self._name, f"the response has no likeliest tokens for {prompt_tokens} tokens")
        failure = f"the {k} likeliest tokens in the place of each of the prompt cannot be read"
        with reading(self._name, failure, MissingLogProbsError):
            rows = [
                [(entry["rank"], token, entry["logprob"]) for token, entry in entries.items()]
                for entries in self._prompt_logprobs[1:]
            ]
        return TopLogprobs.joined([TopLogprobs.unpredicted(1, k), self._likeliest(rows, k, "the prompt")])

    def _likeliest(self, rows: Sequence[Sequence[tuple[Any, Any, Any]]], k: int, what: str) -> TopLogprobs:
        """The k likeliest of each row of (rank or None, id, log-probability), which are k or more in any order.

        A server counts ranks from 1. The tokens beside the k likeliest, as the sampled one, have a larger
        rank or None. Where no token has a rank, a row needs one token beside them, which shows that none of
        the likeliest is missing.
        """
        lengths = {len(row) for row in rows}
        if rows and min(lengths) < k:
            text = f"{what}: a token has {min(lengths)} alternatives, and the {k} likeliest are requested"
            raise MissingLogProbsError(self._name, f"{text}; ask for as many as the vocabulary and the server have")
        failure = f"{what}: the {k} likeliest tokens in the place of each cannot be read"
        with reading(self._name, failure, MissingLogProbsError):
            ordered = [sorted(row, key=_order)[:k] for row in rows]
            flat = [entry for row in ordered for entry in row]
            ids = self._int32(what, [int(token) for _, token, _ in flat]).reshape(-1, k)
            values = float32_array([value for _, _, value in flat]).reshape(-1, k)
            values[values <= MISSING_LOGPROB] = LEFT_OUT
            ranks = np.array([np.nan if rank is None else rank for rank, _, _ in flat], np.float64).reshape(-1, k)
        are_known = not np.isnan(ranks).all()
        if (are_known and (ranks != np.arange(1, k + 1)).any()) or (rows and not are_known and min(lengths) == k):
            raise MissingLogProbsError(
                self._name,
                f"{what}: the response lacks one of the {k} likeliest tokens, whose place the sampled one took",
            )
        return TopLogprobs(ids, values)

    def prompt_expansion(self) -> tuple[list[int], Mapping[str, list[tuple[int, int]]]]:
        """The prompt that the server ran, and (offset, length) of each item by modality, in that prompt.

        Requested by `return_token_ids`. Raises `MalformedResultError` where it is missing.
        """
        if self._prompt_ids is None:
            raise self._malformed("the response lacks `prompt_token_ids`, which are needed to check its expansion")
        with reading(self._name, "`mm_placeholders` cannot be read"):
            ranges = {
                str(modality): [(int(each["offset"]), int(each["length"])) for each in placeholders]
                for modality, placeholders in (self._placeholders or {}).items()
            }
            return [int(token) for token in self._prompt_ids], ranges

    def _extend(self, index: int, part: Mapping[str, Any]) -> TokenDelta:
        if not 0 <= index < len(self._choices):
            raise self._malformed(f"the response has choice {index}; {len(self._choices)} were requested")
        choice = self._choices[index]
        ids = part["token_ids"]
        content = (part.get("logprobs") or {}).get("content") or []
        logprobs = self._logprobs(index, ids, content)
        top = None
        if self._top:
            # Without ids and ranks up to vLLM 0.31, as in `_logprobs`.
            rows = [
                [
                    (entry.get("rank"), entry["token_id"], entry["logprob"])
                    if "token_id" in entry
                    else (None, entry["token"].removeprefix("token_id:"), entry["logprob"])
                    for entry in token["top_logprobs"]
                ]
                for token in content
            ]
            top = self._likeliest(rows, self._top, f"choice {index}")
        # Everything is read before anything is added: an error leaves columns of one length.
        choice.logprobs += logprobs
        choice.top += [] if top is None else [top]
        choice.token_ids += ids
        choice.finish_reason = part.get("finish_reason") or choice.finish_reason
        choice.stop_reason = part.get("stop_reason", choice.stop_reason)
        choice.weight_versions += part.get("weight_versions") or []
        choice.sampling_mask += part.get("sampling_mask") or []
        if part.get("routed_experts"):
            choice.routed_experts.append(part["routed_experts"])
        return TokenDelta(index, self._int32(f"choice {index}", ids), float32_array(logprobs), top)

    def _logprobs(self, index: int, ids: Sequence[int], content: Sequence[Mapping[str, Any]]) -> list[float]:
        """The log-probabilities of new tokens, from either of the two shapes that servers use."""
        if len(content) != len(ids):
            raise MissingLogProbsError(
                self._name, f"choice {index} has {len(ids)} tokens and {len(content)} log-probabilities"
            )
        if content and "token_id" in content[0]:
            logprob_ids = [entry["token_id"] for entry in content]
        else:  # up to vLLM 0.31: the shape of chat completions, with "token_id:N" for the text
            logprob_ids = [int(entry["token"].removeprefix("token_id:")) for entry in content]
        if logprob_ids != list(ids):
            at, (wrong, right) = next(
                (at, pair) for at, pair in enumerate(zip(logprob_ids, ids, strict=True)) if pair[0] != pair[1]
            )
            raise self._malformed(f"choice {index}: log-probability {at} is of token {wrong}, not of token {right}")
        values = [entry["logprob"] for entry in content]
        if None in values:
            raise MissingLogProbsError(self._name, f"choice {index}: token {values.index(None)} has none")
        return [float(value) for value in values]

    def _completion(self, index: int, choice: _Choice, prompt_tokens: int, fallback_version: str) -> Completion:
        try:
            reason = FinishReason(choice.finish_reason or "")
        except ValueError:
            raise self._malformed(f"choice {index} finished with {choice.finish_reason!r}") from None
        ids = self._int32(f"choice {index}", choice.token_ids)
        unreported = [{"version": fallback_version, "start": 0, "end": len(ids)}]
        masks = choice.sampling_mask
        if masks and len(masks) != len(ids):
            raise self._malformed(f"choice {index} has {len(ids)} tokens and {len(masks)} sampling masks")
        return Completion(
            index=index,
            token_ids=ids,
            logprobs=float32_array(choice.logprobs),
            finish_reason=reason,
            stop_token_id=self._stop_token(reason, choice.stop_reason, choice.token_ids),
            weight_spans=reported_spans(self._name, choice.weight_versions or unreported, len(ids)),
            routed_experts=self._experts(index, choice.routed_experts, prompt_tokens + len(ids) - 1),
            sampling_masks=tuple(self._int32(f"choice {index}", mask) for mask in masks) if masks else None,
            top_logprobs=TopLogprobs.joined(choice.top) if choice.top else None,
        )

    def _stop_token(self, reason: FinishReason, stop: Any, ids: Sequence[int]) -> int | None:
        """The stop token, which is the last id; a server does not name it if it is the model's own end token."""
        if reason is not FinishReason.STOP or isinstance(stop, str):
            return None
        if not ids or (stop is not None and stop != ids[-1]):
            raise self._malformed(f"a completion that stopped at token {stop} does not end with it")
        return ids[-1]

    def _experts(self, index: int, encoded: Sequence[str], rows: int) -> np.ndarray | None:
        if not encoded:
            return None
        with reading(self._name, f"choice {index}: routed experts are not an .npy array"):
            # A pickle of a server would run its code here.
            parts = [np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False) for text in encoded]
        experts = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if experts.ndim != 3 or len(experts) != rows or experts.dtype.name not in ("uint8", "uint16", "int32"):
            raise self._malformed(
                f"choice {index}: routed experts are {experts.dtype} {experts.shape}, not integers of shape "
                f"({rows}, layers, experts per token)"
            )
        return experts

    def _int32(self, what: str, ids: Sequence[int]) -> np.ndarray:
        with reading(self._name, f"{what} has token ids that are not a flat list"):
            array = np.asarray(ids)
        if len(array) and (array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= 2**31):
            raise self._malformed(f"{what} has token ids that are not 32-bit integers of at least 0")
        return array.astype(np.int32)

    def _malformed(self, reason: str) -> MalformedResultError:
        return MalformedResultError(self._name, reason)


def _order(entry: tuple[Any, Any, Any]) -> tuple[float, float]:
    """Sorts tokens by their ranks, those without one last and by their log-probabilities."""
    rank, _, logprob = entry
    return (math.inf if rank is None else rank, -logprob)
