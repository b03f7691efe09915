"""A server with OpenAI's chat completions as a source of assistant messages, without token ids (extra `openai`)."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import uuid
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from renderers import ParsedResponse, ParsedToolCall
from renderers.errors import MediaError, MessageError
from renderers.media.policy import MediaPolicy
from renderers.media.reference import load_source
from renderers.media.store import MediaStore
from renderers.messages import VIDEO_PART_TYPES, check_messages, check_tools, media_parts
from renderers.parsing.literals import MAX_DEPTH, InvalidJsonError, is_deeper_than, parse_json
from renderers.parsing.response import ToolCallParseStatus as Status
from renderers.process.caches import ByteLRU
from rollouts.calls import call_on_thread
from rollouts.engines.event_loop import EngineLoop
from rollouts.engines.protocol import ChatAnswer, FinishReason, SamplingParams
from rollouts.engines.vllm.exchange import HttpResponse, excerpt, redacted, response_error
from rollouts.engines.vllm.source_files import image_file
from rollouts.errors import (
    ApiKeyError,
    ArgumentError,
    EngineClosedError,
    EngineError,
    GenerationInterruptedError,
    InvalidRequestError,
    MalformedResultError,
    MissingExtraError,
    OverlongPromptError,
    ServerError,
    ServerTimeoutError,
    ServerUnreachableError,
    is_unicode,
    short_repr,
)
from rollouts.values import check_choice, check_integer, check_positive

if TYPE_CHECKING:
    import openai

#: The field of a request that bounds the completion.
MaxTokensField = Literal["max_completion_tokens", "max_tokens"]

#: Fields that a request may leave out, with the value that means nothing.
_OMITTABLE: Final[Mapping[str, object]] = {"temperature": 1.0, "top_p": 1.0, "seed": None}

#: Fields that `SamplingParams.extra` cannot set, because arguments of their own do.
_OWN_FIELDS: Final = frozenset(
    ("model", "messages", "tools", "n", "stream", "max_tokens", "max_completion_tokens", *_OMITTABLE)
)

_FINISH_REASONS: Final = {
    "stop": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "function_call": FinishReason.STOP,
    "length": FinishReason.LENGTH,
}
#: A server ended the completion: vLLM, SGLang; DeepSeek.
_INTERRUPTED: Final = ("abort", "error", "insufficient_system_resource")

#: The one address that gets the key of OPENAI_API_KEY without being told to.
_OPENAI: Final = "https://api.openai.com/"

_RESPONSE_BYTES: Final = 64 * 2**20
_MAX_CONCURRENCY: Final = 1000  # connections of the SDK's client
_CONNECT_SECONDS: Final = 10.0
_DATA_URL_BYTES: Final = 256 * 2**20


class ChatEndpoint:
    """A model behind OpenAI's chat completions: OpenAI, vLLM, `rollouts serve`, and most other servers and providers.

        endpoint = ChatEndpoint("http://127.0.0.1:8000/v1", "Qwen/Qwen3-VL-8B-Instruct")
        answer = await endpoint.chat([{"role": "user", "content": "How many dots?"}], sampling=SamplingParams())

    A `ChatEngine`: it takes and returns messages, and the server has the chat template. Token ids and their
    log-probabilities are not available, so that nothing can be trained on its completions.

    - `base_url`: the part of the address before `/chat/completions`, such as "https://api.openai.com/v1".
    - `model`: the name of the model at the server.
    - `api_key`: the key; None: that of the environment variable `api_key_env`. If that is None, too, https://api.openai.com
      gets the key of OPENAI_API_KEY, and other servers get none. Redirects are not followed.
    - `concurrency`: the number of requests at a time, at most 1,000; others wait.
    - `timeout_seconds`: for a call with its retries, from the time at which it does not wait for others.
    - `max_retries`: failed connections and HTTP 408, 409, 429, 500 and above are tried again so often, after the time
      that a Retry-After header demands, else after 0.5 s, 1 s, 2 s... (the SDK of OpenAI, which sends the requests).
    - `max_tokens_field`: the name of the field for `SamplingParams.max_tokens`. vLLM and OpenAI take
      "max_completion_tokens"; some servers know only the older "max_tokens".
    - `omit`: fields among "temperature", "top_p" and "seed" that the model refuses whatever their value.
    - `policy` and `store`: which URLs and paths of images are read, and where they are kept. The server opens none:
      every image is sent as a data URL, JPEG files and usual PNG files unchanged, others as PNG.

    Proxies and certificates are those of the environment variables that httpx reads. An endpoint belongs to the event
    loop on which it is used first; after that is closed, another one may follow. Raises `ArgumentError`, and
    `MissingExtraError` without the SDK.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        api_key_env: str | None = None,
        concurrency: int = 64,
        timeout_seconds: float = 600.0,
        max_retries: int = 5,
        max_tokens_field: MaxTokensField = "max_completion_tokens",
        omit: Collection[str] = (),
        policy: MediaPolicy | None = None,
        store: MediaStore | None = None,
    ) -> None:
        try:
            import openai  # noqa: F401  here, because importing it in the first request would stop the event loop for a second
        except ImportError as error:
            raise MissingExtraError("ChatEndpoint", "openai", "the SDK of OpenAI") from error
        self.base_url = _checked_url(base_url)
        if not isinstance(model, str) or not model or not is_unicode(model):
            raise ArgumentError("model", model, "pass the name that the server has for the model")
        self.model = model
        self._api_key = _checked_key(api_key, api_key_env, self.base_url)
        self._concurrency = check_integer("concurrency", concurrency)
        if self._concurrency > _MAX_CONCURRENCY:
            raise ArgumentError("concurrency", concurrency, f"pass at most {_MAX_CONCURRENCY}")
        self._timeout_seconds = check_positive("timeout_seconds", timeout_seconds)
        self._max_retries = check_integer("max_retries", max_retries, least=0)
        check_choice("max_tokens_field", max_tokens_field, MaxTokensField)
        self._max_tokens_field = max_tokens_field
        if isinstance(omit, str) or not set(omit) <= _OMITTABLE.keys():
            raise ArgumentError("omit", omit, f"pass a collection of {', '.join(_OMITTABLE)}")
        self._omitted = frozenset(omit)
        self.media_policy = MediaPolicy() if policy is None else policy
        self._store = MediaStore() if store is None else store  # an empty store is falsy
        self._data_urls: ByteLRU[str, str] = ByteLRU(_DATA_URL_BYTES)
        self._loop = EngineLoop()
        self._open: _Open | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"ChatEndpoint({self.base_url!r}, {self.model!r})"

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling: SamplingParams,
        seed: int | None = None,
    ) -> ChatAnswer:
        """Sample the next assistant message of a conversation.

        `seed` replaces that of `sampling`. `sampling.extra` holds further fields of the request under the server's own
        names (`stop`, `reasoning_effort`; vLLM's `top_k`, `min_p`). What is not sent has the server's default: vLLM
        takes those of the model's generation_config.json. Where prompt and `max_tokens` together exceed the context,
        the completion ends with the context. A result of a call that is no call of the message before it, because it
        was malformed, is sent as a message of the user: servers refuse it otherwise.

        Raises `MessageError` and `MediaError`; `InvalidRequestError` for sampling options that the API does not have;
        `OverlongPromptError`; `ApiKeyError` (HTTP 401, 403); `ServerError` for other errors of the server, such as an
        image for a model without images (HTTP 400), with its message; `ServerUnreachableError`, `ServerTimeoutError`;
        `GenerationInterruptedError` and `MalformedResultError` for what it returned; `EngineClosedError`; `EngineError`
        for a completion that its content filter withheld, and on another loop.
        """
        request_id = uuid.uuid4().hex
        try:
            checked = check_messages(messages)
            body = self._options(request_id, sampling, seed)
            if tools:
                check_tools(tools)
                body["tools"] = _sent_tools(tools)
            self._check_open(request_id)
            if any(True for message in checked for _ in media_parts(message)):
                # Reading, decoding and encoding images takes longer than an event loop may stand still.
                body["messages"] = await call_on_thread(self._sent_messages, checked)
            else:
                body["messages"] = self._sent_messages(checked)
            content = await self._request(request_id, body)
            return self._answer(request_id, content, sampling, tools)
        except EngineError as error:
            error.server = self.base_url
            raise

    async def close(self) -> None:
        """Refuse further requests, end the running ones with `EngineClosedError`, close every connection.

        Raises `EngineError` on another loop.
        """
        self._enter("close")
        self._closed = True
        opened, self._open = self._open, None
        if opened is None:
            return
        for scope in list(opened.running):  # ended by moving their deadlines to now
            if not scope.expired():
                scope.reschedule(0.0)
        try:
            while opened.running:  # noqa: ASYNC110 a few rounds, until the ended calls have unwound
                await asyncio.sleep(0)
        finally:
            await opened.loop_end.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def _options(self, request_id: str, sampling: SamplingParams, seed: int | None) -> dict[str, Any]:
        """The fields of a request that do not depend on the messages. Raises `InvalidRequestError`."""
        for name, unset, cure in (
            ("n", 1, "call chat once for each completion"),
            ("stop_token_ids", (), 'the API takes stop strings, as extra={"stop": [...]}'),
            ("top_k", 0, 'OpenAI has no such option; for a server that has it, pass extra={"top_k": ...}'),
        ):
            if (value := getattr(sampling, name)) != unset:
                reason = f"SamplingParams.{name} is {short_repr(value)} for a chat endpoint; {cure}"
                raise InvalidRequestError(request_id, reason)
        if (own := _OWN_FIELDS.intersection(sampling.extra)) or not _is_json(sampling.extra):
            reason = f"sets {min(own)!r}; use the argument for it" if own else "cannot be written as JSON"
            raise InvalidRequestError(request_id, f"SamplingParams.extra {short_repr(dict(sampling.extra))} {reason}")
        values = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed if seed is None else seed,
        }
        for name in self._omitted:
            if values.pop(name) != _OMITTABLE[name] and name != "seed":
                raise InvalidRequestError(
                    request_id,
                    f"SamplingParams.{name} is {getattr(sampling, name)}, and this endpoint omits {name}; pass "
                    f"{_OMITTABLE[name]}, or an endpoint that does not omit it",
                )
        sent = {name: value for name, value in values.items() if value is not None}
        return {"model": self.model, self._max_tokens_field: sampling.max_tokens, **sent, **sampling.extra}

    def _sent_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Checked messages as OpenAI's API takes them. Raises `MessageError` and `MediaError`."""
        sent: list[dict[str, Any]] = []
        call_ids: set[str] = set()
        unanswerable: list[dict[str, Any]] = []  # results of malformed calls; they follow those of the other calls
        for index, message in enumerate(messages):
            one = self._sent_message(message, index)
            if message["role"] == "tool" and message.get("tool_call_id", "") not in call_ids:
                unanswerable.append({"role": "user", "content": one["content"]})
                continue
            if message["role"] != "tool":
                sent += unanswerable
                unanswerable = []
                call_ids = {call["id"] for call in one.get("tool_calls", ())}
            sent.append(one)
        return sent + unanswerable

    def _sent_message(self, message: Mapping[str, Any], index: int) -> dict[str, Any]:
        content = message.get("content", "")
        if isinstance(content, str):
            sent_content: Any = _text(content, index)
        else:
            sent_content = [self._sent_part(part, index, number) for number, part in enumerate(content)]
        sent = {"role": message["role"], "content": sent_content}
        for key in ("name", "tool_call_id", "reasoning_content"):
            if message.get(key):
                sent[key] = _text(message[key], index)
        calls = [_sent_call(call, index, number) for number, call in enumerate(message.get("tool_calls", ()))]
        return {**sent, "tool_calls": calls} if calls else sent

    def _sent_part(self, part: Mapping[str, Any], message_index: int, part_index: int) -> dict[str, Any]:
        if part["type"] == "text":
            return {"type": "text", "text": _text(part["text"], message_index, part_index)}
        if part["type"] in VIDEO_PART_TYPES:
            raise MessageError(
                "chat endpoints have no common form for videos; pass some of its frames as images",
                message_index=message_index,
                part_index=part_index,
            )
        try:
            source = load_source(part, self.media_policy, self._store)
            url = self._data_urls.get(source.digest)
            if url is None:
                url = b"".join(image_file(source, self.media_policy, jpeg_as_file=True).data_url()).decode()
                self._data_urls.put(source.digest, url, len(url))
        except MediaError as error:
            raise error.at(message_index, part_index) from error.__cause__
        given = part.get("image_url")
        detail = given.get("detail") if isinstance(given, Mapping) else part.get("detail")
        return {"type": "image_url", "image_url": {"url": url, **({"detail": detail} if detail else {})}}

    async def _request(self, request_id: str, body: Mapping[str, Any]) -> bytes:
        """The body of the response. A request that does not fit into the context is sent again without its limit."""
        opened = await self._opened(request_id)
        scope = asyncio.timeout(None)
        try:
            async with opened.slots, scope:
                self._check_open(request_id)
                scope.reschedule(asyncio.get_running_loop().time() + self._timeout_seconds)
                opened.running.add(scope)
                try:
                    return await self._sent(request_id, opened.client, body)
                except OverlongPromptError as error:
                    if (error.prompt_tokens or 0) >= (error.limit or math.inf):
                        raise
                # The rest of the context, which is less than the limit, is the default of vLLM and OpenAI.
                unlimited = {name: value for name, value in body.items() if name != self._max_tokens_field}
                return await self._sent(request_id, opened.client, unlimited)
        except TimeoutError:
            if not scope.expired():
                raise
            self._check_open(request_id)
            raise ServerTimeoutError(
                request_id,
                f"the chat completion was not over after {self._timeout_seconds:g} s. Raise timeout_seconds if such "
                "requests may take longer",
            ) from None
        finally:
            opened.running.discard(scope)

    async def _sent(self, request_id: str, client: openai.AsyncOpenAI, body: Mapping[str, Any]) -> bytes:
        import openai

        fields = dict(body)
        model, messages = fields.pop("model"), fields.pop("messages")
        try:
            response = await client.chat.completions.with_raw_response.create(
                model=model, messages=messages, extra_body=fields
            )
        except (openai.OpenAIError, MalformedResultError) as error:
            failed = self._error(request_id, error)
        else:
            return response.http_response.content
        # Outside of the handler: the SDK's exceptions, which refer to the key, are not kept with ours.
        raise failed

    def _answer(
        self, request_id: str, content: bytes, sampling: SamplingParams, tools: Sequence[Mapping[str, Any]] | None
    ) -> ChatAnswer:
        """The answer in the body of a response.

        Raises `GenerationInterruptedError`, `MalformedResultError`, and `EngineError` where a filter withheld it.
        """
        try:
            response = _Response.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "the body"
            shown = short_repr(self._without_key(excerpt(content)), 300)
            reason = f"this is no chat completion: {place}: {first['msg']}: {shown}"
            raise MalformedResultError(request_id, reason) from None
        (choice,) = response.choices
        if choice.finish_reason in _INTERRUPTED:
            raise GenerationInterruptedError(request_id, f"the server ended the completion: {choice.finish_reason!r}")
        if choice.finish_reason == "content_filter":
            raise EngineError(
                request_id,
                "the content filter of the server withheld the completion (finish_reason content_filter); change the "
                "messages, or leave the task out",
            )
        finish_reason = _FINISH_REASONS.get(choice.finish_reason)
        if finish_reason is None:
            known = ", ".join((*_FINISH_REASONS, *_INTERRUPTED, "content_filter"))
            raise MalformedResultError(
                request_id, f"finish_reason is {short_repr(choice.finish_reason)}; this client knows {known}"
            )
        usage = response.usage or _Usage(prompt_tokens=None, completion_tokens=None)
        if (usage.completion_tokens or 0) > sampling.max_tokens:
            (other,) = {*get_args(MaxTokensField)} - {self._max_tokens_field}
            raise MalformedResultError(
                request_id,
                f"the completion has {usage.completion_tokens} tokens, and {self._max_tokens_field} was "
                f"{sampling.max_tokens}: the server ignores that field. Try max_tokens_field={other!r}",
            )
        parsed = _parsed(choice.message, finish_reason, tools)
        return ChatAnswer(
            parsed.to_message(), parsed, finish_reason, usage.prompt_tokens, usage.completion_tokens, response.model
        )

    def _error(self, request_id: str, error: openai.OpenAIError | MalformedResultError) -> EngineError:
        """The error for an exception of the SDK, without the key."""
        import openai

        for each in (error, error.__cause__):  # some versions of the SDK wrap what its client raises
            if isinstance(each, MalformedResultError):
                return MalformedResultError(request_id, each.reason)
        if isinstance(error, openai.APITimeoutError):
            return ServerTimeoutError(request_id, f"no response within {self._timeout_seconds:g} s")
        if not isinstance(error, openai.APIStatusError):
            reason = self._without_key(redacted(str(error.__cause__ or error))) or type(error.__cause__).__name__
            return ServerUnreachableError(
                request_id, f"{self.base_url} failed: {reason}. Is the server running, and at this address?"
            )
        status, headers = error.status_code, error.response.headers
        body = self._without_key(error.response.content.decode("utf-8", "replace")).encode()
        if 300 <= status < 400:
            return ServerError(
                request_id,
                "the request was redirected; redirects are not followed. Give the server's own address as base_url",
                status=status,
                body=f"to {re.split('[?#]', redacted(headers.get('location', '')))[0] or 'an unknown address'}",
            )
        failed = response_error(request_id, HttpResponse(status, headers, body), "the chat completion")
        if status in (401, 403):
            return ApiKeyError(
                request_id,
                f"the server refuses the {'API key' if self._api_key else 'request without an API key'}: HTTP {status} "
                f"{failed.body}. Pass its key as api_key, or name the environment variable with the key (api_key_env)",
            )
        if (overflow := _overflow(status, error.code or error.type, failed.body)) is not None:
            return OverlongPromptError(request_id, overflow.prompt_tokens, overflow.limit, failed.body)
        if status in (404, 405) and not urlsplit(self.base_url).path:
            cure = f"the chat completion (most servers have their API below /v1: pass {self.base_url}/v1 as base_url)"
            return response_error(request_id, HttpResponse(status, headers, body), cure)
        return failed

    def _without_key(self, text: str) -> str:
        """The text without the key, and without keys of OpenAI of which some characters are replaced by stars."""
        return re.sub(r"\bsk-[\w*.-]{4,}", "...", text.replace(self._api_key, "...") if self._api_key else text)

    def _enter(self, request_id: str) -> None:
        if self._loop.enter(request_id):
            self._open = None  # that of a loop that was closed

    async def _opened(self, request_id: str) -> _Open:
        self._enter(request_id)
        if self._open is None:
            client = _sdk_client(self.base_url, self._api_key, self._timeout_seconds, self._max_retries)
            self._open = _Open(client, asyncio.Semaphore(self._concurrency), _closing(client), set())
            await anext(self._open.loop_end)
        return self._open

    def _check_open(self, request_id: str) -> None:
        if self._closed:
            raise EngineClosedError(request_id, "the endpoint is closed") from None


