"""Clients of the gateway's three dialects: a conversation in the form of each, and what they received sent back."""

import base64
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from gateway_server import TOOLS, data_url, png

DIALECTS = ("chat", "messages", "responses")
PATHS = {"chat": "chat/completions", "messages": "messages", "responses": "responses"}


class Call(NamedTuple):
    id: str
    name: str
    arguments: Any


class Answer(NamedTuple):
    """An answer of the model, and the form in which a client received it."""

    dialect: str
    received: Any
    thinking: str
    text: str
    calls: Sequence[Call]


class User(NamedTuple):
    """Texts, and images as arrays."""

    parts: Sequence[Any]


class Result(NamedTuple):
    """What a tool returned."""

    call_id: str
    parts: Sequence[Any]
    is_error: bool = False


def function_of(call: Call) -> dict[str, Any]:
    return {"name": call.name, "arguments": json.dumps(call.arguments)}


def chat_parts(parts: Sequence[Any]) -> Any:
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(png(part))}}
        for part in parts
    ]


def messages_parts(parts: Sequence[Any]) -> list[Any]:
    def source(pixels: Any) -> dict[str, Any]:
        return {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(pixels)).decode()}

    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "source": source(part)}
        for part in parts
    ]


def responses_parts(parts: Sequence[Any]) -> list[Any]:
    return [
        {"type": "input_text", "text": part}
        if isinstance(part, str)
        else {"type": "input_image", "image_url": data_url(png(part)), "detail": "auto"}
        for part in parts
    ]


def chat_body(system: str, conversation: Sequence[Any]) -> dict[str, Any]:
    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    for one in conversation:
        match one:
            case User():
                messages.append({"role": "user", "content": chat_parts(one.parts)})
            case Result():
                messages.append({"role": "tool", "tool_call_id": one.call_id, "content": chat_parts(one.parts)})
            case Answer(dialect="chat"):
                messages.append(one.received)
            case Answer():
                calls = [{"id": call.id, "type": "function", "function": function_of(call)} for call in one.calls]
                own = {"role": "assistant", "content": one.text, "reasoning_content": one.thinking}
                messages.append({**own, **({"tool_calls": calls} if calls else {})})
    return {"messages": messages, "tools": TOOLS}


def messages_body(system: str, conversation: Sequence[Any]) -> dict[str, Any]:
    messages: list[Any] = []
    for one in conversation:
        match one:
            case User():
                messages.append({"role": "user", "content": messages_parts(one.parts)})
            case Result():
                if not messages or messages[-1]["role"] != "user":
                    messages.append({"role": "user", "content": []})
                block = {"type": "tool_result", "tool_use_id": one.call_id, "is_error": one.is_error}
                messages[-1]["content"].append({**block, "content": messages_parts(one.parts)})
            case Answer(dialect="messages"):
                messages.append({"role": "assistant", "content": one.received})
            case Answer():
                thinking = [{"type": "thinking", "thinking": one.thinking, "signature": "s"}] if one.thinking else []
                text = [{"type": "text", "text": one.text}] if one.text else []
                calls = [
                    {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
                    for call in one.calls
                ]
                messages.append({"role": "assistant", "content": [*thinking, *text, *calls]})
    schema = TOOLS[0]["function"]
    tool = {"name": schema["name"], "description": schema["description"], "input_schema": schema["parameters"]}
    body = {"messages": messages, "tools": [tool], "max_tokens": 400}
    return {**body, "system": system} if system else body


def responses_body(system: str, conversation: Sequence[Any]) -> dict[str, Any]:
    items: list[Any] = []
    for one in conversation:
        match one:
            case User():
                items.append({"role": "user", "content": responses_parts(one.parts)})
            case Result():
                output = responses_parts(one.parts)
                items.append({"type": "function_call_output", "call_id": one.call_id, "output": output})
            case Answer(dialect="responses"):
                items += one.received
            case Answer():
                if one.thinking:
                    content = [{"type": "reasoning_text", "text": one.thinking}]
                    items.append({"type": "reasoning", "id": "rs", "summary": [], "content": content})
                if one.text:
                    items.append({"role": "assistant", "content": one.text})
                items += [{"type": "function_call", "call_id": call.id, **function_of(call)} for call in one.calls]
    return {"instructions": system, "input": items, "tools": [{"type": "function", **TOOLS[0]["function"]}]}


BODIES = {"chat": chat_body, "messages": messages_body, "responses": responses_body}


def answer_of(dialect: str, response: Any) -> Answer:
    """The answer in a response that was not streamed."""
    if dialect == "chat":
        message = response["choices"][0]["message"]
        calls = [
            Call(call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        ]
        return Answer(dialect, message, message.get("reasoning_content") or "", message["content"] or "", calls)
    if dialect == "messages":
        blocks = response["content"]
        texts = {
            kind: "".join(block[kind] for block in blocks if block["type"] == kind) for kind in ("text", "thinking")
        }
        calls = [Call(block["id"], block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
        return Answer(dialect, blocks, texts["thinking"], texts["text"], calls)
    items = response["output"]
    parts = {
        kind: "".join(part["text"] for item in items if item["type"] == kind for part in item["content"])
        for kind in ("reasoning", "message")
    }
    calls = [
        Call(item["call_id"], item["name"], json.loads(item["arguments"]))
        for item in items
        if item["type"] == "function_call"
    ]
    return Answer(dialect, items, parts["reasoning"], parts["message"], calls)


def events_of(text: str) -> list[Any]:
    """The JSON objects in the events of a stream."""
    lines = (line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


def streamed_answer_of(dialect: str, text: str) -> Any:
    """The response that the events of a stream make, as a client puts it together."""
    events = events_of(text)
    if dialect == "responses":
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["response"]["output"] == done
        return events[-1]["response"]
    if dialect == "messages":
        blocks: list[Any] = []
        for event in events:
            if event["type"] == "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                (key,) = event["delta"].keys() - {"type"}
                into = "json" if key == "partial_json" else key
                blocks[event["index"]][into] += event["delta"][key]
        for block in blocks:
            arguments = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = json.loads(arguments)
        return {**events[0]["message"], "content": blocks}
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for delta in (event["choices"][0]["delta"] for event in events):
        for key in ("content", "reasoning_content"):
            message[key] = message.get(key, "") + delta.get(key, "")
        for part in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if part["index"] == len(calls):
                calls.append(part)
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return {"choices": [{"message": message}]}
