"""`ChatEndpoint` against servers that fail, and what is sent again."""

import asyncio
import threading
import traceback

import pytest
from chat_server import ChatServer, call, completion, failure
from starlette.responses import PlainTextResponse, RedirectResponse, StreamingResponse

from rollouts import FinishReason, SamplingParams
from rollouts.engines import ChatEndpoint
from rollouts.episodes.errors import error_kind, is_outage
from rollouts.errors import (
    ApiKeyError,
    ContextLengthError,
    EngineClosedError,
    EngineError,
    GenerationInterruptedError,
    MalformedResultError,
    ServerError,
    ServerTimeoutError,
    ServerUnreachableError,
)

MESSAGES = [{"role": "user", "content": "Which colour?"}]


async def ask(server, *, sampling=None, **options):
    options = {"max_retries": 1, **options}
    async with ChatEndpoint(server.url, "m", **options) as endpoint:
        return await endpoint.chat(MESSAGES, sampling=sampling or SamplingParams())


async def error_of(response, **options):
    """The error for a response, and how many requests the server received."""
    with ChatServer(response) as server, pytest.raises(EngineError) as raised:
        await ask(server, **options)
    assert raised.value.server == server.url
    return raised.value, len(server.bodies)


@pytest.mark.slow
@pytest.mark.parametrize(
    "busy",
    [failure(429, "slow down", headers={"Retry-After": "0.01"}), failure(503, "loading"), PlainTextResponse("", 500)],
    ids=["429 with Retry-After", "503", "500"],
)
async def test_a_busy_server_is_asked_again(busy):
    with ChatServer(busy, completion("red")) as server:
        assert (await ask(server)).message["content"] == "red"
    assert len(server.bodies) == 2
    assert server.bodies[0] == server.bodies[1]


@pytest.mark.slow
@pytest.mark.parametrize(("status", "outage"), [(429, False), (500, False), (502, True), (503, True)])
async def test_after_the_retries_the_runner_may_repeat_the_episode(status, outage):
    error, requests = await error_of(failure(status, "the reason"))
    assert isinstance(error, ServerError)
    assert (error.status, requests) == (status, 2)
    assert "the reason" in str(error)
    assert (error_kind(error), is_outage(error)) == ("engine", outage)


async def test_an_image_for_a_text_model_is_refused_once_with_the_message_of_the_server():
    error, requests = await error_of(failure(400, "m is not a multimodal model", type="BadRequestError", code=400))
    assert isinstance(error, ServerError)
    assert (error.status, requests, error_kind(error)) == (400, 1, None)
    assert "m is not a multimodal model" in str(error)


ECHOED = "Incorrect API key provided: {}, or sk-pr***cdef. See the account page"


@pytest.mark.parametrize("key", ["sk-proj-0123456789abcdef", "plain-0123456789abcdef"])
@pytest.mark.parametrize(
    ("response", "kind"),
    [
        (lambda key: failure(401, ECHOED.format(key)), ApiKeyError),
        (lambda key: failure(403, ECHOED.format(key)), ApiKeyError),
        (lambda key: failure(200, ECHOED.format(key)), MalformedResultError),
        (lambda key: completion(finish_reason=ECHOED.format(key)), MalformedResultError),
        (lambda key: completion(finish_reason={"a": ECHOED.format(key)}), MalformedResultError),
        (lambda key: RedirectResponse(f"http://other/{key}/See the account page"), ServerError),
        (lambda key: PlainTextResponse(f"{'a' * 230} {key} See the account page"), MalformedResultError),
    ],
)
async def test_no_text_of_an_error_contains_a_key_wherever_the_server_repeats_it(key, response, kind):
    error, requests = await error_of(response(key), api_key=key)
    assert isinstance(error, kind)
    assert requests == 1
    shown = "".join(traceback.format_exception(error)) + repr(error)
    assert "0123456" not in shown
    assert "cdef" not in shown


async def test_an_address_without_a_version_is_noticed():
    with ChatServer(completion()) as server:
        async with ChatEndpoint(server.base_url, "m") as endpoint:
            with pytest.raises(ServerError, match=rf"pass {server.url} as base_url.*HTTP 404"):
                await endpoint.chat(MESSAGES, sampling=SamplingParams())


