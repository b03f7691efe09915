"""Reads responses of `/inference/v1/generate`, whole or in chunks, into checked arrays."""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollouts.engines.completion_checks import logprobs_error
from rollouts.engines.protocol import Completion, FinishReason, TokenDelta, WeightSpan
from rollouts.engines.vllm.http.response import server_error
from rollouts.errors import MalformedResultError, MissingLogProbsError

_ROUTED_EXPERT_DTYPES = ("uint8", "uint16", "int32")


@dataclass(slots=True)
class _Choice:
    """The part of one sample that was received so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None
    weight_versions: list[Mapping[str, Any]] = field(default_factory=list)
    routed_experts: list[str] = field(default_factory=list)
    sampling_mask: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PromptExpansion:
    """A server's expansion of logical ids: the prompt that it ran, and (offset, length) of each item by modality."""

    prompt_ids: list[int]
    placeholders: Mapping[str, list[tuple[int, int]]]


class Generation:
    """Accumulates the samples of one request from a whole response, or from the chunks of a streamed one."""

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self.clear()

    def clear(self) -> None:
        """Remove everything that was received."""
        self._choices = [_Choice() for _ in range(self._count)]
        self._prompt_logprobs: Any = None
        self._prompt_ids: Any = None
        self._placeholders: Any = None

    def add_response(self, text: bytes) -> list[TokenDelta]:
        """Add a response or a chunk and return its tokens.

        Raises `MalformedResultError`, `MissingLogProbsError`, and `ServerError` for an error in a streamed response.
        """
        try:
            payload = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._malformed(f"the response is not JSON ({error}): {text[:200]!r}") from error
        if not isinstance(payload, dict):
            raise self._malformed(f"the response is {type(payload).__name__}, not an object")
        if isinstance(failure := payload.get("error"), dict):  # in a streamed response it follows HTTP 200
            status = failure["code"] if isinstance(failure.get("code"), int) else 500
            raise server_error(self._name, "the server stopped generating", status, str(failure.get("message"))[:500])
        try:
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
        try:
            given = [entry[str(token)]["logprob"] for entry, token in zip(entries[1:], prompt_ids[1:], strict=True)]
            values = np.array([0.0, *given], dtype=np.float32)
        except (KeyError, TypeError, ValueError) as error:
            raise MissingLogProbsError(
                self._name, f"no log-probability for each of {count} tokens: {error!r}"
            ) from error
        if (reason := logprobs_error(values, count)) is not None:
            raise MissingLogProbsError(self._name, f"prompt: {reason}")
        values[0] = np.nan
        return values

    def prompt_expansion(self) -> PromptExpansion:
        """The prompt that the server ran, requested by `return_token_ids`. Raises `MalformedResultError` if missing."""
        if self._prompt_ids is None:
            raise self._malformed("the response lacks `prompt_token_ids`, which are needed to check its expansion")
        try:
            ranges = {
                str(modality): [(int(each["offset"]), int(each["length"])) for each in placeholders]
                for modality, placeholders in (self._placeholders or {}).items()
            }
            return PromptExpansion([int(token) for token in self._prompt_ids], ranges)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._malformed(f"`mm_placeholders` cannot be read ({error!r})") from error

    def _extend(self, index: int, part: Mapping[str, Any]) -> TokenDelta:
        if not 0 <= index < len(self._choices):
            raise self._malformed(f"the response has choice {index}; {len(self._choices)} were requested")
        choice = self._choices[index]
        ids = part["token_ids"]
        content = (part.get("logprobs") or {}).get("content")
        if ids and content is None:
            raise MissingLogProbsError(self._name, f"choice {index} has tokens without log-probabilities")
        logprobs = self._logprobs(index, ids, content or [])
        choice.logprobs += logprobs
        choice.token_ids += ids
        choice.finish_reason = part.get("finish_reason") or choice.finish_reason
        choice.stop_reason = part.get("stop_reason", choice.stop_reason)
        choice.weight_versions += part.get("weight_versions") or []
        choice.sampling_mask += part.get("sampling_mask") or []
        if part.get("routed_experts"):
            choice.routed_experts.append(part["routed_experts"])
        return TokenDelta(index, self._int32(index, ids), np.array(logprobs, dtype=np.float32))

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
        if choice.finish_reason is None:
            raise self._malformed(f"choice {index} has no finish reason")
        try:
            reason = FinishReason(choice.finish_reason)
        except ValueError:
            raise self._malformed(f"choice {index} finished with {choice.finish_reason!r}") from None
        ids = self._int32(index, choice.token_ids)
        masks = choice.sampling_mask
        if masks and len(masks) != len(ids):
            raise self._malformed(f"choice {index} has {len(ids)} tokens and {len(masks)} sampling masks")
        return Completion(
            index=index,
            token_ids=ids,
            logprobs=np.array(choice.logprobs, dtype=np.float32),
            finish_reason=reason,
            stop_token_id=self._stop_token(reason, choice.stop_reason, choice.token_ids),
            weight_spans=self._weight_spans(index, choice.weight_versions, len(ids), fallback_version),
            routed_experts=self._experts(index, choice.routed_experts, prompt_tokens + len(ids) - 1),
            sampling_masks=tuple(self._int32(index, mask) for mask in masks) if masks else None,
        )

    def _stop_token(self, reason: FinishReason, stop: Any, ids: Sequence[int]) -> int | None:
        """The stop token, which is the last id; a server does not name it if it is the model's own end token."""
        if reason is not FinishReason.STOP or isinstance(stop, str):
            return None
        if not ids or (stop is not None and stop != ids[-1]):
            raise self._malformed(f"a completion that stopped at token {stop} does not end with it")
        return ids[-1]

    def _weight_spans(
        self, index: int, versions: Iterable[Mapping[str, Any]], count: int, fallback: str
    ) -> tuple[WeightSpan, ...]:
        try:
            spans = tuple(WeightSpan(str(v["version"]), int(v["start"]), int(v["end"])) for v in versions)
        except (KeyError, TypeError, ValueError) as error:
            raise self._malformed(f"choice {index}: weight versions cannot be read ({error!r})") from error
        if not spans:
            return (WeightSpan(fallback, 0, count),) if count else ()
        starts, ends = [*(span.start for span in spans), count], [0, *(span.end for span in spans)]
        if starts != ends:
            raise self._malformed(f"choice {index}: weight versions {spans} do not cover its {count} tokens")
        return tuple(span for span in spans if span.end > span.start)

    def _experts(self, index: int, encoded: Sequence[str], rows: int) -> np.ndarray | None:
        if not encoded:
            return None
        try:
            parts = [np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False) for text in encoded]
        except (binascii.Error, TypeError, ValueError, EOFError, OSError) as error:
            raise self._malformed(f"choice {index}: routed experts are not an .npy array ({error})") from error
        experts = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if experts.ndim != 3 or len(experts) != rows or experts.dtype.name not in _ROUTED_EXPERT_DTYPES:
            raise self._malformed(
                f"choice {index}: routed experts are {experts.dtype} {experts.shape}, not integers of shape "
                f"({rows}, layers, experts per token)"
            )
        return experts

    def _int32(self, index: int, ids: Sequence[int]) -> np.ndarray:
        try:
            array = np.asarray(ids)
        except ValueError as error:
            raise self._malformed(f"choice {index} has token ids that are not a flat list ({error})") from error
        if len(array) and (array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= 2**31):
            raise self._malformed(f"choice {index} has token ids that are not 32-bit integers of at least 0")
        return array.astype(np.int32)

    def _malformed(self, reason: str) -> MalformedResultError:
        return MalformedResultError(self._name, reason)
