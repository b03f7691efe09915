"""Hostile and mistaken clients get errors in OpenAI's form, with the right status; engines fail with theirs."""

import asyncio
import base64
import io
import json
import struct
import zlib

import httpx
import openai
import pytest
from gateway_server import IMAGE, TOOLS, data_url, image_part, png, served, serving, user
from PIL import Image

from rollouts.engines.protocol import FinishReason
from rollouts.errors import (
    ContextLengthError,
    EngineClosedError,
    InvalidRequestError,
    ServerTimeoutError,
    ServerUnreachableError,
)
from rollouts.serve.gateway.limits import GatewayLimits
from rollouts.testing import ScriptedEngine
from rollouts.testing.scripted_engine import ScriptedCompletion


def post(server, body, **options):
    return httpx.post(f"{server.base_url}/chat/completions", json=body, timeout=30, **options)


def error_of(response):
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.fixture(scope="module")
def server(renderer):
    with served(
        ScriptedEngine(lambda request: "x", renderer=renderer),
        renderer,
        model="policy",
        limits=GatewayLimits(max_choices=4),
    ) as server:
        yield server


def message_with(part):
    return {"messages": [{"role": "user", "content": [part]}]}


def image_url(url):
    return message_with({"type": "image_url", "image_url": {"url": url}})


