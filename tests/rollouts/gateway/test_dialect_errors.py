"""Hostile and mistaken clients of Messages and Responses get errors in the form of their API, and record nothing."""

import base64
import json
from typing import Any

import httpx
import pytest
from gateway_server import IMAGE, png, served

from rollouts.serve.app import create_app
from rollouts.serve.gateway.limits import GatewayLimits
from rollouts.serve.gateway.routes import Gateway
from rollouts.testing import ScriptedEngine


@pytest.fixture(scope="module")
def server(renderer):
    with served(ScriptedEngine(lambda request: "x", renderer=renderer), renderer, model="policy") as server:
        yield server


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"properties": {"a": value}}
    return value


ASKED = {"role": "user", "content": "a"}


def said(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def answered(*blocks: Any) -> dict[str, Any]:
    return {"messages": [ASKED, {"role": "assistant", "content": list(blocks)}, ASKED]}


def image(**source: Any) -> dict[str, Any]:
    return {"type": "image", "source": source}


PIXELS = base64.b64encode(png(IMAGE)).decode()
USE = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c1"}
TOOL = {"name": "look", "input_schema": {"type": "object"}}
HELLO = {"messages": [ASKED]}


def called(*results: Any) -> dict[str, Any]:
    return {"messages": [ASKED, {"role": "assistant", "content": [USE]}, *said(*results)["messages"]]}


MESSAGES: list[tuple[Any, str, str]] = [
    ({}, "messages", "missing"),
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": "a"}, "messages", "valid list"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", "'user', 'assistant' or 'system'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content[0].text", "unicode string"),
    ({"messages": [{**ASKED, "mood": 1}]}, "messages[0].mood", "unknown field"),
    ({"messages": [ASKED, {"role": "assistant", "content": "a"}]}, "messages[1]", "none continues the last one"),
    (said({"type": "mood"}), "messages[0].content[0]", "'mood'"),
    (said({"type": "text"}), "messages[0].content[0].text", "missing"),
    (said({"type": "text", "text": "a", "mood": 1}), "messages[0].content[0].mood", "unknown field"),
    (said({"type": "thinking", "thinking": "a"}), "messages[0].content[0]", "only an assistant message"),
    (said(USE), "messages[0].content[0]", "only an assistant message"),
    (said(image(type="file", file_id="f")), "messages[0].content[0].source", "'base64', 'url'"),
    (said(image(type="base64", media_type="image/png")), "messages[0].content[0].source.data", "missing"),
    (said(image(type="base64", media_type="text/html", data="")), "messages[0].content[0].source.media_type", "png"),
    (said(image(type="base64", media_type="image/png", data="!!!")), "messages[0].content[0]", "base64"),
    (said(image(type="url", url="http://example.org/a.png")), "messages[0].content[0]", "fetches none"),
    (said(image(type="url", url="/etc/passwd")), "messages[0].content[0]", "neither a data URL"),
    (said(image(type="url", url="file:///etc/passwd")), "messages[0].content[0]", "neither a data URL"),
    (
        called({**RESULT, "content": [image(type="url", url="/etc/passwd")]}),
        "messages[2].content[0].content[0]",
        "neither a data URL",
    ),
    (
        said({"type": "tool_result", "tool_use_id": "c1"}),
        "messages[0].content[0].tool_use_id",
        "'c1' is the id of no call before it",
    ),
    (called({**RESULT, "tool_use_id": "c2"}), "messages[2].content[0].tool_use_id", "'c2' is the id of no call"),
    (answered({"type": "tool_result", "tool_use_id": "c1"}), "messages[1].content[0]", "no block tool_result"),
    (answered(image(type="base64", media_type="image/png", data=PIXELS)), "messages[1].content[0]", "no block image"),
    (answered({**USE, "input": "{}"}), "messages[1].content[0].input", "valid dictionary"),
    (answered({**USE, "id": ""}), "messages[1].content[0].id", "at least 1 character"),
    (
        answered({**USE, "input": nested(80)}),
        "messages[1].content[0].input",
        "deeper than 64 levels",
    ),
    ({**HELLO, "system": 5}, "system", "valid list"),
    ({**HELLO, "system": [image(type="base64", data=PIXELS)]}, "system[0].type", "'text'"),
    ({**HELLO, "max_tokens": 0}, "", "max_tokens"),
    ({**HELLO, "temperature": "hot"}, "", "temperature"),
    ({**HELLO, "stop_sequences": [""]}, "stop_sequences[0]", "at least 1 character"),
    ({**HELLO, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type", "'bash_20250124'"),
    ({**HELLO, "tools": [{"name": "look"}]}, "tools[0].input_schema", "missing"),
    ({**HELLO, "tools": [{**TOOL, "input_schema": nested(80)}]}, "tools[0]", "deeper than 64"),
    ({**HELLO, "tools": [TOOL] * 10_000}, "messages", "at most 10000"),
    (said(*[{"type": "text", "text": "a"}] * 10_000), "messages", "at most 10000"),
    (said({"type": "tool_result", "tool_use_id": "c", "content": [{}] * 10_000}), "messages", "at most 10000"),
    ({**HELLO, "tool_choice": {"type": "any"}}, "tool_choice.type", "'any': Input should be 'auto' or 'none'"),
    (
        {**HELLO, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        "tool_choice.disable_parallel_tool_use",
        "should be False",
    ),
    ({**HELLO, "output_config": {"format": {"type": "json_schema"}}}, "output_config.format", "no grammar"),
    ({**HELLO, "container": "c"}, "container", "leave it out (not supported: the server runs no code"),
    ({**HELLO, "tools": [{**TOOL, "type": "function"}]}, "tools[0].type", "a description and an input_schema"),
    ({**HELLO, "mcp_servers": [{"type": "url"}]}, "mcp_servers", "leave it out (not supported: the server runs no"),
    (said({"type": "document", "source": {}}), "messages[0].content[0]", "the type 'document' is not supported"),
    ({**HELLO, "mood": 1}, "mood", "unknown field"),
]

CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "red"}
FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object"}}


def items(*parts: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}]}