@pytest.mark.slow
async def test_a_server_that_is_gone_is_an_outage():
    with ChatServer(completion()) as server:
        pass
    with pytest.raises(ServerUnreachableError, match="Is the server running") as raised:
        await ask(server)
    assert is_outage(raised.value)


async def test_requests_go_through_the_proxy_that_the_environment_names(monkeypatch):
    lines = []

    async def refuse(reader, writer):
        lines.append(await reader.readline())
        writer.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
        async with ChatEndpoint("http://elsewhere.invalid/v1", "m") as endpoint:
            with pytest.raises(ApiKeyError, match="HTTP 403"):
                await endpoint.chat(MESSAGES, sampling=SamplingParams())
    assert lines == [b"POST http://elsewhere.invalid/v1/chat/completions HTTP/1.1\r\n"]


class SlowServer(ChatServer):
    """Does not answer until it is released."""

    def __init__(self):
        super().__init__(completion())
        self.begun, self.released = asyncio.Event(), threading.Event()
        self.loop, self.received = asyncio.get_running_loop(), 0

    async def _answer(self, request):
        self.received += 1
        self.loop.call_soon_threadsafe(self.begun.set)
        await asyncio.to_thread(self.released.wait)
        return await super()._answer(request)


@pytest.mark.slow
async def test_a_call_ends_after_its_time():
    with SlowServer() as server:
        with pytest.raises(ServerTimeoutError, match=r"0\.2 s; .*Raise .*timeout_seconds") as raised:
            await ask(server, timeout_seconds=0.2)
        server.released.set()
    assert error_kind(raised.value) == "engine"


async def test_closing_ends_what_runs_and_what_waits():
    with SlowServer() as server:
        endpoint = ChatEndpoint(server.url, "m", concurrency=1)
        calls = [asyncio.create_task(endpoint.chat(MESSAGES, sampling=SamplingParams())) for _ in range(3)]
        await server.begun.wait()
        await asyncio.sleep(0.05)
        assert server.received == 1, "one at a time, as chosen"
        await endpoint.close()
        results = await asyncio.gather(*calls, return_exceptions=True)
        server.released.set()
    assert [type(result) for result in results] == [EngineClosedError] * 3


# The length of the context.

TOO_LONG = {
    "OpenAI": (
        "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens. Please "
        "reduce the length of the messages.",
        {"code": "context_length_exceeded"},
        (9000, 8192),
    ),
    "OpenAI, newer": (
        "Input tokens exceed the configured limit of 272000 tokens. Your messages resulted in 300000 tokens.",
        {"code": "context_length_exceeded"},
        (300000, 272000),
    ),
    "vLLM": (
        "This model's maximum context length is 4096 tokens. However, your request has 5000 input tokens. Please "
        "reduce the length of the input messages. (parameter=input_tokens, value=5000)",
        {"type": "BadRequestError", "code": 400},
        (5000, 4096),
    ),
    "vLLM, older": (
        "This model's maximum context length is 4096 tokens. However, you requested 5100 tokens (5000 in the messages, "
        "100 in the completion). Please reduce the length of the messages or completion.",
        {"type": "BadRequestError", "code": 400},
        (5000, 4096),
    ),
    "SGLang": (
        "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
        {"type": "BadRequestError", "code": 400},
        (5000, 4096),
    ),
    "llama.cpp": (
        "the request exceeds the available context size",
        {"type": "exceed_context_size_error"},
        (None, None),
    ),
    "this project": (
        "a prompt of 5000 tokens leaves no room within the model's 4096; shorten the conversation",
        {"code": "context_length_exceeded"},
        (5000, 4096),
    ),
    "this project, without encoding the text": (
        "the prompt length (at least 5000) exceeds the maximum context length (4096); shorten the conversation",
        {"code": "context_length_exceeded"},
        (5000, 4096),
    ),
}


