"""Checks of what all dialects have in their requests: fields, tools, messages, media."""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import Field

from renderers.parsing.json_text import no_object_reason
from renderers.rendered import UnprintedField
from rollouts.errors import is_unicode, short_repr
from rollouts.serve.bodies import Strict, check_depth, check_encodable, json_object, validated, without_nulls
from rollouts.serve.errors import invalid_field, invalid_message, unsupported_field
from rollouts.serve.gateway.dialect import Dialect, Reading, TurnRequest

# A bound on the length also refuses half of a surrogate pair, which UTF-8 cannot encode.
Text = Annotated[str, Field(max_length=2**40)]
Name = Annotated[str, Field(min_length=1)]
# The text before the end of a stop string is searched with each token.
StopString = Annotated[str, Field(min_length=1, max_length=1024)]


class TextPart(Strict):
    type: Any
    text: Text

    def read(self, place: str, *, allow_urls: bool) -> dict[str, Any]:
        """The part of a message; `place` is that in the body."""
        return {"type": "text", "text": self.text}


class Sampled(Strict, extra="ignore"):
    """What the model wrote, which comes back with fields that clients add."""


#: Why a value of a field is refused: the description of the field, in the text of the error.
SAMPLES_FREELY: Final = "no grammar forces a call, one alone or a form of text: ask for it in a message"
OWN_MESSAGE: Final = "each completion is a message of its own, and none continues the last one"


class RequestBody(Strict):
    """The fields that all dialects have; `SamplingParams` checks the sampling options."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    stream: bool = False
    tool_choice: Any = "auto"
    temperature: Any = None
    top_p: Any = None

    @property
    def calls_tools(self) -> bool:
        return bool(getattr(self.tool_choice, "type", self.tool_choice) == "auto")

    without_effect = frozenset({"metadata", "service_tier"})


class TextFormat(Strict):
    type: Literal["text"] = "text"


class OpenAIBody(RequestBody):
    """The further fields that chat completions and Responses share."""

    parallel_tool_calls: Literal[True] = Field(True, description=SAMPLES_FREELY)
    tool_choice: Literal["auto", "none"] = Field("auto", description=SAMPLES_FREELY)
    without_effect = RequestBody.without_effect | {
        *("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user"),
    }


class PlainMessages(NamedTuple):
    """The messages of a dialect that have one text alone, which need no other check, as most do.

    `keys` are those of such a message, `part_keys` and `part_types` those of a part with its text.
    """

    roles: Collection[str]
    keys: Set[str]
    part_types: Collection[str]
    part_keys: Set[str]

    def read(self, message: Any) -> dict[str, Any] | None:
        """The message for a renderer; None for one that needs a check."""
        if type(message) is not dict or message.get("role") not in self.roles or _has_others(message, self.keys):
            return None
        if message.get("type", "message") != "message":  # an item of Responses
            return None
        text = message.get("content")
        if type(text) is list and len(text) == 1 and type(text[0]) is dict:
            part = text[0]
            if part.get("type") not in self.part_types or _has_others(part, self.part_keys):
                return None
            text = part.get("text")
        if type(text) is not str or not text or not is_unicode(text):
            return None
        return {"role": message["role"], "content": text}


def _has_others(fields: dict[str, Any], known: Set[str]) -> bool:
    """Whether there are other fields than the known ones; clients write them null."""
    return not fields.keys() <= known and any(map(fields.get, fields.keys() - known))


#: Types of tools that clients run, and what to send for one in an API that does not have it.
OWN_TOOLS: Final = {
    "function": "in this API a tool has no type, a name, a description and an input_schema: send it so",
    "custom": "a tool that takes free text is not supported: send a function with a parameter for the text",
}


def read_turn(body: bytes, dialect: Dialect, reading: Reading) -> TurnRequest:
    """The request in a body. Raises as `Dialect.read`."""
    fields = without_nulls(json_object(body))
    check_count(fields, reading.limits.max_parts)
    kept, ignored = [], []
    for index, tool in enumerate(fields["tools"] if isinstance(fields.get("tools"), list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind in reading.ignored_tools:
            ignored.append(kind)
            continue
        kept.append(tool)
        if isinstance(kind, str) and kind not in dialect.tool_types:
            cure = "this server runs no tools: leave it out, or start the server with --ignore-tool and this type"
            reason = f"tools[{index}] is of the type {short_repr(kind)}, and {OWN_TOOLS.get(kind, cure)}"
            raise unsupported_field(reason, f"tools[{index}].type")
    if ignored:
        fields["tools"] = kept
    turn = dialect.read(validated(dialect.body, fields), fields, reading)
    return replace(turn, ignored_tools=tuple(dict.fromkeys(ignored)))


def check_count(fields: Mapping[str, Any], max_parts: int) -> None:
    """Refuse a request with too much in its lists of messages, parts, calls and tools. Raises `RequestError`.

    Of the fields nothing is checked yet.
    """
    count, values = 0, [fields.get(name) for name in ("messages", "input", "system", "tools")]
    while values:
        lists = [value for value in values if type(value) is list]
        count += sum(map(len, lists))
        objects = [one for each in lists for one in each if type(one) is dict]
        values = [one[key] for key in _LISTS for one in objects if key in one]
    if count > max_parts:
        raise invalid_field(
            f"the request has {count} messages, parts of contents, tool calls and tools; this server takes at most "
            f"{max_parts}; shorten the conversation",
            "input" if "input" in fields else "messages",
        )


_LISTS: Final = ("content", "output", "tool_calls", "tools")


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A tool in the form of chat completions."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": without_nulls(function)}


def checked_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The tools, None for none. Raises `RequestError` for schemas that no template can print."""
    for index, tool in enumerate(tools):
        check_depth(tool, f"tools[{index}]")
    check_encodable(tools, "tools")
    return tools or None


