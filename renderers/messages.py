"""Conversations as plain data: OpenAI chat shapes, checked before anything is rendered.

A message is a dict with a `role`, a `content` (text, a list of parts, or None beside tool calls) and, for
the assistant, `tool_calls` and `reasoning_content`. Parts are `{"type": "text", "text": ...}` and `{"type":
"image", "image": ...}` or OpenAI's `{"type": "image_url", "image_url": {"url": "data:..."}}`; videos and
sounds likewise, and `{"type": "input_audio", "input_audio": {"data": "<base64>", "format": "wav"}}`. A part
without a `type` has the type that its keys say. A part `{"type": "thinking", "thinking": ...}` of the
assistant is reasoning. A tool call is `{"function": {"name": ..., "arguments": ...}}`, the inner dict
alone, or a parsed call.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Required, TypedDict

from renderers.errors import MessageError, short_repr

Modality = Literal["image", "video", "audio"]

ROLES = ("system", "developer", "user", "assistant", "tool")

IMAGE_PART_TYPES = ("image", "image_url")
VIDEO_PART_TYPES = ("video", "video_url")
AUDIO_PART_TYPES = ("audio", "audio_url", "input_audio")
#: Type of a part -> the modality of its medium.
MEDIA_PART_TYPES: Mapping[str, Modality] = {
    **dict.fromkeys(IMAGE_PART_TYPES, "image"),
    **dict.fromkeys(VIDEO_PART_TYPES, "video"),
    **dict.fromkeys(AUDIO_PART_TYPES, "audio"),
}
#: What texts call a medium of a modality, and several.
NOUNS: Mapping[str, str] = {"image": "an image", "video": "a video", "audio": "a sound"}
PLURALS: Mapping[Modality, str] = {"image": "images", "video": "videos", "audio": "sounds"}
# Keys of a message that hold reasoning; the first one present is used.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")

PART_TYPES = ("text", *MEDIA_PART_TYPES)
_CHAT_FORM = "it is a type of OpenAI's Responses API; send"
# Parts of known APIs that a message cannot have -> the reason and the cure.
_UNSUPPORTED_PARTS = {
    **dict.fromkeys(
        ("file", "input_file", "file_url", "document"),
        "files are not supported; send their text as a text part, or their pages as images",
    ),
    "refusal": 'a refusal is text; send {"type": "text", "text": ...}',
    **dict.fromkeys(("input_text", "output_text"), f'{_CHAT_FORM} {{"type": "text", "text": ...}}'),
    "input_image": f'{_CHAT_FORM} {{"type": "image_url", "image_url": {{"url": ...}}}}',
    **dict.fromkeys(
        ("image_embeds", "audio_embeds", "prompt_embeds"), "embeddings are not supported; send the medium itself"
    ),
    "tool_use": "a call is no part of the content; send it in tool_calls of the assistant message",
    "tool_result": "a result is no part of the content; send it as a message of the role tool",
}
# Keys of a part that may hold its medium: those of OpenAI and Hugging Face; the last three as in transformers.
_MEDIA_KEYS = (*MEDIA_PART_TYPES, "url", "path", "base64")


class TextPart(TypedDict):
    type: Literal["text"]
    text: str


class ThinkingPart(TypedDict):
    """Reasoning among the parts of an assistant message; it is passed on as `reasoning_content`."""

    type: Literal["thinking"]
    thinking: str


class ImagePart(TypedDict, total=False):
    """An image: `image` holds bytes, a PIL image, an array, a URL or a path; `image_url` is OpenAI's form."""

    type: Required[Literal["image", "image_url"]]
    image: Any
    image_url: dict[str, str] | str


class VideoPart(TypedDict, total=False):
    """A video: bytes, frames, an array, a URL or a path. `fps` is the number of given frames per second."""

    type: Required[Literal["video", "video_url"]]
    video: Any
    video_url: dict[str, str] | str
    fps: float


class AudioPart(TypedDict, total=False):
    """A sound: bytes, an array, a URL or a path. `sampling_rate` is that of an array, in hertz.

    `input_audio` is OpenAI's form: base64 of a file, and its format.
    """

    type: Required[Literal["audio", "audio_url", "input_audio"]]
    audio: Any
    audio_url: dict[str, str] | str
    input_audio: dict[str, str]
    sampling_rate: int


