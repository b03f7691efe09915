"""The result of a tool as content of a message."""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from renderers.media.reference import part_of_value
from renderers.messages import MEDIA_PART_TYPES, NOUNS, PART_TYPES, Content
from rollouts.calls import call_on_thread
from rollouts.environments.tools.errors import ToolFailedError, ToolResultError
from rollouts.errors import as_unicode, describe_exception, short_repr

_PLAIN_TYPES = frozenset({str, int, float, bool, type(None)})


def tool_content(tool: str, result: Any, *, max_characters: int, max_images: int) -> Content:
    """The content of the message that holds a tool's result.

    - Text is passed on.
    - A PIL image and a numpy array of uint8 (height, width) or (height, width, 1, 3 or 4) are an image part.
    - `{"array": samples, "sampling_rate": hertz}` is an audio part. A numpy array of samples alone is
      numbers.
    - Bytes are the file of an image, of a sound or of a video.
    - A list or tuple with one of these or a content part in it is a list of parts, one for each item.
    - Anything else is JSON: numbers, dicts, lists, dataclasses, pydantic models, dates, enums, arrays of
      numbers.

    Text of more than `max_characters` characters in all is cut off, and images, sounds and videos beyond
    `max_images` are left out; a text in the message says so. Raises `ToolResultError` for a value that cannot
    be written as JSON, for a text part whose `text` is no str, and for an array that has the shape of an
    image and not its dtype. Raises `ToolFailedError` for what the arguments of a call may lead to: an image
    without pixels, such as the part of a photo that lies beside it, a sound without samples, and an integer
    of so many digits that Python does not write it.
    """
    if not isinstance(result, (list, tuple)) or not any(map(_is_content, result)):
        if isinstance(result, str):
            return _cut(result, max_characters)
        result = [result]
    parts = [_part(tool, item) for item in result]
    if len(parts) == 1 and parts[0]["type"] == "text":
        return _cut(parts[0]["text"], max_characters)
    return _bounded(parts, max_characters, max_images)  # type: ignore[return-value]  # checked by the renderer


async def tool_content_of(tool: str, result: Any, *, max_characters: int, max_images: int) -> Content:
    """`tool_content`, on a thread unless it is done at once: a list of a million numbers takes a while."""
    limits = {"max_characters": max_characters, "max_images": max_images}
    if isinstance(result, str | int | float | None) or part_of_value(result):
        return tool_content(tool, result, **limits)
    content: Content = await call_on_thread(functools.partial(tool_content, tool, result, **limits))
    return content


def _part(tool: str, item: Any) -> dict[str, Any]:
    if _is_part(item):
        if item["type"] == "text" and not isinstance(item["text"], str):
            raise ToolResultError(tool, f'returned a text part whose "text" is {short_repr(item["text"])}; pass a str')
        _check_not_empty(tool, item)
        return dict(item)
    if part := part_of_value(item):
        _check_not_empty(tool, part)
        return part
    text = item if isinstance(item, str) else _json(tool, item)
    return {"type": "text", "text": text}


def _is_content(item: Any) -> bool:
    """Whether an item makes its list a list of content parts."""
    return type(item) not in _PLAIN_TYPES and (_is_part(item) or part_of_value(item) is not None)


def _is_part(item: Any) -> bool:
    kind = item.get("type") if isinstance(item, Mapping) else None
    return isinstance(kind, str) and kind in PART_TYPES and kind in item


def _check_not_empty(tool: str, part: Mapping[str, Any]) -> None:
    """Raise `ToolFailedError` for an empty file, an image that is 0 pixels wide or high, and a sound of no samples."""
    kind, value = part["type"], part[part["type"]]
    if isinstance(value, (bytes, bytearray)) and not value:
        raise ToolFailedError(f"{tool} returned {NOUNS[MEDIA_PART_TYPES[kind]]} of 0 bytes")
    size: tuple[int, ...] = value.size[::-1] if isinstance(value, Image.Image) else getattr(value, "shape", ())[:2]
    if kind == "image" and len(size) == 2 and not all(size):
        raise ToolFailedError(f"{tool} returned an image of {size[1]}x{size[0]} pixels, which has nothing to see")
    samples = value.get("array") if isinstance(value, Mapping) else value
    if kind == "audio" and isinstance(samples, np.ndarray) and not samples.size:
        raise ToolFailedError(f"{tool} returned a sound of 0 samples, which has nothing to hear")


def _json(tool: str, value: Any) -> str:
    """A value as JSON. Raises `ToolResultError`, and `ToolFailedError` for an integer that Python does not write."""
    from pydantic_core import PydanticSerializationError

    if isinstance(value, np.ndarray) and value.ndim == 3 and value.shape[2] in (3, 4):
        raise ToolResultError(
            tool,
            f"returned an array {value.shape} of {value.dtype}; an image is uint8: whether other numbers run from 0 to "
            "1 or to 255 cannot be told. Scale it and cast it to numpy.uint8, or return a list",
        )
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain_value)
    except (PydanticSerializationError, RecursionError, ValueError, TypeError) as error:
        if isinstance(value, int):  # of more digits than `sys.get_int_max_str_digits()`
            reason = f"{tool} returned a number of {value.bit_length()} bits, which is too long to write"
            raise ToolFailedError(reason) from error
        raise ToolResultError(
            tool,
            f"returned a {type(value).__name__} that cannot be written as JSON ({describe_exception(error)}); return "
            "text, an image, a sound with its sampling rate, or plain data",
        ) from error


def _plain_value(value: Any) -> Any:
    """What `json` can write of an object that it does not know."""
    from pydantic_core import to_jsonable_python

    return to_jsonable_python(value, fallback=_plain_numbers)


def _plain_numbers(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _cut(text: str, limit: int) -> str:
    text = as_unicode(text)
    return text if len(text) <= limit else f"{text[:limit]}\n[{len(text) - limit} more characters were left out]"


def _bounded(parts: Sequence[dict[str, Any]], max_characters: int, max_images: int) -> list[dict[str, Any]]:
    """The parts within the limits, and a last part that says what was left out."""
    kept: list[dict[str, Any]] = []
    media: list[str] = []
    room, left_out = max_characters, 0
    for part in parts:
        if part["type"] == "text":
            text = as_unicode(part["text"])
            kept += [{**part, "text": text[:room]}] if text[:room] else []
            left_out += max(len(text) - room, 0)
            room = max(room - len(text), 0)
        else:
            media.append(MEDIA_PART_TYPES[part["type"]])
            kept += [part] if len(media) <= max_images else []
    notes = [f"{left_out} more characters were left out"] if left_out else []
    if beyond := media[max_images:]:
        notes.append(f"{len(beyond)} more {'images' if {*beyond} == {'image'} else 'media'} were left out")
    return [*kept, {"type": "text", "text": f"\n[{'; '.join(notes)}]"}] if notes else kept
