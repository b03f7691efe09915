"""Bodies of requests to `/generate` and their responses."""

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from renderers import RenderedTokens
from rollouts.engines.http.exchange import Body, open_object
from rollouts.engines.http.responses import reading, reported_spans, server_error
from rollouts.engines.http.source_files import source_file
from rollouts.engines.protocol import (
    NO_TOKEN,
    Completion,
    FinishReason,
    GenerateRequest,
    TokenDelta,
    TokenListener,
    TopLogprobs,
)
from rollouts.engines.sglang.capabilities import SGLangCapabilities
from rollouts.engines.token_checks import float32_array, token_ids_error
from rollouts.errors import MalformedResultError, MissingLogProbsError, ServerError

_LOGPROBS, _TOP = "output_token_logprobs", "output_top_logprobs"
_MASKS = "output_token_sampling_mask"


def request_body(
    request: GenerateRequest,
    capabilities: SGLangCapabilities,
    *,
    experts: bool = False,
    jpeg_as_file: bool = False,
    stream: bool = False,
) -> Body:
    """The body for one sample, with source files. Raises `InvalidRequestError` and `MediaError`."""
    ids = request.prompt_ids if isinstance(request.prompt_ids, list) else np.asarray(request.prompt_ids).tolist()
    if request.media:  # one token for each image, which the server repeats
        markers = request.placeholder_token_ids
        rendered = RenderedTokens(ids, multi_modal_data=request.multi_modal_data, placeholder_token_ids=markers)
        ids = rendered.logical_ids
    fields: dict[str, Any] = {
        "rid": request.request_id,
        "sampling_params": _sampling(request, capabilities),
        "return_logprob": True,
        "logprob_start_len": 0 if request.scores_prompt else -1,
        "top_logprobs_num": max(request.sampling.top_logprobs, request.prompt_top_logprobs),
        # To notice a prompt that the server has tokenised again.
        "return_prompt_token_ids": bool(request.media),
        "input_ids": ids,
    }
    if stream:
        fields["stream"] = True
        if not capabilities.streams_new_tokens:
            # Most parts of a stream of a server that repeats in each part what the earlier ones had.
            fields["sampling_params"]["stream_interval"] = math.ceil(request.sampling.max_tokens / 128)
    if request.adapter is not None:
        fields["lora_path"] = request.adapter
    if experts and capabilities.routed_experts:
        fields["return_routed_experts"] = True
    # Fewer than the server reports: equal probabilities may keep more than `top_k`.
    if request.sampling.top_logprobs and 0 < request.sampling.top_k < capabilities.kept_ids:
        fields["return_sampling_mask"] = True
    opening = open_object(request.request_id, fields)
    if not request.media:
        return [opening, b"}"]
    segments: list[bytes | memoryview] = [opening, b',"image_data":[']
    for index, (item, _) in enumerate(request.media):
        file = source_file(item.source, item.modality, jpeg_as_file=jpeg_as_file)
        segments += [b',"' if index else b'"', *file.data_url(), b'"']
    return [*segments, b"]}"]


def _sampling(request: GenerateRequest, capabilities: SGLangCapabilities) -> dict[str, Any]:
    """Every sampling parameter, explicitly: a server fills missing ones with those of the model's files."""
    sampling = request.sampling
    fields: dict[str, Any] = {
        # A server refuses what does not fit into its context, where other engines end the completion by its
        # length.
        "max_new_tokens": min(sampling.max_tokens, capabilities.max_model_len - len(request.prompt_ids)),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(sampling.stop_token_ids),
        **sampling.extra,
    }
    if sampling.seed is not None and capabilities.deterministic:
        fields["sampling_seed"] = sampling.seed
    return fields


