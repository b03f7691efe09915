"""`/inference/v1/generate` and `/inference/v1/abort_requests`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from renderers import MultiModalData
from rollouts.engines.protocol import GenerateRequest, GenerateResult
from rollouts.serve.bodies import (
    END_OF_STREAM,
    event,
    read_model,
    read_object,
    streamed_response,
    unless_disconnected,
)
from rollouts.serve.errors import RequestError, error_fields, request_error
from rollouts.serve.generate_body import (
    GenerateBody,
    TokenStream,
    choice,
    delta,
    model_stops,
    prompt_fields,
    sampling_of,
    usage,
    whole_response,
)
from rollouts.serve.media import expand_sources, media_of_features
from rollouts.serve.served_model import check_length, check_tokens
from rollouts.serve.server_state import ServerState

#: What vLLM puts before the id of a request; an abort names the id with it.
REQUEST_ID_PREFIX = "generate-tokens-"

#: Values of a request beside its prompt: a bias for each token of a large vocabulary, allowed tokens, placeholders.
_OPTION_VALUES = 2**20


class _Prompt(NamedTuple):
    """A request for the engine, the media of its prompt, and the stop token that is not named as the stop reason."""

    request: GenerateRequest
    media: MultiModalData | None
    eos_id: int | None


class GenerationRoutes:
    """The routes that sample and that end requests."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self.routes = [
            Route("/inference/v1/generate", self._generate, methods=["POST"]),
            Route("/inference/v1/abort_requests", self._abort, methods=["POST"]),
        ]

    async def _generate(self, request: Request) -> Response:
        body = await read_model(request, GenerateBody, self._state.model.max_model_len + _OPTION_VALUES)
        adapter = await self._state.adapter_of(body.model)
        request_id = request.headers.get("x-request-id") or body.request_id or uuid.uuid4().hex
        session_id = request.headers.get("x-session-id")
        prompt = await asyncio.to_thread(self._prompt, body, f"{REQUEST_ID_PREFIX}{request_id}", session_id, adapter)
        if body.stream:
            if prompt.request.prompt_logprobs:
                raise RequestError(400, "prompt_logprobs are not available when stream=true.", param="prompt_logprobs")
            return await streamed_response(request, self._events(body, prompt))
        result = await unless_disconnected(request, self._state.engine.generate(prompt.request))
        content = whole_response(
            self._with_base_labels(result, adapter),
            prompt.request.prompt_ids,
            model=adapter or self._state.model.name,
            eos_id=prompt.eos_id,
            expanded=prompt.media,
            with_logprobs=body.sampling_params.get("logprobs") is not None,
            returns_prompt=bool(body.return_token_ids),
        )
        return JSONResponse(content)

    async def _abort(self, request: Request) -> Response:
        request_ids = (await read_object(request)).get("request_ids")
        if not isinstance(request_ids, list):
            raise RequestError(400, "Missing 'request_ids' in request body", kind="Bad Request")
        await self._state.engine.abort(map(str, request_ids))
        return Response()

    def _with_base_labels(self, result: GenerateResult, adapter: str | None) -> GenerateResult:
        """The result with the labels that vLLM gives tokens of an adapter."""
        if adapter is None:
            return result
        return replace(result, completions=self._state.adapters.base_labels(result.completions, adapter))

    def _prompt(self, body: GenerateBody, request_id: str, session_id: str | None, adapter: str | None) -> _Prompt:
        """The request for the engine. Raises `RequestError` and `InvalidRequestError`."""
        model = self._state.model
        prompt_ids, media = body.token_ids, None
        check_tokens(prompt_ids, model.vocab_size)
        if body.output_mode != "tokens":
            raise RequestError(400, "output_mode 'text' is not supported by this server; use 'tokens'")
        if body.content_parts:
            expanded = expand_sources(prompt_ids, body.content_parts, self._state.renderer, self._state.sources)
            prompt_ids, media = expanded
        elif body.features is not None:
            media = media_of_features(body.features, prompt_ids, model, self._state.media)
        check_length(prompt_ids, model.max_model_len)
        sampling = body.sampling_params
        request = GenerateRequest(
            prompt_ids,
            sampling_of(body, model, prompt_tokens=len(prompt_ids)),
            media,
            session_id=session_id,
            request_id=request_id,
            priority=body.priority,
            prompt_logprobs=sampling.get("prompt_logprobs") is not None,
            prompt_top_logprobs=sampling.get("prompt_logprobs") or 0,
            adapter=adapter,
        )
        eos_id = model.eos_id if model.eos_id in model_stops(sampling, model) else None
        return _Prompt(request, media, eos_id)

    async def _events(self, body: GenerateBody, prompt: _Prompt) -> AsyncIterator[bytes]:
        """The events of a streamed response. An error before the first one is raised; a later one is an event."""
        sampling, options = body.sampling_params, body.stream_options or {}
        with_logprobs = sampling.get("logprobs") is not None
        head = {"request_id": prompt.request.request_id, "usage": None, "output_mode": "tokens"}
        more = prompt_fields(prompt.request.prompt_ids, prompt.media, bool(body.return_token_ids))
        has_begun = False

        def chunk(choices: list[Mapping[str, Any]], **fields: Any) -> bytes:
            nonlocal more, has_begun
            content = {**head, **more, **fields, "choices": choices}
            more, has_begun = prompt_fields((), None, False), True
            return event(content)

        stream = TokenStream(self._state.engine, prompt.request)
        try:
            sent = dict.fromkeys(range(prompt.request.sampling.n), 0)
            async for new in stream.deltas(sampling.get("stream_interval") or 1):
                sent[new.index] += len(new.token_ids)
                yield chunk([delta(new, with_logprobs=with_logprobs)])
            result = self._with_base_labels(await stream.result(), prompt.request.adapter)
            for completion in result.completions:
                done = sent[completion.index]
                yield chunk([choice(completion, done, eos_id=prompt.eos_id, with_logprobs=with_logprobs)])
            if options.get("include_usage"):
                count = sum(len(each.token_ids) for each in result.completions)
                yield chunk([], usage=usage(len(prompt.request.prompt_ids), count))
        except Exception as error:
            if not has_begun:
                raise
            yield event(error_fields(request_error(error), openai=False))
        finally:
            stream.cancel()
        yield END_OF_STREAM