class _Open(NamedTuple):
    """What belongs to the event loop. `loop_end` closes the client: `asyncio.run` finishes all open generators."""

    client: openai.AsyncOpenAI
    slots: asyncio.Semaphore
    loop_end: AsyncGenerator[None, None]
    running: set[asyncio.Timeout]


async def _closing(client: openai.AsyncOpenAI) -> AsyncGenerator[None, None]:
    """Closes the client when the generator is closed."""
    try:
        yield
    finally:
        await client.close()


def _sdk_client(base_url: str, api_key: str, seconds: float, retries: int) -> openai.AsyncOpenAI:
    """A client that follows no redirects, sends the key or none, and reads at most `_RESPONSE_BYTES` of a response."""
    import openai

    class BoundedClient(openai.DefaultAsyncHttpxClient):
        async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
            request.headers.pop("Authorization", None)
            if api_key:
                request.headers["Authorization"] = f"Bearer {api_key}"
            response = await super().send(request, stream=True, **options)
            if stream:
                return response
            pieces, received = [], 0
            try:
                async for piece in response.aiter_bytes():
                    pieces.append(piece)
                    received += len(piece)
                    if received > _RESPONSE_BYTES:
                        raise MalformedResultError("response", f"the response is larger than {_RESPONSE_BYTES} bytes")
            finally:
                await response.aclose()
            headers = [item for item in response.headers.multi_items() if item[0].lower() != "content-encoding"]
            return type(response)(response.status_code, headers=headers, content=b"".join(pieces), request=request)

    timeout = openai.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS))
    return openai.AsyncOpenAI(
        base_url=base_url,
        api_key="-",  # not the key, and never sent: the SDK does not do without one
        timeout=timeout,
        max_retries=retries,
        http_client=BoundedClient(follow_redirects=False, timeout=timeout),
    )