class Generation:
    """One sample as a server returned it, with the checks of what it holds."""

    def __init__(self, request: GenerateRequest, content: object) -> None:
        self._request = request
        self._name = request.request_id
        if not isinstance(content, dict) or not isinstance(content.get("meta_info"), dict):
            raise self._malformed(f"the response does not have SGLang's shape: {str(content)[:200]!r}")
        self._content = content
        self._meta: Mapping[str, Any] = content["meta_info"]

    def check_prompt(self) -> None:
        """Raise `MalformedResultError` unless the server ran the prompt of the request."""
        expected = self._request.prompt_ids
        count = self._meta.get("prompt_tokens")
        if not self._request.media:
            if count != len(expected):
                raise self._malformed(f"the server ran {count} tokens of a prompt of {len(expected)}")
            return
        ran = self._content.get("prompt_token_ids")
        if not isinstance(ran, list):
            raise self._malformed(
                "the response lacks `prompt_token_ids`, without which a prompt that was tokenised again is not noticed"
            )
        if ran == (expected if isinstance(expected, list) else list(expected)):
            return
        at = next((at for at, pair in enumerate(zip(ran, expected, strict=False)) if pair[0] != pair[1]), None)
        where = "" if at is None else f"; the first difference is token {at}, {ran[at]} and not {expected[at]}"
        raise self._malformed(
            f"the server ran a prompt of {len(ran)} tokens, the renderer made {len(expected)}{where}. Either "
            "it tokenised the prompt again, from text (start it with SGLANG_MM_AVOID_RETOKENIZE=1, and see "
            "docs/sglang.md for models that SGLang tokenises again always), or its processor makes another "
            "number of tokens of an image (load the renderer from the directory that the server serves)"
        )

    def delta(self) -> TokenDelta:
        """The tokens alone, read as `completion` reads them."""
        ids = self._ids()
        top = self._top(_TOP, len(ids), self._request.sampling.top_logprobs)
        return TokenDelta(0, ids, self._logprobs(ids), top)

    def completion(self, experts: tuple[int, int] | None = None) -> Completion:
        """The sample. `experts`: layers, and experts per token.

        Raises `MalformedResultError` and `MissingLogProbsError`.
        """
        ids = self._ids()
        if (told := self._meta.get("completion_tokens", len(ids))) != len(ids):
            raise self._malformed(f"the server counts {told!r:.40} completion_tokens, and there are {len(ids)}")
        reason, stop = self._ending(ids)
        return Completion(
            index=0,
            token_ids=ids,
            logprobs=self._logprobs(ids),
            finish_reason=reason,
            stop_token_id=stop,
            weight_spans=reported_spans(self._name, self._meta.get("weight_versions"), len(ids)) if len(ids) else (),
            routed_experts=self._experts(len(ids), experts),
            sampling_masks=self._masks(len(ids)),
            top_logprobs=self._top(_TOP, len(ids), self._request.sampling.top_logprobs),
        )

    def prompt_logprobs(self, vocab_size: int) -> np.ndarray:
        """float32 (prompt,), NaN for the first token. Raises `MissingLogProbsError`."""
        expected, entries = np.asarray(self._request.prompt_ids), self._meta.get("input_token_logprobs")
        failure = f"no log-probability for each of {len(expected)} tokens of the prompt"
        with reading(self._name, failure, MissingLogProbsError):
            values = float32_array([0.0, *(entry[0] for entry in entries[1:])])  # type: ignore[index]
            ids = _integers([entry[1] for entry in entries])  # type: ignore[union-attr]
            # The server names the last token of the vocabulary 0, and image tokens too.
            differs = (ids != expected) & ((ids != 0) | (expected != vocab_size - 1))
        for _, placeholder in self._request.media:
            differs[placeholder.offset : placeholder.end] = False
        if differs.any():
            at = int(differs.argmax())
            raise self._malformed(f"log-probability {at} of the prompt is of token {ids[at]}, not of {expected[at]}")
        values[0] = np.nan
        return values

    def prompt_top_logprobs(self) -> TopLogprobs | None:
        """The likeliest tokens in the place of each of the prompt, if requested. Raises `MissingLogProbsError`."""
        return self._top("input_top_logprobs", len(self._request.prompt_ids), self._request.prompt_top_logprobs)

    def _top(self, name: str, count: int, k: int) -> TopLogprobs | None:
        """The k likeliest of `count` rows. The server returns more where the other kind of row was asked for more."""
        if not k:
            return None
        rows = self._meta.get(name) or []
        with reading(self._name, f"`{name}` has not {k} tokens in each of {count} places", MissingLogProbsError):
            # The first token of a prompt has no row: nothing predicts it.
            entries = [[(math.nan, NO_TOKEN)] * k if row is None else [entry[:2] for entry in row[:k]] for row in rows]
            table = np.array(entries, np.float64).reshape(count, k, 2)
        return TopLogprobs(table[:, :, 1].astype(np.int32), float32_array(table[:, :, 0]))

    def _ids(self) -> np.ndarray:
        with reading(self._name, "`output_ids` cannot be read"):
            ids = _integers(self._content["output_ids"])
        if (error := token_ids_error(ids)) is not None:
            raise self._malformed(f"`output_ids` cannot be read: {error}")
        return ids.astype(np.int32)

    def _logprobs(self, ids: np.ndarray) -> np.ndarray:
        entries = self._meta.get(_LOGPROBS)
        if not isinstance(entries, list) or len(entries) != len(ids):
            count = len(entries) if isinstance(entries, list) else "no"
            raise MissingLogProbsError(self._name, f"the response has {len(ids)} tokens and {count} log-probabilities")
        with reading(self._name, "log-probabilities cannot be read", MissingLogProbsError):
            named = _integers([entry[1] for entry in entries])
            values = float32_array([entry[0] for entry in entries])
        if (wrong := named != ids).any():
            at = int(wrong.argmax())
            raise self._malformed(f"log-probability {at} is of token {named[at]}, not of token {ids[at]}")
        return values

    def _ending(self, ids: np.ndarray) -> tuple[FinishReason, int | None]:
        ending = self._meta.get("finish_reason")
        kind = ending.get("type") if isinstance(ending, dict) else None
        if not isinstance(ending, dict) or kind not in ("stop", "length", "abort"):
            raise self._malformed(f"the sample finished with {ending!r:.200}")
        if kind != "stop":
            return FinishReason(kind), None
        matched = ending.get("matched")
        if not len(ids) or (isinstance(matched, int) and matched != ids[-1]):
            raise self._malformed(f"a completion that stopped at token {matched!r:.50} does not end with it")
        return FinishReason.STOP, int(ids[-1])

    def _masks(self, count: int) -> tuple[np.ndarray, ...] | None:
        """The ids that each of `count` tokens was sampled from, where they were requested."""
        if not (rows := self._meta.get(_MASKS)):
            return None
        with reading(self._name, f"`{_MASKS}` has not the ids of each of {count} tokens"):
            return tuple(_integers(row).astype(np.int32) for _, row in zip(range(count), rows, strict=True))

    def _experts(self, count: int, shape: tuple[int, int] | None) -> np.ndarray | None:
        """int32 (prompt + count - 1, layers, experts per token)."""
        encoded = self._meta.get("routed_experts")
        if encoded is None or shape is None:
            return None
        rows = len(self._request.prompt_ids) + count - 1
        failure = f"routed experts are not those of {rows} tokens in {shape[0]} layers with {shape[1]} experts each"
        with reading(self._name, f"{failure}; check routed_experts of SGLangEngine"):
            flat = np.frombuffer(base64.b64decode(encoded, validate=True), np.dtype("<i4"))
            return flat.reshape(rows, *shape)

    def _malformed(self, reason: str) -> MalformedResultError:
        return MalformedResultError(self._name, reason)


