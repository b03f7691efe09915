"""`generate`: messages in, one completion of a vLLM server out, sent with an OpenAI-style client of the caller.

Programs that have a client of their own (verifiers, prime-rl) use it in place of `rollouts.VLLMEngine`. The
client is any object with `base_url`, `post(url, cast_to=, body=, options=)` and `get(path, cast_to=)`, such
as `AsyncOpenAI`; `post` returns the body of the response as bytes, or an object with it as `content`.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

from renderers.errors import MalformedGenerateResponseError, OverlongPromptError, short_repr
from renderers.messages import MEDIA_PART_TYPES, check_messages, media_parts, media_value
from renderers.protocol import Messages, Renderer, Tools
from renderers.rendered import MultiModalData, RenderedTokens

__all__ = ["MalformedGenerateResponseError", "OverlongPromptError", "generate", "parse_generate_response"]

T = TypeVar("T")

#: vLLM's value of a log-probability that it does not have, and its lower bound.
_NO_LOGPROB = -9999.0

#: The field whose base64 may take megabytes.
_ROUTED_EXPERTS = b'"routed_experts":{"data":"'

# (base URL, model) -> the longest prompt that the server published; None where it published none.
_longest_prompts: dict[tuple[str, str], int | None] = {}


async def generate(
    *,
    client: Any,
    renderer: Renderer,
    messages: Messages,
    model: str,
    prompt_ids: Sequence[int] | None = None,
    multi_modal_data: MultiModalData | None = None,
    prompt_attribution: RenderedTokens | None = None,
    tools: Tools | None = None,
    sampling_params: Mapping[str, Any] | None = None,
    cache_salt: str | None = None,
    priority: int | None = None,
    extra_headers: Mapping[str, str] | None = None,
    max_prompt_len: int | None = None,
    process_multimodal: bool = True,
) -> dict[str, Any]:
    """Sample one completion at `/inference/v1/generate` and parse it.

    Without `prompt_ids`, `messages` are rendered. `sampling_params` are sent as they are, but
    `stop_token_ids` and `logprobs` are always set here. Media are sent as processed features; with
    `process_multimodal=False`, as the source files in `messages`, which the server processes. Either way
    the data of a medium are sent to a server once; later requests name it.

    The result has the keys request_id, usage, prompt_ids (those that the server ran), renderer_prompt_ids
    (one token for each medium; None unless source files were sent), mm_placeholders (of the server),
    completion_ids, completion_logprobs, content, reasoning_content, tool_calls, finish_reason ("tool_calls"
    for a stop with a valid call), reasoning_complete, routed_experts (its base64 is a view of the
    response), sampling_mask, multi_modal_data and prompt_attribution (the `RenderedTokens` of the prompt).

    Raises `OverlongPromptError` if the prompt is longer than `max_prompt_len`, which defaults to the limit
    that the server publishes; the server checks the length of a prompt with source files. Raises
    `MalformedGenerateResponseError` for a response without a usable log-probability for each token, the
    errors of rendering, and those of the client.
    """
    if tools and not getattr(renderer, "supports_tools", True):
        raise ValueError(f"the format of {type(renderer).__name__} has no tool calls; remove the tools")
    if not process_multimodal and not getattr(renderer, "supports_process_multimodal", False):
        raise NotImplementedError(f"{type(renderer).__name__} does not support process_multimodal=False")
    prompt = _Prompt(prompt_ids, multi_modal_data, prompt_attribution)
    if prompt_ids is None:
        prompt = await _rendered(renderer, messages, tools, process_multimodal)
    assert prompt.ids is not None
    if process_multimodal:
        limit = await _longest_prompt(client, model) if max_prompt_len is None else max_prompt_len
        if limit is not None and len(prompt.ids) > limit:
            raise OverlongPromptError(prompt_len=len(prompt.ids), max_prompt_len=limit)
    body: dict[str, Any] = {
        "model": model,
        "token_ids": list(prompt.ids),
        "sampling_params": {
            "skip_special_tokens": False,
            **(sampling_params or {}),
            "stop_token_ids": renderer.get_stop_token_ids(),
            "logprobs": 1,
        },
    }
    optional = {"cache_salt": cache_salt, "priority": priority}
    body |= {name: value for name, value in optional.items() if value is not None}
    base_url = str(client.base_url).rstrip("/").removesuffix("/v1")
    options = {"options": {"headers": dict(extra_headers)}} if extra_headers else {}

    async def post(fields: Mapping[str, Any]) -> bytes:
        # `bytes` is the one form that does not depend on whether the client is built on httpx or on httpx2.
        response = await client.post(
            f"{base_url}/inference/v1/generate", cast_to=bytes, body={**body, **fields}, **options
        )
        content: bytes = response if isinstance(response, bytes) else response.content
        return content

    sources = [] if process_multimodal else _sources(messages)
    if sources:
        content = await _client_media(client, base_url).post_sources(sources, post)
    elif process_multimodal and prompt.media is not None and not prompt.media.is_empty():
        content = await _client_media(client, base_url).post_features(prompt.ids, prompt.media, post)
    else:
        content = await post({})
    return _result(content, renderer, prompt, tools, expanded_by_server=bool(sources))


def parse_generate_response(raw: bytes) -> dict[str, Any]:
    """The JSON of a response; the base64 of `routed_experts`, megabytes, becomes a view of `raw`."""
    start = raw.find(_ROUTED_EXPERTS)
    if start < 0:
        payload: dict[str, Any] = json.loads(raw)
        return payload
    start += len(_ROUTED_EXPERTS)
    end = raw.index(b'"', start)
    payload = json.loads(raw[:start] + raw[end:])
    payload["choices"][0]["routed_experts"]["data"] = memoryview(raw)[start:end]
    return payload


async def _maybe_offload(renderer: Renderer, call: Callable[[], T]) -> T:
    """Run a call of a renderer on a thread, beside the event loop (verifiers 0.3 imports this)."""
    return await asyncio.to_thread(call)


class _Prompt(NamedTuple):
    ids: Sequence[int] | None
    media: MultiModalData | None
    attribution: RenderedTokens | None


async def _rendered(renderer: Renderer, messages: Messages, tools: Tools | None, process_multimodal: bool) -> _Prompt:
    # A renderer of another package need not accept the argument unless it supports it.
    options = {} if process_multimodal else {"process_multimodal": False}

    def render() -> RenderedTokens:
        return renderer.render(messages, tools=tools, add_generation_prompt=True, **options)

    has_media = any(True for message in check_messages(messages) for _ in media_parts(message))
    rendered = await asyncio.to_thread(render) if has_media else render()
    return _Prompt(rendered.token_ids, rendered.multi_modal_data, rendered)


async def _longest_prompt(client: Any, model: str) -> int | None:
    """The `max_model_len` of `/v1/models`; None if the server does not publish it.

    A response is remembered, 404 as well. A request that fails otherwise is made again for the next
    completion.
    """
    key = str(getattr(client, "base_url", "")), model
    if key in _longest_prompts:
        return _longest_prompts[key]
    get = getattr(client, "get", None)
    if get is None:
        return None
    try:
        listed = await get("/models", cast_to=dict[str, Any])
    except _client_errors() as error:
        if getattr(error, "status_code", None) != 404:
            return None
        listed = {}
    _longest_prompts[key] = length = _published_length(listed, model)
    return length


def _published_length(listed: Any, model: str) -> int | None:
    """The `max_model_len` of a model in a response of `/v1/models`; None in one of another form."""
    cards = listed.get("data") if isinstance(listed, Mapping) else None
    for card in cards if isinstance(cards, list) else ():
        if isinstance(card, Mapping) and card.get("id") == model:
            length = card.get("max_model_len")
            return length if type(length) is int and length > 0 else None
    return None


def _client_errors() -> tuple[type[Exception], ...]:
    """The errors of clients: of the connection, and the root of those of `openai`, where the caller has loaded it."""
    openai = sys.modules.get("openai")
    return (OSError,) if openai is None else (OSError, openai.OpenAIError)


def _client_media(client: Any, base_url: str) -> Any:
    return _client_media_of_engine()(base_url, getattr(client, "api_key", None))


@cache
def _client_media_of_engine() -> Any:
    # An entry point, because the knowledge of vLLM's features is in a package above this one.
    from importlib.metadata import entry_points  # takes as long to import as this module

    (entry_point,) = entry_points(group="renderers.client_media")
    return entry_point.load()


def _sources(messages: Messages) -> list[tuple[str, str]]:
    """(modality, URL) of every medium, in prompt order. Raises `ValueError` for one without a URL."""
    sources: list[tuple[str, str]] = []
    for index, message in enumerate(check_messages(messages)):
        for part_index, part in media_parts(message):
            url = media_value(part)
            if not isinstance(url, str) or not url:
                raise ValueError(
                    f"message {index}, part {part_index}: process_multimodal=False sends URLs, and this part has none"
                )
            sources.append((MEDIA_PART_TYPES[part["type"]], url))
    return sources


# From a response to a result.


def _result(
    content: bytes, renderer: Renderer, prompt: _Prompt, tools: Tools | None, *, expanded_by_server: bool
) -> dict[str, Any]:
    data = parse_generate_response(content)
    choice = (data.get("choices") or [{}])[0]
    completion_ids = list(choice.get("token_ids") or [])
    server_ids, placeholders = data.get("prompt_token_ids"), data.get("mm_placeholders")
    if expanded_by_server and not (isinstance(server_ids, list) and isinstance(placeholders, dict)):
        raise MalformedGenerateResponseError(
            "the response lacks prompt_token_ids or mm_placeholders, which a prompt with source files needs"
        )
    assert prompt.ids is not None
    prompt_ids = list(server_ids or prompt.ids)
    parsed = renderer.parse_response(completion_ids, prompt_ids=prompt_ids, tools=tools)
    finish_reason = choice.get("finish_reason")
    if finish_reason == "stop" and any(call.status.is_call for call in parsed.tool_calls):
        finish_reason = "tool_calls"
    return {
        "request_id": data.get("request_id") or "",
        "usage": data.get("usage"),
        "prompt_ids": prompt_ids,
        "renderer_prompt_ids": list(prompt.ids) if expanded_by_server else None,
        "mm_placeholders": placeholders if expanded_by_server else None,
        "completion_ids": completion_ids,
        "completion_logprobs": _completion_logprobs(choice, completion_ids),
        "content": parsed.content,
        "reasoning_content": parsed.reasoning_content,
        "tool_calls": parsed.tool_calls,
        "finish_reason": finish_reason,
        "reasoning_complete": parsed.reasoning_complete,
        "routed_experts": choice.get("routed_experts"),
        "sampling_mask": choice.get("sampling_mask"),
        "multi_modal_data": prompt.media,
        "prompt_attribution": prompt.attribution,
    }


def _completion_logprobs(choice: Mapping[str, Any], completion_ids: Sequence[int]) -> list[float]:
    """One finite log-probability per token, of exactly that token.

    vLLM up to 0.31 names a token `"token": "token_id:7"`, from 0.32 on `"token_id": 7`.
    """
    logprobs = choice.get("logprobs")
    entries = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    if not isinstance(entries, list) or len(entries) != len(completion_ids):
        found = f"{len(entries)} entries" if isinstance(entries, list) else "no list"
        raise MalformedGenerateResponseError(
            f"choice.logprobs.content has {found} for {len(completion_ids)} completion tokens"
        )
    named = enumerate(zip(entries, completion_ids, strict=True))
    return [_logprob(f"choice.logprobs.content[{index}]", entry, token_id) for index, (entry, token_id) in named]


def _logprob(place: str, entry: Any, token_id: int) -> float:
    entry = entry if isinstance(entry, Mapping) else {}
    name, value = entry.get("token_id", entry.get("token")), entry.get("logprob")
    if name not in (token_id, f"token_id:{token_id}"):
        raise MalformedGenerateResponseError(f"{place} is for the token {name!r}, not for 'token_id:{token_id}'")
    if not isinstance(value, float | int) or isinstance(value, bool) or not abs(value) < 1e30 or value == _NO_LOGPROB:
        raise MalformedGenerateResponseError(f"{place}.logprob is {short_repr(value)}, not a finite log-probability")
    return float(value)
