"""The endpoint of `FakeVLLM` that generates: refusals, completions whole and as a stream."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Sequence
from typing import ClassVar

from fake_http import Json, Response, Seen, error_response, json_response
from fake_model import completion_of, logprob_of, prompt_logprobs

GENERATE = "/inference/v1/generate"
EOS = 387  # of the tiny Qwen3-VL
VOCABULARY = 16384


async def first_of(*events: asyncio.Event) -> None:
    """Wait for any of the events."""
    if any(event.is_set() for event in events):
        return
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _refused_by_rust(body: Json) -> Response | None:
    """What the Rust frontend refuses and vLLM's own does not, or in other words."""
    parts = body.get("content_parts", [])
    wrong = None
    if not isinstance(parts, list):
        wrong = f"content_parts: invalid type: integer `{parts}`, expected a sequence at line 1 column 33"
    elif any(part.get("url") is None for part in parts):
        wrong = "content_parts[0]: invalid type: null, expected a string at line 1 column 544"
    if wrong is not None:
        message = f"Failed to deserialize the JSON body into the target type: {wrong}"
        return error_response(400, message, "Bad Request")
    if (body.get("sampling_params") or {}).get("n", 1) > 1:
        return error_response(400, "Only n=1 is supported.", "BadRequestError", "n")
    return None


class Generation:
    """Generates for a `FakeVLLM`, whose attributes it uses."""

    ROUTES: ClassVar = {GENERATE: ("POST", "_generate")}

    async def _generate(self, seen: Seen) -> Response:
        if (refused := self._refused(seen.json)) is not None:
            return refused
        if self.paused:
            if not self.queue_while_paused:
                return error_response(503, "The engine is paused", "ServiceUnavailableError")
            await first_of(self._running, seen.aborted)
            if seen.aborted.is_set():
                return self.generated(seen, cut=0)
        if not self._take_images(seen.json):
            return error_response(500, "Internal server error", "InternalServerError")
        return self.generated(seen)

    def _refused(self, body: Json) -> Response | None:
        """The errors that a client can provoke without killing anything."""
        ids, sampling = body.get("token_ids"), body.get("sampling_params")
        if self.rust_frontend is not None and (refused := _refused_by_rust(body)) is not None:
            return refused
        if not ids or sampling is None:
            wrong = {
                "token_ids": not ids,
                "sampling_params": sampling is None,
                "content_parts": not isinstance(body.get("content_parts"), list | None),
            }
            lines = [f"  {{'type': 'x', 'loc': 'body.{name}', ...}}" for name, is_wrong in wrong.items() if is_wrong]
            message = "\n".join([f"{len(lines)} validation errors:", *lines])
            return error_response(400, message, "Bad Request", "body.token_ids")
        if body.get("model") not in (None, self.model):
            message = f"The model `{body['model']}` does not exist. Valid aliases: {self.model}."
            return error_response(404, message, "NotFoundError", "model")
        if not all(0 <= each < VOCABULARY for each in ids):
            return error_response(400, f"Token id {max(ids)} is out of vocabulary", "BadRequestError")
        if sampling.get("max_tokens", 1) < 1:
            return error_response(400, "max_tokens must be at least 1, got 0.", "BadRequestError", "max_tokens")
        if len(ids) >= self.max_model_len:
            message = f"The decoder prompt (length {len(ids)}) is longer than the maximum model length of"
            return error_response(400, f"{message} {self.max_model_len}.", "BadRequestError")
        return None

    def _take_images(self, body: Json) -> bool:
        """Keep the images that came with data; whether every other one is already here."""
        features = (self.rust_frontend is None and body.get("features")) or {}
        for modality, hashes in (features.get("mm_hashes") or {}).items():
            data = (features.get("kwargs_data") or {}).get(modality) or [None] * len(hashes)
            for mm_hash, item in zip(hashes, data, strict=True):
                if item is not None:
                    self.cached.setdefault(mm_hash, item)
                elif mm_hash not in self.cached:
                    return False
                while self.cache_images is not None and len(self.cached) > self.cache_images:
                    self.cached.pop(next(iter(self.cached)))
        return True

    def generated(self, seen: Seen, *, cut: int | None = None) -> Response:
        """The answer of `/inference/v1/generate`, whole or as a stream; `cut` tokens of it if it was aborted."""
        body = seen.json
        sampling, prompt = body["sampling_params"], body["token_ids"]
        count = min(sampling.get("max_tokens", self.max_model_len), self.max_model_len - len(prompt))
        stops = {EOS, *(sampling.get("stop_token_ids") or ())}
        choices = []
        for index in range(sampling.get("n") or 1):
            ids = completion_of(prompt, count, index, stops)
            stopped = bool(ids) and ids[-1] in stops
            reason = "stop" if stopped else "length"
            if cut is not None:
                ids, stopped, reason = ids[:cut], False, "abort"
            choices.append(
                {
                    "index": index,
                    "finish_reason": reason,
                    "stop_reason": ids[-1] if stopped and ids[-1] != EOS else None,
                    "token_ids": ids,
                    "routed_experts": None,
                    "sampling_mask": None,
                    "weight_versions": [{"version": self.weight_version, "start": 0, "end": len(ids)}],
                    "logprobs": None if sampling.get("logprobs") is None else self._logprobs(ids),
                }
            )
        if body.get("stream"):
            return self._streamed(seen, choices)
        return json_response(
            {
                "request_id": seen.request_id,
                "model": self.model,
                "prompt_logprobs": None if sampling.get("prompt_logprobs") is None else prompt_logprobs(prompt),
                "prompt_token_ids": prompt if body.get("return_token_ids") else None,
                "mm_placeholders": None,
                "choices": choices,
            }
        )

    def _logprobs(self, ids: Sequence[int]) -> Json:
        if self._chat_shape:
            return {
                "content": [
                    {"token": f"token_id:{each}", "logprob": logprob_of(each), "bytes": None, "top_logprobs": []}
                    for each in ids
                ]
            }
        entries = [{"token_id": each, "logprob": logprob_of(each), "rank": 1} for each in ids]
        return {"content": [entry | {"top_logprobs": [entry]} for entry in entries]}

    @property
    def _chat_shape(self) -> bool:
        return tuple(map(int, self.version.split(".")[:2])) < (0, 32)

    def _streamed(self, seen: Seen, choices: list[Json]) -> Response:
        """The first token of each choice in a chunk of its own, then the rest: vLLM with a large stream_interval."""
        chunks: list[bytes | asyncio.Event] = []
        for part in (slice(0, 1), slice(1, None)):
            for choice in choices:
                ids = choice["token_ids"][part]
                last = part.stop is None or len(choice["token_ids"]) <= 1
                if not ids and not (last and part.stop is None and not choice["token_ids"]):
                    continue
                delta = copy.deepcopy(choice) | {"token_ids": ids}
                if delta["logprobs"] is not None:
                    delta["logprobs"]["content"] = delta["logprobs"]["content"][part]
                if not last:
                    delta |= {"finish_reason": None, "stop_reason": None, "weight_versions": None}
                event = {"request_id": seen.request_id, "choices": [delta]}
                chunks.append(b"data: " + json.dumps(event).encode() + b"\n\n")
        chunks.append(b"data: [DONE]\n\n")
        return Response(headers={"content-type": "text/event-stream; charset=utf-8"}, chunks=chunks)