RESPONSES: list[tuple[Any, str, str]] = [
    ({}, "input", "missing"),
    ({"input": []}, "input", "no items"),
    ({"input": 5}, "input", "valid list"),
    ({"input": "\ud800"}, "input[0].content[0].text", "unicode string"),
    ({"input": [{"type": "web_search_call"}]}, "input[0]", "'web_search_call'"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "'user', 'assistant', 'system' or 'developer'"),
    ({"input": [{"role": "user"}]}, "input[0].content", "missing"),
    ({"input": [{"role": "user", "content": "a", "mood": 1}]}, "input[0].mood", "unknown field"),
    (items({"type": "input_file", "file_id": "f"}), "input[0].content[0]", "'input_file'"),
    (items({"type": "input_text", "text": 5}), "input[0].content[0].text", "valid string"),
    (items({"type": "input_image"}), "input[0].content[0]", "has no image"),
    (items({"type": "input_image", "file_id": "f"}), "input[0].content[0].file_id", "unknown field"),
    (items({"type": "input_image", "image_url": "https://example.org"}), "input[0].content[0]", "fetches none"),
    (items({"type": "input_image", "image_url": "/etc/passwd"}), "input[0].content[0]", "neither a data URL"),
    ({"input": [OUTPUT]}, "input[0].call_id", "'c1' is the id of no call before it"),
    ({"input": [CALL, {**OUTPUT, "call_id": "c2"}]}, "input[1].call_id", "'c2' is the id of no call"),
    ({"input": [CALL, {**OUTPUT, "output": 5}]}, "input[1].output", "valid list"),
    (
        {"input": [CALL, {**OUTPUT, "output": [{"type": "input_image", "image_url": "/etc"}]}]},
        "input[1].output[0]",
        "neither a data URL",
    ),
    (
        {"input": [{"role": "assistant", "content": "a"}, {**CALL, "arguments": "{"}]},
        "input[1].arguments",
        "JSON object",
    ),
    ({"input": [{**CALL, "arguments": {}}, OUTPUT]}, "input[0].arguments", "valid string"),
    ({"input": [{**CALL, "call_id": ""}, OUTPUT]}, "input[0].call_id", "at least 1 character"),
    (
        {"input": [{"type": "reasoning", "content": [{"type": "mood", "text": "a"}]}]},
        "input[0].content[0]",
        "mood",
    ),
    ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
    ({"input": "a", "tools": [{**FUNCTION, "parameters": nested(80)}]}, "tools[0]", "deeper than 64"),
    ({"input": "a", "tools": [FUNCTION] * 10_001}, "input", "at most 10000"),
    ({"input": [ASKED] * 10_001}, "input", "at most 10000"),
    ({"input": [CALL, {**OUTPUT, "output": [{}] * 10_000}]}, "input", "at most 10000"),
    ({"input": "a", "tool_choice": "required"}, "tool_choice", "'auto' or 'none'"),
    ({"input": "a", "parallel_tool_calls": False}, "parallel_tool_calls", "should be True"),
    ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.type", "'json_schema'"),
    ({"input": "a", "include": ["message.output_text.logprobs"]}, "include[0]", "chat completions have them"),
    ({"input": "a", "background": True}, "background", "should be False (not supported: a request is answered at"),
    ({"input": "a", "conversation": "c"}, "conversation", "send previous_response_id or all items"),
    ({"input": "a", "prompt": {"id": "p"}}, "prompt", "no prompts are stored; send instructions"),
    (
        {"input": [{"type": "item_reference", "id": "rs_1"}]},
        "input[0]",
        "send the item itself, or previous_response_id",
    ),
    (
        {"input": "a", "tools": [{"type": "custom", "name": "f"}]},
        "tools[0].type",
        "send a function with a parameter for the text",
    ),
    ({"input": "a", "truncation": "auto"}, "truncation", "'disabled'"),
    ({"input": "a", "max_output_tokens": 0}, "", "max_tokens"),
    ({"input": "a", "previous_response_id": "resp_\ud800"}, "previous_response_id", "unicode string"),
    ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id", "there is no response 'resp_1'"),
    ({"input": "a", "mood": 1}, "mood", "unknown field"),
    ({"input": "a", "metadata": {"a": "\ud800"}}, "metadata", "surrogate pair"),
    ({"input": "a", "tool_choice": "none", "tools": [{**FUNCTION, "strict": "\ud800"}]}, "tools", "surrogate pair"),
]
CASES = [("messages", *case) for case in MESSAGES] + [("responses", *case) for case in RESPONSES]