@pytest.mark.parametrize(("message", "fields", "numbers"), TOO_LONG.values(), ids=TOO_LONG)
async def test_a_prompt_beyond_the_context_is_an_overlong_prompt(message, fields, numbers):
    error, requests = await error_of(failure(400, message, **fields))
    assert isinstance(error, ContextLengthError)
    assert (error.prompt_tokens, error.limit) == numbers
    assert message in str(error)
    assert requests == (2 if numbers == (None, None) else 1), "where nothing is known, it is tried without max_tokens"


TOO_MUCH = {
    "vLLM": (
        "'max_tokens' or 'max_completion_tokens' is too large: 256. This model's maximum context length is 4096 tokens "
        "and your request has 4000 input tokens (256 > 4096 - 4000). (parameter=max_tokens, value=256)"
    ),
    "vLLM that has not counted the prompt": (
        "This model's maximum context length is 4096 tokens. However, you requested 256 output tokens and your prompt "
        "contains at least 3841 input tokens, for a total of at least 4097 tokens. Please reduce the length of the "
        "input prompt or the number of requested output tokens."
    ),
    "OpenAI": (
        "This model's maximum context length is 4096 tokens. However, you requested 4256 tokens (4000 in the messages, "
        "256 in the completion)."
    ),
}


@pytest.mark.parametrize("message", TOO_MUCH.values(), ids=TOO_MUCH)
async def test_a_completion_that_does_not_fit_is_sampled_to_the_end_of_the_context(message):
    def respond(body):
        if "max_completion_tokens" in body:
            return failure(400, message)
        usage = {"prompt_tokens": 4000, "completion_tokens": 96}
        return completion("and so on", finish_reason="length", usage=usage)

    with ChatServer(respond) as server:
        answer = await ask(server)
    assert (answer.finish_reason, answer.completion_tokens) == (FinishReason.LENGTH, 96)
    assert len(server.bodies) == 2


# Responses that are none.


@pytest.mark.parametrize(
    ("response", "named"),
    [
        (PlainTextResponse("<html>welcome</html>"), "no chat completion: the body: .*welcome"),
        (PlainTextResponse(""), "no chat completion: the body"),
        ([], "the body: "),
        ({"choices": []}, "choices: "),
        ({"choices": completion()["choices"] * 2}, "choices: .*at most 1"),
        (completion(["text"]), "choices.0.message.content."),
        (completion(finish_reason=None), "choices.0.finish_reason: "),
        (completion(finish_reason="bored"), "finish_reason is 'bored'; this client knows stop, "),
        (completion(usage={"prompt_tokens": "many"}), "usage.prompt_tokens: "),
        (completion(usage={"prompt_tokens": 10**400}), "usage.prompt_tokens: "),
        (completion(usage={"completion_tokens": -1}), "usage.completion_tokens: "),
        (completion(usage={"completion_tokens": 257}), "257 tokens, and max_completion_tokens was 256: .*'max_tokens'"),
        (completion(tool_calls="look"), "choices.0.message.tool_calls: "),
        (completion(tool_calls=[call(7)]), "choices.0.message.tool_calls.0.function.arguments"),
    ],
)
async def test_a_response_of_another_form_names_its_place(response, named):
    with ChatServer(response) as server, pytest.raises(MalformedResultError, match=named):
        await ask(server)


async def test_a_response_of_tiny_chunks_is_refused_after_few_of_them():
    error, _ = await error_of(StreamingResponse(iter([b" "] * 20_000)), max_retries=0)
    assert isinstance(error, MalformedResultError)
    assert "comes in tiny pieces: 4097 of " in str(error)


@pytest.mark.parametrize(
    ("reason", "error", "kind"),
    [
        ("abort", GenerationInterruptedError, "engine"),
        ("error", GenerationInterruptedError, "engine"),
        ("content_filter", EngineError, None),
    ],
)
async def test_a_completion_that_the_server_ended_may_be_repeated_and_one_that_a_filter_withheld_not(
    reason, error, kind
):
    found, _ = await error_of(completion("re", finish_reason=reason))
    assert type(found) is error
    assert error_kind(found) == kind
