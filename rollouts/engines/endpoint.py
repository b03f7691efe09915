"""A server with OpenAI's chat completions as a source of assistant messages, without token ids (extra `openai`)."""

from __future__ import annotations

import asyncio
import math
import os
import re
import uuid
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

from renderers.errors import MissingExtraError
from renderers.media.policy import MediaPolicy
from renderers.media.reference import load_source
from renderers.media.store import MediaStore
from renderers.messages import AUDIO_PART_TYPES, check_messages, check_tools, media_parts
from renderers.process.caches import ByteLRU
from rollouts.calls import call_on_thread, in_tiny_pieces
from rollouts.engines.chat_completions import is_json, overflow_in, read_answer, sent_messages, sent_tools, wav_or_mp3
from rollouts.engines.event_loop import EngineLoop, expire
from rollouts.engines.http.address import key_remover, redacted
from rollouts.engines.http.responses import HttpResponse, response_error
from rollouts.engines.http.source_files import image_file
from rollouts.engines.protocol import ChatAnswer, ChatEngine, SamplingParams
from rollouts.errors import (
    ApiKeyError,
    ArgumentError,
    ContextLengthError,
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    MalformedResultError,
    ServerError,
    ServerTimeoutError,
    ServerUnreachableError,
    short_repr,
)
from rollouts.values import check_choice, check_integer, check_positive

if TYPE_CHECKING:
    import openai

#: The field of a request that bounds the completion.
MaxTokensField = Literal["max_completion_tokens", "max_tokens"]

#: Where images of the results of calls are sent.
ToolImages = Literal["tool", "user"]

#: Fields that a request may leave out, with the value that means nothing.
_OMITTABLE: Final[Mapping[str, object]] = {"temperature": 1.0, "top_p": 1.0, "seed": None}

#: Fields that `SamplingParams.extra` cannot set, because arguments of their own do.
OWN_FIELDS: Final = frozenset(
    ("model", "messages", "tools", "n", "stream", "max_tokens", "max_completion_tokens", *_OMITTABLE)
)

#: The one address that gets the key of OPENAI_API_KEY without being told to.
_OPENAI: Final = "https://api.openai.com/"

_RESPONSE_BYTES: Final = 64 * 2**20
_DATA_URL_BYTES: Final = 256 * 2**20  # of images and sounds that the next turns send again
_MAX_CONCURRENCY: Final = 1000  # connections of the SDK's client


