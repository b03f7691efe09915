"""The result of a tool as the content of a tool message."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from renderers.messages import AUDIO_PART_TYPES, PART_TYPES, Content, unknown_part_reason
from rollouts.environments.tools.errors import ToolFailedError, ToolResultError
from rollouts.error_texts import as_unicode, describe_exception, short_repr
from rollouts.thread_calls import call_on_thread

_PLAIN_TYPES = frozenset({str, int, float, bool, type(None)})


def tool_content(tool: str, result: Any, *, max_characters: int, max_images: int) -> Content:
    """The content of the message that holds a tool's result.

    - Text is passed on.
    - Bytes, a PIL image and a numpy array of uint8 (height, width) or (height, width, 1, 3 or 4) are an image part.
    - A list or tuple with an image or a content part in it is a list of parts, one for each item.
    - Anything else is JSON: numbers, dicts, lists, dataclasses, pydantic models, dates, enums, arrays of numbers.

    Text of more than `max_characters` characters in all is cut off, and images beyond `max_images` are left out; a text
    in the message says so. Raises `ToolResultError` for a value that cannot be written as JSON, for a text part whose
    `text` is no str, for a part with audio, and for an array that has the shape of an image and not its dtype. Raises
    `ToolFailedError` for what the arguments of a call may lead to: an image without pixels, such as the part of a photo
    that lies beside it, and an integer of so many digits that Python does not write it.
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
    if isinstance(result, str | int | float | None) or _is_image(result):
        return tool_content(tool, result, **limits)
    content: Content = await call_on_thread(functools.partial(tool_content, tool, result, **limits))
    return content


def _part(tool: str, item: Any) -> dict[str, Any]:
    if _is_part(item):
        if item["type"] == "text" and not isinstance(item["text"], str):
            raise ToolResultError(tool, f'returned a text part whose "text" is {short_repr(item["text"])}; pass a str')
        if item["type"] == "image" and _is_image(item["image"]):
            _check_has_pixels(tool, item["image"])
        return dict(item)
    if _is_image(item):
        _check_has_pixels(tool, item)
        return {"type": "image", "image": item}
    if _is_part(item, AUDIO_PART_TYPES):
        raise ToolResultError(tool, f"returned {unknown_part_reason(item, PART_TYPES)}")
    text = item if isinstance(item, str) else _json(tool, item)
    return {"type": "text", "text": text}


def _is_content(item: Any) -> bool:
    """Whether an item makes its list a list of content parts."""
    return type(item) not in _PLAIN_TYPES and (_is_part(item, (*PART_TYPES, *AUDIO_PART_TYPES)) or _is_image(item))


def _is_part(item: Any, types: Collection[str] = PART_TYPES) -> bool:
    kind = item.get("type") if isinstance(item, Mapping) else None
    return isinstance(kind, str) and kind in types and kind in item


def _is_image(item: Any) -> bool:
    if isinstance(item, (bytes, bytearray)):
        return True
    if isinstance(item, np.ndarray):
        return item.dtype == np.uint8 and (item.ndim == 2 or (item.ndim == 3 and item.shape[2] in (1, 3, 4)))
    return isinstance(item, Image.Image)


def _check_has_pixels(tool: str, image: Any) -> None:
    """Raise `ToolFailedError` for an empty file, and for an image or an array that is 0 pixels wide or high."""
    if isinstance(image, (bytes, bytearray)):
        if not image:
            raise ToolFailedError(f"{tool} returned an image of 0 bytes")
        return
    height, width = image.shape[:2] if isinstance(image, np.ndarray) else (image.height, image.width)
    if not width or not height:
        raise ToolFailedError(f"{tool} returned an image of {width}x{height} pixels, which has nothing to see")


def _json(tool: str, value: Any) -> str:
    """A value as JSON. Raises `ToolResultError`, and `ToolFailedError` for an integer that Python does not write."""
    from pydantic_core import PydanticSerializationError

    if isinstance(value, np.ndarray) and value.ndim == 3 and value.shape[2] in (3, 4):
        raise ToolResultError(
            tool,
            f"returned an array {value.shape} of {value.dtype}; an image is uint8: whether other numbers run from 0 to "
            "1 or to 255 cannot be told. Scale it and cast it to numpy.uint8, or return a list",
        )
    if isinstance(value, int) and not _has_text(value):
        raise ToolFailedError(f"{tool} returned a number of {value.bit_length()} bits, which is too long to write")
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain_value)
    except (PydanticSerializationError, RecursionError, ValueError, TypeError) as error:
        raise ToolResultError(
            tool,
            f"returned a {type(value).__name__} that cannot be written as JSON ({describe_exception(error)}); return "
            "text, an image, or plain data",
        ) from error


def _has_text(number: int) -> bool:
    """Whether Python writes an integer: one with more digits than `sys.get_int_max_str_digits()` it does not."""
    try:
        return bool(str(number))
    except ValueError:
        return False


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
    characters = images = left_out = 0
    for part in parts:
        if part["type"] != "text":
            images += 1
            if images <= max_images:
                kept.append(part)
            continue
        text = as_unicode(part["text"])
        room = max(max_characters - characters, 0)
        characters += len(text)
        left_out += max(len(text) - room, 0)
        if text[:room]:
            kept.append({**part, "text": text[:room]})
    notes = []
    if left_out:
        notes.append(f"{left_out} more characters were left out")
    if images > max_images:
        notes.append(f"{images - max_images} more images were left out")
    return [*kept, {"type": "text", "text": f"\n[{'; '.join(notes)}]"}] if notes else kept
