"""Checks of what all dialects have in their requests: fields, tools, messages, media."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from renderers.parsing.json_text import no_object_reason
from renderers.rendered import UnprintedField
from rollouts.errors import is_unicode, short_repr
from rollouts.serve.bodies import invalid_body, without_nulls
from rollouts.serve.errors import invalid_field, invalid_message, unsupported_field
from rollouts.serve.gateway.dialect import TurnRequest

#: Deepest nesting of schemas of tools and of arguments. Templates walk through them recursively.
_MAX_DEPTH: Final = 64

# A bound on the length also refuses half of a surrogate pair, which UTF-8 cannot encode.
Text = Annotated[str, Field(max_length=2**40)]
Name = Annotated[str, Field(min_length=1)]
# The text before the end of a stop string is searched with each token.
StopString = Annotated[str, Field(min_length=1, max_length=1024)]


class Strict(BaseModel):
    """An object of a body that has no other fields."""

    model_config = ConfigDict(strict=True, extra="forbid")


class Sampled(BaseModel):
    """What the model wrote, which comes back with fields that clients add."""

    model_config = ConfigDict(strict=True, extra="ignore")


class RequestBody(Strict):
    """The fields that all dialects have; `SamplingParams` checks the sampling options."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    stream: bool = False
    temperature: Any = None
    top_p: Any = None
    # These say nothing about the completion here.
    metadata: Any = None
    service_tier: Any = None


class OpenAIBody(RequestBody):
    """The further fields of chat completions and Responses that say nothing about the completion here."""

    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    user: Any = None


Checked = TypeVar("Checked", bound=BaseModel)


def validated(kind: type[Checked], value: Any, place: str = "") -> Checked:
    """The value at a place of the body as an object of `kind`. Raises `RequestError`."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise invalid_body(error, place, ("content", "output", "source")) from None


def plain_text(message: Any, keys: frozenset[str]) -> str | None:
    """The text of a message with `keys` and one text, which needs no other check; None for others."""
    if type(message) is not dict or not message.keys() <= keys or message.get("type", "message") != "message":
        return None
    text = message.get("content")
    if type(text) is list and len(text) == 1 and type(text[0]) is dict:
        part = text[0]
        if part.get("type") not in _TEXT_TYPES or sum(map(bool, part.values())) > 2:
            return None
        text = part.get("text")
    return text if type(text) is str and text and is_unicode(text) else None


_TEXT_TYPES: Final = ("text", "input_text", "output_text")


def check_count(lists: Iterable[Any], max_parts: int, field: str) -> None:
    """Refuse a request with too much in its lists of messages, parts, calls and tools. Raises `RequestError`."""
    count = sum(len(each) for each in lists if isinstance(each, list))
    if count > max_parts:
        raise invalid_field(
            f"the request has {count} messages, parts of contents, tool calls and tools; this server takes at most "
            f"{max_parts}; shorten the conversation",
            field,
        )


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """The objects in a list of a body of which nothing is checked yet."""
    return (one for one in value if isinstance(one, dict)) if isinstance(value, list) else iter(())


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A tool in the form of chat completions."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": without_nulls(function)}


def check_tools(tools: list[dict[str, Any]]) -> None:
    """Refuse schemas that no template can print. Raises `RequestError`."""
    for index, tool in enumerate(tools):
        check_depth(tool, f"tools[{index}]")
    check_encodable(tools, "tools")


def check_encodable(value: Any, place: str) -> None:
    """Refuse what no JSON in UTF-8 can hold, so that no response could. Raises `RequestError`."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        reason = "half of a surrogate pair, a number beyond 1.8e308, or too many levels"
        raise invalid_field(f"{place} cannot be written as JSON again: {reason}", place) from None


def check_depth(value: Any, place: str) -> None:
    """Refuse what is nested too deep for a template. Raises `RequestError`."""
    if _deeper_than(value, _MAX_DEPTH):
        raise invalid_field(f"{place} is nested deeper than {_MAX_DEPTH} levels", place)


def _deeper_than(value: Any, depth: int) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth < 0 or any(_deeper_than(child, depth - 1) for child in children)


def text_or_parts(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """The content of a message: the text of its only part, nothing for no part, or the parts."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def media_part(url: Any, modality: str, place: str, *, allow_urls: bool) -> dict[str, Any]:
    """The part of a message with the medium of a URL; http(s) URLs need `allow_urls`. Raises `RequestError`."""
    if not isinstance(url, str):
        raise invalid_message(f"{place} has no {modality}; send a data URL, data:{modality}/...;base64,...", place)
    scheme = url[:8].lstrip().lower()
    if scheme.startswith("data:"):
        return {"type": modality, modality: url}
    # Anything else that is no URL would be read as a path of this machine.
    if not scheme.startswith(("http:", "https:")):
        raise invalid_message(f"{place} is neither a data URL nor an http(s) URL: {short_repr(url)}", place)
    if not allow_urls:
        raise unsupported_field(
            f"{place} has a URL, and this server fetches none; send the {modality} as a data URL, "
            f"data:{modality}/...;base64,...",
            place,
        )
    return {"type": modality, modality: url}


def check_tool_results(request: TurnRequest) -> None:
    """Check that each message of the role tool answers a call of an earlier message. Raises `RequestError`.

    OpenAI refuses more: results that do not follow the message with their call, and calls without a result.
    Templates render those. A result without an id is taken as vLLM takes it, and so is any id after a call
    that has none.
    """
    known_ids: set[str] = set()
    has_calls = has_calls_without_id = False
    for index, message in enumerate(request.history.messages):
        for call in message.get("tool_calls") or ():
            has_calls = True
            has_calls_without_id |= "id" not in call
            known_ids.add(call.get("id", ""))
        if message["role"] == "tool":
            sent = message.get("tool_call_id") or None
            place = request.place(index).message
            if not has_calls:
                raise invalid_message(
                    f"{place} has the role tool, and no assistant message before it has tool_calls; send the "
                    "assistant message with the call before its result",
                    f"{place}.role",
                )
            if sent is not None and sent not in known_ids and not has_calls_without_id:
                raise invalid_message(
                    f"{place}.tool_call_id {short_repr(sent)} is the id of no call in the tool_calls of the "
                    "messages before it; send the id of the call that the result answers",
                    f"{place}.tool_call_id",
                )


def check_arguments(request: TurnRequest) -> None:
    """Raise `RequestError` for arguments that are no JSON object: templates would print them quoted."""
    for index, message in enumerate(request.history.messages):
        for position, call in enumerate(message.get("tool_calls") or ()):
            if reason := no_object_reason(call["function"]["arguments"]):
                place = f"{request.place(index).message}.tool_calls[{position}].function.arguments"
                raise invalid_message(f"{place}: {reason}", place)


def check_is_printed(
    request: TurnRequest, messages: Sequence[Mapping[str, Any]], unprinted: Iterable[UnprintedField], start: int
) -> None:
    """Refuse messages of which the template prints nothing. Raises `RequestError`.

    `unprinted` counts from message `start` of the request, and `messages` begin there. Content beside tool
    calls that are printed may be missing: the model may have written it, and the client could not change
    that.
    """
    for index, field, reason in unprinted:
        message = messages[index]
        if field.startswith("content") and message["role"] == "assistant" and message.get("tool_calls"):
            continue
        place = f"{request.place(start + index).message}.{field}"
        template = "`rollouts serve` prints chat_template.jinja of its --model"
        raise invalid_message(f"{place} of the role {message['role']}: {reason} ({template})", place)
