"""Messages and tools as a template gets them: every text in them records the field that it came from."""

from collections.abc import Mapping, Sequence
from typing import Any

from renderers.template.traced import Origin, TracedStr
from renderers.template.work_limit import InputDict, InputList


class TracedMessage(dict[str, Any]):
    """A message as a template gets it, with its index, so that a loop over messages can be followed."""

    __slots__ = ("_index",)
    _index: int


def traced_message(message: Mapping[str, Any], index: int) -> TracedMessage:
    """A checked message as a template gets it: every text in it records its message and field."""
    fields = TracedMessage()
    fields._index = index
    for key, value in message.items():
        if key == "role":
            fields[key] = value  # one of five fixed words: templates build control tokens from it
        elif key == "content" and isinstance(value, list):
            fields[key] = [_traced_part(part, index, f"content[{i}]") for i, part in enumerate(value)]
        elif key == "tool_calls":
            fields[key] = [_with_known_keys(call, index, f"{key}[{i}]") for i, call in enumerate(value)]
        else:
            fields[key] = traced_value(value, index, key)
    return fields


_CALL_KEYS = frozenset(("id", "type", "function", "name", "arguments"))


def _with_known_keys(call: Mapping[str, Any], index: int, path: str) -> dict[Any, Any]:
    """A tool call, or its function: the known keys count as template text, their values as content."""
    return {
        key if key in _CALL_KEYS else traced_value(key, index, f"{path}.{key}#key"): _with_known_keys(
            value, index, f"{path}.{key}"
        )
        if key == "function"
        else traced_value(value, index, f"{path}.{key}")
        for key, value in call.items()
    }


def _traced_part(part: Mapping[str, Any], index: int, path: str) -> dict[str, Any]:
    # The type is one of a few fixed words, which templates compare and sometimes print as scaffold.
    return {key: value if key == "type" else traced_value(value, index, f"{path}.{key}") for key, value in part.items()}


def traced_value(value: Any, index: int, path: str) -> Any:
    """Plain data in which every text records message `index` and its path."""
    if isinstance(value, str):
        return TracedStr.of(value, Origin(index, path))
    if isinstance(value, Mapping):
        return InputDict(
            {
                traced_value(key, index, f"{path}.{key}#key"): traced_value(item, index, f"{path}.{key}")
                for key, item in value.items()
            }
        )
    if isinstance(value, (list, tuple)):
        return InputList([traced_value(item, index, f"{path}[{i}]") for i, item in enumerate(value)])
    return value


def traced_tools(tools: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Tools in which every text records its path: `tools[0].function.name`."""
    return [traced_value(tool, -1, f"tools[{index}]") for index, tool in enumerate(tools)]