def _checked_url(base_url: str) -> str:
    """The address without a slash at its end. Raises `ArgumentError`, whose text contains no credentials."""
    rule = 'pass the part of the address before /chat/completions, such as "http://127.0.0.1:8000/v1"'
    if not isinstance(base_url, str):
        raise ArgumentError("base_url", base_url, rule)
    shown = redacted(re.split("[?#]", base_url)[0])
    try:
        parts = urlsplit(base_url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # the port, or brackets
        is_valid = False
    if not is_valid or not re.fullmatch(r"[\x21-\x7e]+", base_url):
        raise ArgumentError("base_url", shown, rule)
    if parts.username is not None or parts.password is not None:
        raise ArgumentError("base_url", shown, "it has credentials; pass the key as api_key")
    if parts.query or parts.fragment or parts.path.rstrip("/").endswith("/chat/completions"):
        raise ArgumentError("base_url", shown, rule)
    return base_url.rstrip("/")


def _checked_key(api_key: str | None, api_key_env: str | None, base_url: str) -> str:
    """The key; empty for none. Raises `ArgumentError`, whose text contains no key."""
    name, key = "api_key", api_key
    if key is None and api_key_env is not None:
        name, key = "api_key_env", os.environ.get(api_key_env)
        if not key:  # the name is not repeated: it may be the key itself
            raise ArgumentError(name, "...", "the environment variable of this name is not set; put the key in it")
    elif key is None and base_url.startswith(_OPENAI):
        name, key = "OPENAI_API_KEY", os.environ.get("OPENAI_API_KEY")
    if not isinstance(key or "", str) or not re.fullmatch(r"[\x21-\x7e]*", key or ""):
        rule = "the key has spaces, line ends or other characters that no HTTP header can carry; strip it"
        raise ArgumentError(name, "...", rule)
    return key or ""


# Requests.


def _is_json(value: Any) -> bool:
    try:
        return is_unicode(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return False


def _text(text: str, message_index: int, part_index: int | None = None) -> str:
    if not is_unicode(text):
        reason = f"half of a surrogate pair in {short_repr(text)}, which no request can carry; remove it"
        raise MessageError(reason, message_index=message_index, part_index=part_index)
    return text


def _sent_call(call: Mapping[str, Any], message_index: int, number: int) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        if not _is_json(arguments):
            raise MessageError("arguments that cannot be written as JSON", message_index=message_index)
        arguments = json.dumps(arguments, ensure_ascii=False)
    sent = {"name": _text(function["name"], message_index), "arguments": _text(arguments, message_index)}
    return {"id": call.get("id") or f"call_{number}", "type": "function", "function": sent}


def _sent_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    sent = [dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in tools]
    for index, tool in enumerate(sent):
        if not _is_json(tool):
            raise MessageError(f"tools[{index}] cannot be written as JSON: {short_repr(tool)}")
    return sent


# Responses. Only what is read is checked: servers add fields of their own.


class _Read(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _Function(_Read):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _Call(_Read):
    id: str | None = None
    function: _Function | None = None


class _Message(_Read):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None
    function_call: _Function | None = None


class _Choice(_Read):
    message: _Message
    finish_reason: str


class _Usage(_Read):
    prompt_tokens: int | None = Field(None, ge=0)
    completion_tokens: int | None = Field(None, ge=0)


class _Response(_Read):
    choices: list[_Choice] = Field(min_length=1, max_length=1)
    model: str | None = None
    usage: _Usage | None = None


def _parsed(message: _Message, reason: FinishReason, tools: Sequence[Mapping[str, Any]] | None) -> ParsedResponse:
    offered = {tool.get("function", tool).get("name") for tool in tools or ()}
    calls = list(message.tool_calls or ())
    if message.function_call is not None:
        calls.append(_Call(function=message.function_call))
    # A refusal is what the model wrote; OpenAI puts it beside an empty content.
    content = message.content or message.refusal or ""
    reasoning = message.reasoning_content or message.reasoning or None
    stopped = reason is FinishReason.STOP
    return ParsedResponse(
        content,
        reasoning,
        [_parsed_call(call.id, call.function or _Function(), offered) for call in calls],
        reasoning_complete=stopped or not reasoning or bool(content or calls),
        stopped=stopped,
    )


def _parsed_call(call_id: str | None, function: _Function, offered: Collection[str | None]) -> ParsedToolCall:
    """A call with the status that the parsers of this project give; `raw` is its JSON."""
    name, given = function.name or None, function.arguments
    arguments: Any = given
    status = Status.OK if name in offered or not offered else Status.UNKNOWN_TOOL
    if name is None:
        status, arguments = Status.MISSING_NAME, None
    elif isinstance(given, str) and given.strip():
        try:
            arguments = parse_json(given)
        except InvalidJsonError:
            status = Status.INVALID_JSON
    elif not given:  # some servers send an empty text for a call without arguments
        arguments = {}
    if status.is_well_formed and (not isinstance(arguments, dict) or is_deeper_than(arguments, MAX_DEPTH)):
        status, arguments = Status.MALFORMED_STRUCTURE, None
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    raw = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {text}}}'
    return ParsedToolCall(raw, name, arguments, status=status, id=call_id or None)


# Whether a server refuses a request because it does not fit into the context, by its message.


class _Overflow(NamedTuple):
    """The length of the prompt and of the context in tokens, None where the message does not have them."""

    prompt_tokens: int | None
    limit: int | None


_OVERFLOW_CODES: Final = ("context_length_exceeded", "exceed_context_size_error")  # OpenAI and this project; llama.cpp
_OVERFLOW = re.compile(r"(?i)context (length|size|window)|leaves no room within the model|max_model_len=\d")
_LIMIT = re.compile(
    r"(?i)context length (?:is|of|\()\s*(?:only )?(\d+)|limit of (\d+)|within the model's (\d+)|size \((\d+)"
    r"|max_model_len=(\d+)"
)
#: "at least": vLLM has not counted the whole prompt.
_PROMPT = re.compile(
    r"(?i)(?<!at least )\b(\d+) input tokens|(\d+) in the messages|resulted in (\d+) tokens|prompt of (\d+) tokens"
    r"|(\d+) tokens from the input|input \((\d+) tokens"
)


def _overflow(status: int, code: str | None, message: str) -> _Overflow | None:
    if status != 400 or not (code in _OVERFLOW_CODES or _OVERFLOW.search(message)):
        return None

    def number(pattern: re.Pattern[str]) -> int | None:
        match = pattern.search(message)
        return None if match is None or match.lastindex is None else int(match[match.lastindex])

    return _Overflow(number(_PROMPT), number(_LIMIT))