ContentPart = TextPart | ThinkingPart | ImagePart | VideoPart | AudioPart
Content = str | list[ContentPart]


class ToolCallFunction(TypedDict):
    name: str
    arguments: dict[str, Any] | str


class ToolCall(TypedDict, total=False):
    id: str
    type: Literal["function"]
    function: Required[ToolCallFunction]


class ToolSpec(TypedDict, total=False):
    """A tool as OpenAI's function calling describes it: `{"type": "function", "function": {...}}`."""

    type: Literal["function"]
    function: Required[dict[str, Any]]


class _RequiredKeys(TypedDict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None


class Message(_RequiredKeys, total=False):
    reasoning_content: str
    tool_calls: list[ToolCall]
    tool_call_id: str
    name: str


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation as new dicts without None-valued keys. Raises a `MessageError` that names the place.

    Rows read back from Arrow carry every key of the schema, None where a row had none; such keys are dropped
    here, so that `{"type": "text", "text": "x", "image_url": None}` is a text part. `content` may be None and
    is dropped too, as in `apply_chat_template` of transformers: templates would print the word None. What
    OpenAI's API had before tools, the role `function` and the key `function_call`, becomes `tool` and
    `tool_calls`.
    """
    # The usual types are compared first: asking an abstract class takes as long as the rest of the check of a message.
    if type(messages) is not list and (
        isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence)
    ):
        raise MessageError(f"a conversation is a list of messages, not {type(messages).__name__}")
    return [check_message(message, index) for index, message in enumerate(messages)]


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Raise a `MessageError` unless tools are a list of dicts, each a schema, bare or in OpenAI's form."""
    if tools is None:
        return
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise MessageError(f"tools are a list of dicts, not {type(tools).__name__}")
    for index, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name", ""), str | None):
            shape = '{"type": "function", "function": {"name": "..."}}'
            raise MessageError(f"tools[{index}] is not of the shape {shape}: {short_repr(tool)}")


def as_chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function as a tool of OpenAI's chat completions; any other tool as it is.

    A function has one of four forms: `{"type": "function", "function": schema}`, `{"function": schema}`, the schema
    itself, and that of the Responses API, `{"type": "function", **schema}`.
    """
    if "function" in tool:
        return dict(tool) if "type" in tool else {"type": "function", **tool}
    schema = {key: value for key, value in tool.items() if key != "type"}
    is_function = "name" in tool and tool.get("type", "function") == "function"
    return {"type": "function", "function": schema} if is_function else dict(tool)


def media_parts(message: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The (part index, part) pairs of a checked message that hold a medium, in order."""
    content = message.get("content")
    if isinstance(content, list):
        for index, part in enumerate(content):
            if part["type"] != "text":
                yield index, part


def is_media_part(part: Any) -> bool:
    """Whether a content part of a message, which need not be checked, holds a medium."""
    if isinstance(part, str):
        return False
    kind = part.get("type") or _inferred_type(part)
    return kind not in ("text", "thinking")


def media_value(part: Mapping[str, Any]) -> Any:
    """The medium in a media part of any form: `{"image": ...}`, `{"image_url": {"url": ...}}`, `{"url":
    ...}`, `{"path": ...}`, `{"base64": ...}`, `{"input_audio": {"data": ...}}`; None if there is none.

    A sound may be a dict with its array and sampling rate, or with bytes and path, as rows of `datasets`
    have it.
    """
    for name in _MEDIA_KEYS:
        value = part.get(name)
        if value is None:
            continue
        if type(value) is bytes:  # skips the slower question for a Mapping
            return value
        if name == "base64" and isinstance(value, str):
            return f"data:;base64,{value}"
        if not isinstance(value, Mapping):
            return value
        if name == "input_audio" and isinstance(value.get("data"), str):
            return f"data:;base64,{value['data']}"
        return value if name == "audio" and "url" not in value else value.get("url")
    return None


def message_tool_names(messages: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """Per message, the name of the tool whose result a tool message holds; None for other roles and where unknown.

    The name is the message's own `name`, else that of the call with its `tool_call_id` in the nearest earlier
    assistant turn with such a call: ids are often used again in later turns, and results may be in any order.
    """
    names: list[str | None] = []
    called: dict[str, str] = {}
    for message in messages:
        name = None
        if message["role"] == "tool":
            name = message.get("name") or called.get(message.get("tool_call_id", ""))
        names.append(name)
        for call in message.get("tool_calls") or ():
            if call.get("id"):
                called[call["id"]] = call["function"]["name"]
    return names


def with_names_in_call_ids(messages: Sequence[dict[str, Any]], form: str) -> list[dict[str, Any]]:
    """Checked messages whose calls have their names in their ids, and so the results of these calls.

    An id without the name becomes one of `form` (`functions.{name}:{index}`), numbered through the conversation.
    """
    new_ids: dict[str, str] = {}
    named: list[dict[str, Any]] = []
    numbers = itertools.count()
    for message in messages:
        if message.get("tool_call_id") in new_ids:
            message = {**message, "tool_call_id": new_ids[message["tool_call_id"]]}
        calls = []
        for call in message.get("tool_calls", ()):
            call_id, name, number = call.get("id", ""), call["function"]["name"], next(numbers)
            if name not in call_id:
                new_ids[call_id] = form.replace("{name}", name).replace("{index}", str(number))
            calls.append({**call, "id": new_ids.get(call_id, call_id)})
        named.append({**message, "tool_calls": calls} if calls else message)
    return named


def without_media(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The checked messages with a placeholder text in place of every medium, as a template gets them."""
    replaced = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and any(part["type"] != "text" for part in content):
            parts = [dict(part) if part["type"] == "text" else with_medium(part, "<media>") for part in content]
            replaced.append({**message, "content": parts})
        else:
            replaced.append(dict(message))
    return replaced


def with_medium(part: Mapping[str, Any], medium: object) -> dict[str, Any]:
    """A media part with `medium` in place of its own, and its other keys; it need not be checked."""
    kind = part_kind(part)
    if len(part) == 2 and part.get("type") in part:  # nothing but the type and the medium
        return {"type": kind, kind: medium}
    others = {key: value for key, value in part.items() if key not in _MEDIA_KEYS}
    return {**others, "type": kind, kind: medium}


def part_kind(part: Mapping[str, Any]) -> str:
    """The type of a part for templates: `text` or a modality; as in transformers, `image_url` is `image`."""
    kind: str = part.get("type") or _inferred_type(part)
    return MEDIA_PART_TYPES.get(kind, kind)


def check_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The message `index` of a conversation, checked as `check_messages` does it."""
    if type(message) is dict and len(message) == 2:  # the usual message: a role and its content
        role, content = message.get("role"), message.get("content")
        if type(role) is str and role in ROLES:
            if type(content) is str:
                return message.copy()
            if type(content) is list and role != "assistant":
                return {**message, "content": [_check_part(part, index, at) for at, part in enumerate(content)]}
    return _check_any_message(message, index)


def _check_any_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    if type(message) is not dict and not isinstance(message, Mapping):
        raise MessageError(f"a message is a dict, not {type(message).__name__}", message_index=index)
    checked = {key: value for key, value in message.items() if value is not None}
    if checked.get("role") == "function":
        checked["role"] = "tool"
    if "function_call" in checked:
        checked = {"tool_calls": [checked.pop("function_call")], **checked}
    role = checked.get("role")
    if role not in ROLES:
        raise MessageError(f"unknown role {short_repr(role)}; a role is one of {', '.join(ROLES)}", message_index=index)
    if "content" not in checked and role != "assistant":
        raise MessageError("no content; give a text or a list of parts", message_index=index)
    if "content" in checked:
        checked["content"] = _check_content(checked["content"], index)
        if role == "assistant" and not isinstance(checked["content"], str):
            _move_thinking_parts(checked, index)
    for key in ("tool_call_id", "name", *_REASONING_NAMES):
        if not isinstance(checked.get(key, ""), str):
            raise MessageError(f"{key} is text, not {type(checked[key]).__name__}", message_index=index)
    # The first that is not empty: some servers and clients send an empty text under one name and the
    # reasoning under another.
    reasoning = max((checked[name] for name in _REASONING_NAMES if name in checked), key=bool, default=None)
    if reasoning is not None:
        # Both names that templates read, in the order in which transformers puts them.
        thinking = checked.pop("thinking", None) or reasoning
        checked = {"thinking": thinking, **checked, "reasoning_content": reasoning}
    if "tool_calls" in checked:
        if role != "assistant":
            raise MessageError(f"only the assistant makes tool calls, not {role!r}", message_index=index)
        if not isinstance(checked["tool_calls"], (list, tuple)):
            raise MessageError(f"tool_calls is a list, not {type(checked['tool_calls']).__name__}", message_index=index)
        checked["tool_calls"] = [_check_tool_call(call, index) for call in checked["tool_calls"]]
    return checked


def _check_content(content: Any, message_index: int) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise MessageError(
            f"content is text, a list of parts or None, not {type(content).__name__}", message_index=message_index
        )
    return [_check_part(part, message_index, index) for index, part in enumerate(content)]


def _check_part(part: Any, message_index: int, part_index: int) -> dict[str, Any]:
    if type(part) is dict and len(part) == 2:  # the usual part: its type, and the text or the medium under that name
        kind = part.get("type")
        if type(kind) is str and kind in PART_TYPES:
            value = part.get(kind)
            if (type(value) is str) if kind == "text" else (value is not None):
                return part.copy()
    return _check_any_part(part, message_index, part_index)


def _check_any_part(part: Any, message_index: int, part_index: int) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise MessageError(
            f"a content part is a dict, not {type(part).__name__}", message_index=message_index, part_index=part_index
        )
    checked = {key: value for key, value in part.items() if value is not None}
    if "type" not in checked and (inferred := _inferred_type(checked)):
        checked = {"type": inferred, **checked}
    kind = checked.get("type")
    if kind == "thinking" and isinstance(checked.get("thinking"), str):
        return checked
    if kind not in PART_TYPES:
        reason = unknown_part_reason(checked, PART_TYPES)
        raise MessageError(reason, message_index=message_index, part_index=part_index)
    if kind == "text" and not isinstance(checked.get("text"), str):
        raise MessageError("a text part needs a text", message_index=message_index, part_index=part_index)
    return checked


def unknown_part_reason(part: Mapping[str, Any], known: Iterable[str]) -> str:
    """Why a part is of none of the `known` types, and what to send in its place."""
    kind = part.get("type")
    if kind is None:
        kind = next((name for name in _UNSUPPORTED_PARTS if name in part), None)
    cure = _UNSUPPORTED_PARTS.get(kind) if isinstance(kind, str) else None
    known_types = f"a part is one of {', '.join(known)}"
    if cure is None:
        return f"unknown part type {short_repr(kind)}; {known_types}"
    return f"a part of type {kind!r}: {cure} ({known_types})"


def _inferred_type(part: Mapping[str, Any]) -> str:
    """The type of a part without one: the only type whose key the part has; empty where that is not one."""
    given = [name for name in (*PART_TYPES, "thinking") if part.get(name) is not None]
    return given[0] if len(given) == 1 else ""


def _move_thinking_parts(message: dict[str, Any], message_index: int) -> None:
    thinking = [part["thinking"] for part in message["content"] if part["type"] == "thinking"]
    if not thinking:
        return
    if any(message.get(name) for name in _REASONING_NAMES):
        raise MessageError(
            "reasoning is given twice: as a thinking part and beside content", message_index=message_index
        )
    message["content"] = [part for part in message["content"] if part["type"] != "thinking"]
    message["reasoning_content"] = "".join(thinking)


def _check_tool_call(call: Any, message_index: int) -> dict[str, Any]:
    checked = _as_dict(call)
    function = checked.get("function")
    if function is None and "name" in checked:  # the call without OpenAI's wrapping
        function = {key: checked.pop(key) for key in ("name", "arguments") if key in checked}
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name or not isinstance(checked.get("id", ""), str):
        raise MessageError(
            f'a tool call is {{"id": "...", "function": {{"name": "...", "arguments": ...}}}}, not {short_repr(call)}',
            message_index=message_index,
        )
    assert isinstance(function, Mapping)
    return {**checked, "function": {**function, "arguments": function.get("arguments", {})}}


def _as_dict(call: Any) -> dict[str, Any]:
    """The keys of a tool call that have a value; `call` is a dict or like a `ParsedToolCall`."""
    if not isinstance(call, Mapping):
        call = {name: getattr(call, name, None) for name in ("id", "name", "arguments")}
    return {key: value for key, value in call.items() if value is not None}
