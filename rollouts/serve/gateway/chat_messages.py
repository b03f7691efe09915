"""Messages of a chat-completions request as messages of a renderer.

Clients add keys to messages that nothing depends on; those are left out. Any other unknown key, and any form
of content that OpenAI's API does not have, is an error that names its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from renderers.messages import MEDIA_PART_TYPES, ROLES, media_value, unknown_part_reason
from rollouts.errors import is_unicode, short_repr
from rollouts.serve.errors import invalid_message, unsupported_field
from rollouts.serve.gateway.request_checks import media_part

#: Keys without effect on the tokens, whatever they hold: clients copy them from responses, or write them for
#: others.
_WITHOUT_EFFECT: Final = frozenset({"cache_control", "id", "index", "provider_specific_fields", "status"})
_REASONING: Final = ("reasoning_content", "reasoning")
_KEYS: Final = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", *_REASONING})

_PART_KEYS: Final[Mapping[str, frozenset[str]]] = {
    "text": frozenset({"text"}),
    "image_url": frozenset({"image_url"}),
    "image": frozenset({"image", "base64"}),
    "video_url": frozenset({"video_url"}),
    "video": frozenset({"video", "base64"}),
    "input_audio": frozenset({"input_audio"}),
    "audio_url": frozenset({"audio_url"}),
    "audio": frozenset({"audio", "base64"}),
}


def read_message(raw: Any, index: int, *, allow_urls: bool) -> dict[str, Any]:
    """Message `index` as a new dict; http(s) URLs need `allow_urls`. Raises `RequestError`."""
    place = f"messages[{index}]"
    if not isinstance(raw, dict):
        raise invalid_message(f"{place} is {short_repr(raw)}, not an object with role and content", place)
    role = raw.get("role")
    if role not in ROLES:
        raise invalid_message(
            f"{place} has the role {short_repr(role)}; a role is one of {', '.join(ROLES)}", f"{place}.role"
        )
    content = raw.get("content")
    # Most messages, which are many in a long conversation: a role, a text, and keys without a value.
    if type(content) is str and is_unicode(content) and sum(map(bool, raw.values())) == 1 + bool(content):
        return {"role": role, "content": content}
    _check_keys(raw, place)
    message: dict[str, Any] = {"role": role}
    if isinstance(content, list):
        message["content"] = [
            _part(part, f"{place}.content[{number}]", allow_urls) for number, part in enumerate(content)
        ]
    elif content is not None:
        message["content"] = _text(content, f"{place}.content")
    elif role == "assistant":
        message["content"] = ""
    else:
        raise invalid_message(f"{place} has no content; send text or a list of parts", f"{place}.content")
    for key in ("name", "tool_call_id"):
        if raw.get(key) is not None:
            message[key] = _text(raw[key], f"{place}.{key}")
    reasoning = max((raw[key] for key in _REASONING if raw.get(key) is not None), key=bool, default=None)
    if reasoning is not None:
        message["reasoning_content"] = _text(reasoning, f"{place}.reasoning_content")
    if calls := raw.get("tool_calls"):
        place = f"{place}.tool_calls"
        if role != "assistant" or not isinstance(calls, list):
            raise invalid_message(f"{place}: only an assistant message has tool calls, in a list", place)
        message["tool_calls"] = [_tool_call(call, f"{place}[{number}]") for number, call in enumerate(calls)]
    return message


def _check_keys(raw: Mapping[str, Any], place: str) -> None:
    for key, value in raw.items():
        if key in _KEYS or key in _WITHOUT_EFFECT or not value:
            continue
        raise unsupported_field(
            f"{place}.{short_repr(key)[1:-1]} is not supported; leave it out", f"{place}.{key[:80]}"
        )


def _part(part: Any, place: str, allow_urls: bool) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise invalid_message(f"{place} is {short_repr(part)}, not an object with a type", place)
    kind = part.get("type")
    if not isinstance(kind, str) or (keys := _PART_KEYS.get(kind)) is None:
        raise invalid_message(f"{place}: {unknown_part_reason(part, _PART_KEYS)}", f"{place}.type")
    for key, value in part.items():
        if key != "type" and key not in keys and key not in _WITHOUT_EFFECT and value is not None:
            raise unsupported_field(f"{place} has an unknown key {short_repr(key)}; leave it out", place)
    if kind == "text":
        return {"type": "text", "text": _text(part.get("text"), f"{place}.text")}
    for key, value in part.items():
        known = {"data", "format"} if key == "input_audio" else {"url", "detail"}
        if isinstance(value, dict) and (unknown := value.keys() - known):
            raise unsupported_field(f"{place} has an unknown key {short_repr(min(unknown, key=str))}", place)
    return media_part(media_value(part), MEDIA_PART_TYPES[kind], place, allow_urls=allow_urls)


def _tool_call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise invalid_message(f'{place} is not {{"type": "function", "function": {{...}}}}', place)
    name, arguments = function.get("name"), function.get("arguments")
    if not name or not isinstance(arguments, str | dict | None):
        raise invalid_message(
            f"{place} has no name, or arguments that are no text of a JSON object", f"{place}.function"
        )
    # How some clients write a call without arguments.
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null")):
        arguments = "{}"
    elif isinstance(arguments, str):
        _text(arguments, f"{place}.function.arguments")
    named = {"name": _text(name, f"{place}.function.name"), "arguments": arguments}
    read: dict[str, Any] = {"type": "function", "function": named}
    if call.get("id") is not None:
        read["id"] = _text(call["id"], f"{place}.id")
    return read


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str) or not is_unicode(value):
        raise invalid_message(f"{place} is {short_repr(value)}, not text that UTF-8 can encode", place)
    return value