class ChatEndpoint(ChatEngine):
    """A model behind OpenAI's chat completions: OpenAI, vLLM, `rollouts serve`, and most other servers and providers.

        endpoint = ChatEndpoint("http://127.0.0.1:8000/v1", "Qwen/Qwen3-VL-8B-Instruct")
        answer = await endpoint.chat([{"role": "user", "content": "How many dots?"}], sampling=SamplingParams())

    A `ChatEngine`: it takes and returns messages, and the server has the chat template. Without `return_token_ids`
    nothing can be trained on its completions.

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
    - `tool_images`: where images and sounds of the results of calls are sent: in the results ("tool", as vLLM takes
      them), or in a message of the user after them ("user", for servers that take no media elsewhere). None: "user" for
      https://api.openai.com, and "tool" for others.
    - `return_token_ids`: request the ids of prompt and completion and their log-probabilities, which vLLM and the
      gateway of this project return beside the message (`ChatAnswer.tokens`). Messages with media are refused then:
      the features of their placeholders are not returned, and training without them would be on another prompt.
    - `policy` and `store`: which URLs and paths of media are read, and where they are kept. The server opens none:
      every image is sent as a data URL, JPEG files and usual PNG files unchanged, others as PNG; every sound in
      base64, WAV and MP3 files unchanged, others as WAV.

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
        tool_images: ToolImages | None = None,
        return_token_ids: bool = False,
        policy: MediaPolicy | None = None,
        store: MediaStore | None = None,
    ) -> None:
        try:
            import openai  # noqa: F401  here, because importing it in the first request would stop the event loop for a second
        except ImportError as error:
            raise MissingExtraError("ChatEndpoint", "openai", "the SDK of OpenAI") from error
        self.base_url = _checked_url(base_url)
        self.model = model
        self._api_key = _checked_key(api_key, api_key_env, self.base_url)
        self._without_key = key_remover(self._api_key)
        self._concurrency = check_integer("concurrency", concurrency)
        if self._concurrency > _MAX_CONCURRENCY:
            raise ArgumentError("concurrency", concurrency, f"pass at most {_MAX_CONCURRENCY}")
        self._timeout_seconds = check_positive("timeout_seconds", timeout_seconds)
        self._max_retries = check_integer("max_retries", max_retries, least=0)
        check_choice("max_tokens_field", max_tokens_field, MaxTokensField)
        self._max_tokens_field = max_tokens_field
        if not set(omit) <= _OMITTABLE.keys():
            raise ArgumentError("omit", omit, f"pass a collection of {', '.join(_OMITTABLE)}")
        self._omitted = frozenset(omit)
        if tool_images is not None:
            check_choice("tool_images", tool_images, ToolImages)
        of_openai = self.base_url.startswith(_OPENAI)
        self._tool_images: ToolImages = tool_images or ("user" if of_openai else "tool")
        self._returns_tokens = return_token_ids
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
        `ContextLengthError`; `ApiKeyError` (HTTP 401, 403); `ServerError` for other errors of the server, such as an
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
                body["tools"] = sent_tools(tools)
            self._check_open(request_id)
            if any(True for message in checked for _ in media_parts(message)):
                if self._returns_tokens:
                    raise InvalidRequestError(
                        request_id,
                        "messages with media, and return_token_ids is set: the server returns no features of the "
                        "media. Sample with VLLMEngine, or leave return_token_ids out",
                    )
                # Reading, decoding and encoding media takes longer than an event loop may stand still.
                body["messages"] = await call_on_thread(sent_messages, checked, self._data_url, self._tool_images)
            else:
                body["messages"] = sent_messages(checked, self._data_url, self._tool_images)
            content = await self._request(request_id, body)
            answer = read_answer(request_id, content, tools, with_tokens=self._returns_tokens)
            if (answer.completion_tokens or 0) > sampling.max_tokens:
                (other,) = {*get_args(MaxTokensField)} - {self._max_tokens_field}
                raise MalformedResultError(
                    request_id,
                    f"the completion has {answer.completion_tokens} tokens, and {self._max_tokens_field} was "
                    f"{sampling.max_tokens}: the server ignores that field. Try max_tokens_field={other!r}",
                )
            return answer
        except EngineError as error:
            error.redact(self._without_key)
            error.server = self.base_url
            raise

    async def check(self) -> None:
        """Ask for the list of models, which every such server has, to find a wrong address or key before a run.

        An answer that is no list is no error: the chat completions may be there nevertheless. Raises
        `ServerUnreachableError`, `ServerTimeoutError`, `ApiKeyError` and `EngineClosedError`.
        """
        import openai

        request_id = uuid.uuid4().hex
        self._check_open(request_id)
        opened = await self._opened(request_id)
        client = opened.client.with_options(max_retries=1, timeout=min(self._timeout_seconds, 10.0))
        try:
            await client.models.with_raw_response.list()
            return
        except (openai.OpenAIError, MalformedResultError) as error:
            failed = self._error(request_id, error)
        if isinstance(failed, ServerUnreachableError | ServerTimeoutError | ApiKeyError):
            failed.redact(self._without_key)
            failed.server = self.base_url
            raise failed

    async def close(self) -> None:
        """Refuse further requests, end the running ones with `EngineClosedError`, close every connection.

        Raises `EngineError` on another loop.
        """
        self._enter("close")
        self._closed = True
        opened, self._open = self._open, None
        if opened is None:
            return
        expire(opened.running)
        try:
            while opened.running:  # noqa: ASYNC110 a few rounds, until the ended calls have unwound
                await asyncio.sleep(0)
        finally:
            await opened.loop_end.aclose()

    def _options(self, request_id: str, sampling: SamplingParams, seed: int | None) -> dict[str, Any]:
        """The fields of a request that do not depend on the messages. Raises `InvalidRequestError`."""
        for name, unset, cure in (
            ("n", 1, "call chat once for each completion"),
            ("stop_token_ids", (), 'the API takes stop strings, as extra={"stop": [...]}'),
            ("top_logprobs", 0, "an answer is a message without tokens"),
            ("top_k", 0, 'OpenAI has no such option; for a server that has it, pass extra={"top_k": ...}'),
        ):
            if (value := getattr(sampling, name)) != unset:
                reason = f"SamplingParams.{name} is {short_repr(value)} for a chat endpoint; {cure}"
                raise InvalidRequestError(request_id, reason)
        if (own := OWN_FIELDS.intersection(sampling.extra)) or not is_json(sampling.extra):
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
        if self._returns_tokens:
            sent |= {"return_token_ids": True, "logprobs": True}
        return {"model": self.model, self._max_tokens_field: sampling.max_tokens, **sampling.extra, **sent}

    def _data_url(self, part: Mapping[str, Any]) -> str:
        """The data URL of a part with an image or a sound. Raises `MediaError`."""
        source = load_source(part, self.media_policy, self._store)
        url = self._data_urls.get(source.digest)
        if url is None:
            if part["type"] in AUDIO_PART_TYPES:
                file = wav_or_mp3(source, self.media_policy)
            else:
                file = image_file(source, self.media_policy, jpeg_as_file=True)
            url = b"".join(file.data_url()).decode()
            self._data_urls.put(source.digest, url, len(url))
        return url

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
                except ContextLengthError as error:
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
                f"the chat completion was not over after {self._timeout_seconds:g} s. Raise timeout_seconds "
                "(request_seconds of a configuration) if such requests may take longer",
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

    def _error(self, request_id: str, error: openai.OpenAIError | MalformedResultError) -> EngineError:
        """The error for an exception of the SDK."""
        import openai

        for each in (error, error.__cause__):  # some versions of the SDK wrap what its client raises
            if isinstance(each, MalformedResultError):
                return MalformedResultError(request_id, each.reason)
        if isinstance(error, openai.APITimeoutError):
            return ServerTimeoutError(request_id, f"no response within {self._timeout_seconds:g} s")
        if not isinstance(error, openai.APIStatusError):
            reason = redacted(str(error.__cause__ or error)) or type(error.__cause__).__name__
            return ServerUnreachableError(
                request_id, f"{self.base_url} failed: {reason}. Is the server running, and at this address?"
            )
        status, headers = error.status_code, error.response.headers
        body = error.response.content
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
        if (overflow := overflow_in(status, error.code or error.type, failed.body)) is not None:
            return ContextLengthError(request_id, overflow.prompt_tokens, overflow.limit, failed.body)
        if status in (404, 405) and not urlsplit(self.base_url).path:
            cure = f"the chat completion (most servers have their API below /v1: pass {self.base_url}/v1 as base_url)"
            return response_error(request_id, HttpResponse(status, headers, body), cure)
        return failed

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
                    if in_tiny_pieces(len(pieces), received):
                        reason = f"the response comes in tiny pieces: {len(pieces)} of {received} bytes together"
                        raise MalformedResultError("response", reason)
            finally:
                await response.aclose()
            headers = [item for item in response.headers.multi_items() if item[0].lower() != "content-encoding"]
            return type(response)(response.status_code, headers=headers, content=b"".join(pieces), request=request)

    timeout = openai.Timeout(seconds, connect=min(seconds, 10.0))
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
    shown = redacted(re.split("[?#]", base_url)[0])
    try:
        parts = urlsplit(base_url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        is_valid &= not (parts.query or parts.fragment or parts.path.rstrip("/").endswith("/chat/completions"))
    except ValueError:  # the port, or brackets
        is_valid = False
    if not is_valid or not re.fullmatch(r"[\x21-\x7e]+", base_url):
        raise ArgumentError("base_url", shown, rule)
    if parts.username is not None or parts.password is not None:
        raise ArgumentError("base_url", shown, "it has credentials; pass the key as api_key")
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
    if not re.fullmatch(r"[\x21-\x7e]*", key or ""):
        rule = "the key has spaces, line ends or other characters that no HTTP header can carry; strip it"
        raise ArgumentError(name, "...", rule)
    return key or ""