def post(server: Any, path: str, content: bytes) -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    return httpx.post(f"{server.root}/sessions/refused/v1/{path}", content=content, headers=headers, timeout=30)


def error_of(path: str, response: httpx.Response) -> Any:
    body = response.json()
    assert body.keys() == ({"type", "error"} if path.startswith("messages") else {"error"})
    return body["error"]


@pytest.mark.parametrize(("path", "body", "param", "reason"), CASES)
def test_what_cannot_be_honoured_is_refused_with_its_place_and_records_nothing(server, path, body, param, reason):
    response = post(server, path, json.dumps(body).encode())
    assert response.status_code == 400, response.text
    error = error_of(path, response)
    assert error["type"] == "invalid_request_error"
    assert reason in error["message"].replace('"', "'")
    assert (error["param"] or "") == param
    session = httpx.get(f"{server.root}/sessions/refused")
    assert session.status_code == 404 or session.json()["turns"] == 0


@pytest.mark.parametrize("path", ["chat/completions", "messages", "messages/count_tokens", "responses"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"messages": NaN}', b"[" * 100_000, b'{"a":' * 50_000]
)
def test_a_body_that_is_no_json_object_is_refused(server, path, content):
    response = post(server, path, content)
    assert response.status_code == 400
    error_of(path, response)


def test_a_number_that_no_response_can_hold_is_refused(server):
    response = post(server, "responses", b'{"input": "a", "metadata": {"a": 1e999}}')
    assert response.status_code == 400
    assert "a number beyond" in error_of("responses", response)["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("messages", {**HELLO, "model": None, "metadata": {"user_id": "a"}, "service_tier": "auto", "top_k": None}),
        ("messages", {**HELLO, "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}),
        ("messages", {**HELLO, "cache_control": {"type": "ephemeral"}, "system": "", "mcp_servers": []}),
        ("messages", {"messages": [{"role": "user", "content": []}, {"role": "system", "content": "b"}]}),
        ("messages", answered({"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"})),
        ("messages", answered({"type": "thinking", "thinking": "", "signature": "x"}, USE)),
        ("messages", answered(USE, USE)),
        ("responses", {"input": "a", "metadata": {}, "reasoning": {"effort": "high"}, "service_tier": "auto"}),
        ("responses", {"input": "a", "include": ["reasoning.encrypted_content"], "top_logprobs": 0}),
        ("responses", {"input": "a", "text": {"format": {"type": "text"}, "verbosity": "low"}, "user": "me"}),
        ("responses", {"input": [ASKED, CALL, CALL, OUTPUT, OUTPUT]}),
        ("responses", {"input": [ASKED, {**CALL, "arguments": " "}, {"type": "message", **ASKED, "id": "m"}]}),
        ("responses", {"input": [ASKED, {"type": "reasoning", "summary": [], "encrypted_content": "x"}, ASKED]}),
    ],
)
def test_fields_without_effect_and_ids_that_come_twice_are_accepted(server, path, body):
    response = httpx.post(f"{server.root}/v1/{path}", json=body, timeout=30)
    assert response.status_code == 200, response.text


async def test_the_key_is_accepted_in_the_headers_of_both_apis(renderer):
    gateway = Gateway(ScriptedEngine(lambda request: "x", renderer=renderer), renderer)
    transport = httpx.ASGITransport(create_app(gateway, api_key="secret"))

    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        keys = [{"x-api-key": "secret"}, {"Authorization": "Bearer secret"}, {"x-api-key": "other"}, {}]
        answers = [await client.post("/v1/messages", json=HELLO, headers=key) for key in keys]
    assert [answer.status_code for answer in answers] == [200, 200, 401, 401]
    assert answers[2].json()["error"]["type"] == "authentication_error"


def test_a_request_beyond_the_limit_of_a_body_is_refused_in_the_form_of_its_api(renderer):
    engine = ScriptedEngine(lambda request: "x", renderer=renderer)
    with served(engine, renderer, limits=GatewayLimits(max_body_bytes=1000)) as server:
        for path, body in (
            ("messages", said({"type": "text", "text": "a" * 1000})),
            ("responses", {"input": "a" * 1000}),
        ):
            response = post(server, path, json.dumps(body).encode())
            assert response.status_code == 413
            assert (
                "larger than 1000 bytes; send less, or smaller images, or raise --max-body-mb"
                in error_of(path, response)["message"]
            )