def as_list(content: Any, kind: str) -> Any:
    """The parts of a content, which may be the text of a part of this type alone."""
    return [{"type": kind, "text": content}] if isinstance(content, str) else content


def content_of(parts: Iterable[Any], place: str, first: int = 0, *, allow_urls: bool) -> str | list[dict[str, Any]]:
    """The content of a message: the text of its only part, nothing for no part, or the parts. Raises `RequestError`."""
    parts = [part.read(f"{place}[{index}]", allow_urls=allow_urls) for index, part in enumerate(parts, first)]
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def assistant_message(texts: Iterable[str], thoughts: Iterable[str], calls: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of the model, of which clients may have several pieces."""
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thinking := "".join(thoughts):
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = calls
    return message


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
    known: set[str | None] = set()
    for index, message in enumerate(request.history.messages):
        known.update(call.get("id") for call in message.get("tool_calls") or ())
        sent = message.get("tool_call_id") or None
        if message["role"] != "tool" or (known and (sent is None or not known.isdisjoint((sent, None)))):
            continue
        at = request.place(index)
        place = f"{at.message}.{at.answered}"
        reason = "is the id of no call before it; send the call before its result, and its id with the result"
        raise invalid_message(f"{place} {short_repr(sent)} {reason}", place)


def check_arguments(request: TurnRequest) -> None:
    """Raise `RequestError` for arguments that are no JSON object: templates would print them quoted."""
    for index, message in enumerate(request.history.messages):
        for position, call in enumerate(message.get("tool_calls") or ()):
            if reason := no_object_reason(call["function"]["arguments"]):
                at = request.place(index)
                place = f"{at.calls[position]}.{at.arguments}"
                raise invalid_message(f"{place}: {reason}", place)


def check_is_printed(
    request: TurnRequest, messages: Sequence[Mapping[str, Any]], unprinted: Iterable[UnprintedField], start: int
) -> None:
    """Refuse messages of which the template prints nothing. Raises `RequestError`.

    `unprinted` counts from message `start` of the request, and `messages` begin there. Content beside tool calls
    that are printed may be missing: the model may have written it, and the client could not change that.
    """
    for index, field, reason in unprinted:
        message = messages[index]
        if field.startswith("content") and message["role"] == "assistant" and message.get("tool_calls"):
            continue
        place = request.place(start + index).field(field)
        template = "`rollouts serve` prints chat_template.jinja of its --model"
        raise invalid_message(f"{place} of the role {message['role']}: {reason} ({template})", place)