def _integers(values: list[Any]) -> np.ndarray:
    """int64. Raises `ValueError` for what numpy would change into integers: 1.5, "2"."""
    array = np.array(values) if len(values) else np.empty(0, np.int64)
    if array.dtype.kind != "i":
        raise ValueError(f"of type {array.dtype}")
    return array


class Parts:
    """Joins the parts of a streamed sample, and tells a listener of the tokens of each.

    Each part of SGLang has all tokens so far, or with --incremental-streaming-output the new ones alone;
    `completion_tokens` counts all of them in both cases.
    """

    def __init__(self, request: GenerateRequest, listen: TokenListener) -> None:
        self._request = request
        self._listen = listen
        self._last: Mapping[str, Any] | None = None
        keys = (_LOGPROBS, _TOP, _MASKS) if request.sampling.top_logprobs else (_LOGPROBS,)
        self._rows: dict[str, list[Any]] = {key: [] for key in keys}

    def add(self, event: bytes) -> None:
        """Add a part.

        Raises `MalformedResultError`, `MissingLogProbsError`, and `ServerError` for an error that follows
        HTTP 200.
        """
        try:
            content = json.loads(event)
        except (ValueError, RecursionError) as error:
            raise self._malformed(f"a part of the stream is not JSON ({error}): {event[:200]!r}") from error
        if isinstance(content, dict) and isinstance(failure := content.get("error"), dict):
            raise self._refusal(failure.get("code"), failure)
        part, meta = Generation(self._request, content), content["meta_info"]
        ending = meta.get("finish_reason")
        if isinstance(ending, dict) and ending.get("status_code") is not None:
            raise self._refusal(ending["status_code"], ending)
        if self._last is None:
            part.check_prompt()
        total = meta.get("completion_tokens")
        new = {key: self._new(meta, key, total) for key in self._rows if key != _MASKS or key in meta}
        self._last = content
        for key, rows in new.items():
            self._rows[key] += rows
        if count := len(new[_LOGPROBS]):
            ids = content.get("output_ids")
            ids = ids[-count:] if isinstance(ids, list) else ids
            self._listen(Generation(self._request, {"output_ids": ids, "meta_info": new}).delta())

    def generation(self) -> Generation | None:
        """The sample, which an abort has ended if the server has not; None if no part arrived."""
        if self._last is None:
            return None
        meta = self._last["meta_info"]
        ending = meta.get("finish_reason") or {"type": "abort"}
        ids = [entry[1] for entry in self._rows[_LOGPROBS]]
        meta = {**meta, **self._rows, "finish_reason": ending}
        return Generation(self._request, {"output_ids": ids, "meta_info": meta})

    def finished(self) -> Generation:
        """The sample, after the end of the stream. Raises `MalformedResultError` where that came before its own end."""
        generation = self.generation()
        if self._last is None or generation is None or self._last["meta_info"].get("finish_reason") is None:
            received = len(self._rows[_LOGPROBS])
            raise self._malformed(f"the stream ended after {received} tokens without a finish_reason")
        return generation

    def _new(self, meta: Mapping[str, Any], key: str, total: object) -> list[Any]:
        """The rows of the tokens that no earlier part had."""
        received, rows = len(self._rows[_LOGPROBS]), meta.get(key)
        if not isinstance(rows, list) or not isinstance(total, int):
            raise MissingLogProbsError(self._request.request_id, f"a part of the stream lacks `{key}` or its length")
        new = rows[received:total] if len(rows) >= total else rows
        if len(new) != total - received:
            raise self._malformed(f"a part of the stream has {len(rows)} `{key}` after {received} of {total} tokens")
        return new

    def _refusal(self, status: object, content: Mapping[str, Any]) -> ServerError:
        status = status if isinstance(status, int) else 500
        message = str(content.get("message"))[:500]
        return server_error(self._request.request_id, "the server stopped generating", status, message)

    def _malformed(self, reason: str) -> MalformedResultError:
        return MalformedResultError(self._request.request_id, reason)