def decompression_bomb():
    """A PNG of 40 kB that declares 40000x40000 pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(40_000_000)))
        + chunk(b"IEND", b"")
    )


HELLO = {"messages": [user("a")]}


def asked(*call_ids):
    """An assistant message with a call for each id; None: a call without an id."""
    ids = [{} if call_id is None else {"id": call_id} for call_id in call_ids]
    calls = [{**one, "type": "function", "function": {"name": "look", "arguments": "{}"}} for one in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(call_id=None):
    return {"role": "tool", "content": "red"} | ({} if call_id is None else {"tool_call_id": call_id})


def with_arguments(arguments):
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"messages": [user("a"), {"role": "assistant", "content": None, "tool_calls": [call]}, result("c1")]}


WRONG = [
    ({"messages": [user("a"), result("c1")]}, "messages[1].tool_call_id", "'c1' is the id of no call before it"),
    ({"messages": [user("a"), result()]}, "messages[1].tool_call_id", "None is the id of no call before it"),
    ({"messages": [user("a"), asked("c1"), result("c2")]}, "messages[2].tool_call_id", "'c2' is the id of no call"),
    ({}, "messages", "missing"),
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": [{"role": "function", "content": "a"}]}, "messages[0].role", "'function'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "no content"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content[0].text", "unicode string"),
    ({"messages": [{"role": "user", "content": "a", "mood": "\ud800"}]}, "messages[0].mood", "unknown field"),
    ({"messages": [{**asked("c1"), **user("a")}]}, "messages[0].tool_calls", "only an assistant message"),
    (message_with("a"), "messages[0].content[0]", "valid dictionary"),
    (message_with({"type": "input_audio"}), "messages[0].content[0]", "has no audio"),
    (
        message_with({"type": "input_audio", "input_audio": {"data": "AA==", "rate": 8}}),
        None,
        ".rate",
    ),
    (message_with({"type": "file", "file": {"file_id": "f"}}), "messages[0].content[0]", "'file'"),
    (message_with({"type": "text"}), "messages[0].content[0].text", "missing"),
    (message_with({"type": "text", "text": "a", "mood": 1}), "messages[0].content[0].mood", "unknown field"),
    (image_url("https://example.org/a.png"), "messages[0].content[0]", "fetches none"),
    (image_url("/etc/passwd"), "messages[0].content[0]", "neither a data URL"),
    (image_url("file:///etc/passwd"), "messages[0].content[0]", "neither a data URL"),
    (image_url("data:image/png;base64,!!!"), "messages[0].content[0]", "base64"),
    (image_url("data:image/png;base64,"), "messages[0].content[0]", "zero bytes"),
    (image_url(data_url(b"<html>no image</html>")), "messages[0].content[0]", ""),
    (image_url(data_url(decompression_bomb())), "messages[0].content[0]", "larger than"),
    (message_with({"type": "image", "path": "/etc/passwd"}), None, "content[0].path"),
    (
        message_with({"type": "image_url", "image_url": {"url": data_url(b"x"), "path": "/etc"}}),
        None,
        ".path",
    ),
    (with_arguments('{"row": '), "messages[1].tool_calls[0].function.arguments", "not the text of a JSON object"),
    ({**HELLO, "temperature": -1}, None, "temperature"),
    ({**HELLO, "top_k": 2**63}, None, "top_k is 9223372036854775808; pass 0 (off, -1 in vLLM) or more, below 2**31"),
    ({**HELLO, "max_completion_tokens": 1.5}, None, "max_tokens"),
    ({**HELLO, "n": 5}, "n", "at most 4"),
    ({**HELLO, "stop": [""]}, "stop[0]", "at least 1 character"),
    ({**HELLO, "tools": TOOLS * 10_000}, "messages", "10001 messages, parts of contents, tool calls and tools"),
    ({**HELLO, "stop": ["a"] * 65}, "stop", "at most 64 items"),
    ({**HELLO, "stream_options": {"mood": 1}}, None, "stream_options.mood"),
    ({**HELLO, "stream_options": {"continuous_usage_stats": True}}, None, "in the last chunk alone"),
    ({"messages": [user("a")] * 10_001}, "messages", "at most 10000"),
    ({**HELLO, "tools": [{"type": "web_search"}]}, "tools[0].type", "this server runs no tools"),
    ({**HELLO, "tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing"),
    ({**HELLO, "tool_choice": "required", "tools": TOOLS}, "tool_choice", "no grammar forces a call"),
    ({**HELLO, "ignore_eos": True}, "ignore_eos", "stop tokens of the template"),
    ({**HELLO, "response_format": {"type": "json_object"}}, "response_format.type", "no grammar"),
    ({**HELLO, "top_logprobs": 3}, "top_logprobs", "send logprobs true"),
    ({**HELLO, "reasoning_effort": "high"}, "reasoning_effort", "load_renderer(DIR, chat_template_kwargs="),
    ({**HELLO, "functions": [{"name": "look"}]}, "functions", "send tools of the type function"),
    ({**HELLO, "mood": "good"}, "mood", "unknown field"),
    ({**HELLO, "model": "\ud800"}, "model", "unicode string"),
]


@pytest.mark.parametrize(("body", "param", "reason"), WRONG)
def test_what_cannot_be_honoured_is_refused_with_its_place_and_records_nothing(server, body, param, reason):
    response = httpx.post(
        f"{server.root}/sessions/refused/v1/chat/completions",
        content=json.dumps(body),
        headers={"Content-Type": "application/json"},
        timeout=30,
    )
    assert response.status_code == 400
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert reason in error["message"].replace('"', "'")
    if param is not None:
        assert error["param"] == param
    session = httpx.get(f"{server.root}/sessions/refused")
    assert session.status_code == 404 or session.json()["turns"] == 0


@pytest.mark.parametrize(
    "messages",
    [
        [asked("c1", "c2"), result("c2"), result("c1")],
        [asked("c1"), user("wait"), result("c1")],
        [asked("c1"), result("c1"), result("c1")],
        [asked("c1", "c2"), result("c1")],
        [asked(None), result("c1")],
        [asked("c1"), result("")],
    ],
)
def test_results_of_calls_that_a_template_can_render_are_accepted(server, messages):
    assert post(server, {"messages": [user("a"), *messages]}).status_code == 200


def test_a_message_in_a_later_request_is_named_by_its_index_in_that_request(server):
    client = server.client("later")
    first = client.chat.completions.create(model="policy", messages=[user("a")])
    broken = image_part(IMAGE)
    broken["image_url"]["url"] = "data:image/png;base64,!!!"
    messages = [user("a"), first.choices[0].message, user("b"), {"role": "user", "content": [broken]}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="policy", messages=messages)
    assert refused.value.param == "messages[3].content[0]"
    assert server.trajectory("later").num_turns == 1


def test_other_content_types_are_refused(server):
    response = httpx.post(f"{server.base_url}/chat/completions", data={"messages": "a"})
    assert response.status_code == 415
    assert error_of(response)["code"] == "unsupported_media_type"


def test_another_model_is_not_found_and_the_served_one_is_listed(server):
    client = server.client()
    with pytest.raises(openai.NotFoundError, match="policy"):
        client.chat.completions.create(model="gpt-4o", messages=[user("a")])
    assert [model.id for model in client.models.list()] == ["policy"]
    assert client.chat.completions.create(model="policy", messages=[user("a")]).model == "policy"


def test_an_unknown_session_has_no_trajectory(server):
    for path in ("trajectory", ""):
        response = httpx.get(f"{server.root}/sessions/nobody/{path}".rstrip("/"))
        assert response.status_code == 404
        assert error_of(response)["code"] == "session_not_found"
    assert httpx.get(f"{server.root}/sessions/refused-form/trajectory").status_code == 404


def test_fields_without_effect_and_neutral_values_are_accepted(server):
    neutral = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "top_k": -1,
        "seed": None,
        "stream_options": None,
    }
    assert post(server, {**HELLO, **neutral}).status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ContextLengthError("r", 9000, 4096), 400, "context_length_exceeded"),
        (InvalidRequestError("r", "min_p is unknown"), 400, None),
        (ServerTimeoutError("r", "too late"), 504, "timeout"),
        (ServerUnreachableError("r", "gone"), 503, "engine_unavailable"),
        (EngineClosedError("r", "closed"), 503, "engine_unavailable"),
        (ValueError("a bug"), 502, "engine_error"),
        (ScriptedCompletion("x", finish_reason=FinishReason.ABORT), 503, "engine_unavailable"),
        ([], 502, "engine_error"),
    ],
)
def test_an_error_of_the_engine_has_its_status_and_records_no_turn(renderer, error, status, code):
    engine = ScriptedEngine([error, "fine"], renderer=renderer)
    with served(engine, renderer) as server:
        url = f"{server.root}/sessions/s/v1/chat/completions"
        response = httpx.post(url, json={**HELLO, "stream": True})
        assert (response.status_code, error_of(response)["code"]) == (status, code)
        assert server.trajectory("s").num_turns == 0
        assert httpx.post(url, json=HELLO).status_code == 200
        assert server.trajectory("s").num_turns == 1


def test_a_completion_that_takes_too_long_is_aborted(renderer):
    cancelled = []

    async def hang(request):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(request.request_id)
            raise

    with served(ScriptedEngine(hang, renderer=renderer), renderer, limits=GatewayLimits(request_seconds=0.1)) as server:
        response = httpx.post(f"{server.root}/sessions/s/v1/chat/completions", json=HELLO)
        error = error_of(response)
        assert (response.status_code, error["code"]) == (504, "timeout")
        assert "0.1 s; nothing of it is recorded. Send a smaller max_tokens" in error["message"]
        assert len(cancelled) == 1
        assert server.trajectory("s").num_turns == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_aborts_its_request_on_the_engine(renderer, stream):
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def hang(request):
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with serving(ScriptedEngine(hang, renderer=renderer), renderer) as server:
        async with server.async_client("s") as client:
            call = client.chat.completions.create(model="m", messages=[user("a")], stream=stream)
            task = asyncio.create_task(call)
            await asyncio.wait_for(began.wait(), 30)
            task.cancel()
            await asyncio.wait_for(cancelled.wait(), 30)
        (session,) = server.gateway.sessions()
    assert session.trajectory.num_turns == 0
    assert session.trajectory.metrics == {"refused_requests/499 client_disconnected": 1}


def test_base64_without_a_data_url_is_an_image(server):
    data = base64.b64encode(png(IMAGE)).decode()
    response = post(server, message_with({"type": "image", "base64": data}), headers={"X-Session-ID": "b64"})
    assert response.status_code == 200
    (medium,) = server.trajectory("b64").all_media()
    file = io.BytesIO(medium.source.data)
    assert Image.open(file).size == (32, 32)
