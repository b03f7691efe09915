"""A server with OpenAI's chat completions as a source of assistant messages."""

import asyncio
import json
import math
import os
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal, get_args
from urllib.parse import urlsplit

from renderers.media.policy import MediaPolicy
from renderers.media.reference import load_source
from renderers.media.store import MediaStore
from renderers.messages import AUDIO_PART_TYPES, check_messages, check_tools, media_parts
from renderers.process.caches import ByteLRU
from rollouts.calls import call_on_thread
from rollouts.engines.chat_completions import (
    error_code,
    is_json,
    overflow_in,
    read_answer,
    sent_messages,
    sent_tools,
    wav_or_mp3,
)
from rollouts.engines.event_loop import EngineLoop
from rollouts.engines.http.connection import HttpLimits, ServerConnection
from rollouts.engines.http.responses import HttpResponse, response_error
from rollouts.engines.http.source_files import image_file
from rollouts.engines.protocol import ChatAnswer, ChatEngine, SamplingParams
from rollouts.errors import (
    ApiKeyError,
    ArgumentError,
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    MalformedResultError,
    ServerError,
    ServerTimeoutError,
    ServerUnreachableError,
    short_repr,
)
from rollouts.values import check_choice, check_integer, check_positive

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


class ChatEndpoint(ChatEngine):
    """A model behind OpenAI's chat completions: OpenAI, vLLM, `rollouts serve`, and most other servers and providers.

        endpoint = ChatEndpoint("http://127.0.0.1:8000/v1", "Qwen/Qwen3-VL-8B-Instruct")
        answer = await endpoint.chat([{"role": "user", "content": "How many dots?"}], sampling=SamplingParams())

    A `ChatEngine`: it takes and returns messages, and the server has the chat template. Without
    `return_token_ids` nothing can be trained on its completions.

    - `base_url`: the part of the address before `/chat/completions`, such as "https://api.openai.com/v1".
    - `model`: the name of the model at the server.
    - `api_key`: the key; None: https://api.openai.com gets the key of OPENAI_API_KEY, and other servers get none.
      Redirects are not followed.
    - `concurrency`: the number of requests at a time; others wait.
    - `timeout_seconds`: for a request with its retries, from the time at which it does not wait for others.
    - `max_retries`: failed connections and HTTP 408, 409, 429, 500 and above are tried again so often, after the time
      that a Retry-After header demands, else after at most 0.5 s, 1 s, 2 s...
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

    Proxies and certificates are those of the environment (HTTPS_PROXY, NO_PROXY, SSL_CERT_FILE...). An
    endpoint belongs to the event loop on which it is used first; after that is closed, another one may
    follow. Raises `ArgumentError`.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
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
        self.model = model
        of_openai = base_url.startswith(_OPENAI)
        if api_key is None and of_openai:
            api_key = os.environ.get("OPENAI_API_KEY")
        self._api_key = api_key or ""
        self._concurrency = check_integer("concurrency", concurrency)
        self._timeout_seconds = check_positive("timeout_seconds", timeout_seconds)
        retries = check_integer("max_retries", max_retries, least=0)
        check_choice("max_tokens_field", max_tokens_field, MaxTokensField)
        self._max_tokens_field = max_tokens_field
        if not set(omit) <= _OMITTABLE.keys():
            raise ArgumentError("omit", omit, f"pass a collection of {', '.join(_OMITTABLE)}")
        self._omitted = frozenset(omit)
        if tool_images is not None:
            check_choice("tool_images", tool_images, ToolImages)
        self._tool_images: ToolImages = tool_images or ("user" if of_openai else "tool")
        self._returns_tokens = return_token_ids
        self.media_policy = MediaPolicy() if policy is None else policy
        self._store = MediaStore() if store is None else store  # an empty store is falsy
        self._data_urls: ByteLRU[str, str] = ByteLRU(_DATA_URL_BYTES)
        self._connection = ServerConnection(
            base_url,
            api_key=self._api_key,
            limits=HttpLimits(
                concurrency=self._concurrency,
                total_seconds=self._timeout_seconds,
                retries=retries,
                backoff_seconds=0.5,
                longest_backoff_seconds=60.0,
                response_bytes=_RESPONSE_BYTES,
            ),
            is_retried=lambda status: status in (408, 409, 429) or status >= 500,
            is_root=False,
            uses_proxies=True,
        )
        self._loop = EngineLoop()
        self._slots = asyncio.Semaphore(self._concurrency)

    @property
    def base_url(self) -> str:
        return self._connection.base_url

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling: SamplingParams,
        seed: int | None = None,
    ) -> ChatAnswer:
        """Sample the next assistant message of a conversation.

        `seed` replaces that of `sampling`. `sampling.extra` holds further fields of the request under the
        server's own names (`stop`, `reasoning_effort`; vLLM's `top_k`, `min_p`). What is not sent has the
        server's default: vLLM takes those of the model's generation_config.json. Where prompt and
        `max_tokens` together exceed the context, the completion ends with the context. A result of a call
        that is no call of the message before it, because it was malformed, is sent as a message of the user:
        servers refuse it otherwise.

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
            if any(True for message in checked for _ in media_parts(message)):
                if self._returns_tokens:
                    raise InvalidRequestError(
                        request_id,
                        "messages with media, and return_token_ids is set: the server returns no features "
                        "of the media. Sample with VLLMEngine, or leave return_token_ids out",
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
            self._name_server(error)
            raise

    async def check(self) -> None:
        """Ask for the list of models, which every such server has, to find a wrong address or key before a run.

        An answer that is no list is no error: the chat completions may be there nevertheless. Raises
        `ServerUnreachableError`, `ServerTimeoutError`, `ApiKeyError` and `EngineClosedError`.
        """
        request_id = uuid.uuid4().hex
        try:
            response = await self._connection.request(
                "GET", "/models", name=request_id, seconds=min(self._timeout_seconds, 10.0), retry=False
            )
            if response.status in (401, 403):
                raise self._refusal(request_id, response)
        except (ServerUnreachableError, ServerTimeoutError, ApiKeyError) as error:
            self._name_server(error)
            raise
        except (ServerError, MalformedResultError):
            return

    async def close(self) -> None:
        """End all requests with `EngineClosedError`, and close. Raises `EngineError` on another loop."""
        await self._connection.close()

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
                    f"SamplingParams.{name} is {getattr(sampling, name)}, and this endpoint omits {name}; "
                    f"pass {_OMITTABLE[name]}, or an endpoint that does not omit it",
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
        if self._loop.enter(request_id):
            self._slots = asyncio.Semaphore(self._concurrency)
        async with self._slots:
            try:
                return await self._sent(request_id, body)
            except ContextLengthError as error:
                if (error.prompt_tokens or 0) >= (error.limit or math.inf):
                    raise
            # The rest of the context, which is less than the limit, is the default of vLLM and OpenAI.
            return await self._sent(request_id, {name: body[name] for name in body if name != self._max_tokens_field})

    async def _sent(self, request_id: str, body: Mapping[str, Any]) -> bytes:
        content = json.dumps(body, ensure_ascii=False).encode()
        response = await self._connection.request("POST", "/chat/completions", name=request_id, body=[content])
        if response.status != 200:
            raise self._refusal(request_id, response)
        return response.body

    def _refusal(self, request_id: str, response: HttpResponse) -> EngineError:
        """The error for a response of another status than 200."""
        status = response.status
        failed = response_error(request_id, response, "the chat completion")
        if status in (401, 403):
            return ApiKeyError(
                request_id,
                f"the server refuses the {'API key' if self._api_key else 'request without an API key'}: "
                f"HTTP {status} {failed.body}. Pass its key as api_key, or name the environment variable "
                "with the key in a configuration (api_key_env)",
            )
        if (overflow := overflow_in(status, error_code(response.body), failed.body)) is not None:
            return ContextLengthError(request_id, *overflow, failed.body)
        if status in (404, 405) and not urlsplit(self.base_url).path:
            cure = f"the chat completion (most servers have their API below /v1: pass {self.base_url}/v1 as base_url)"
            return response_error(request_id, response, cure)
        return failed

    def _name_server(self, error: EngineError) -> None:
        """Let an error name this server, and have no key, whatever the server repeats."""
        error.redact(self._connection.without_key)
        error.server = self.base_url
