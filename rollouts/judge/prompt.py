"""The prompt of a judge: a Jinja template of a conversation and a task.

Media are printed as marks, which are no text that a conversation can contain, and then become parts.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from renderers.media.reference import part_of_value
from renderers.messages import MEDIA_PART_TYPES
from rollouts.errors import ArgumentError

if TYPE_CHECKING:
    import jinja2

#: The name of the variable of a template that collects its media.
_MEDIA: Final = "_media"


class _PrintedMedia:
    """The media of one rendering of a template, and the marks that stand for them in its text."""

    def __init__(self) -> None:
        # Digits, which filters such as `upper` leave as they are; random, so that no content can contain
        # them.
        self._mark = str(uuid.uuid4().int)
        self._printed: list[dict[str, Any]] = []

    def text_of(self, content: str | Sequence[Mapping[str, Any]]) -> str:
        """The content of a message as a text with marks."""
        if isinstance(content, str):
            return content
        return "".join(part["text"] if part["type"] == "text" else self.mark_of(part) for part in content)

    def mark_of(self, part: Mapping[str, Any]) -> str:
        """The mark for a part with a medium."""
        self._printed.append(dict(part))
        return f"[{self._mark}:{len(self._printed) - 1}]"

    def parts(self, text: str) -> list[dict[str, Any]]:
        """The text as parts of a message, with the media at the places of their marks."""
        parts: list[dict[str, Any]] = []
        for index, piece in enumerate(re.split(rf"\[{self._mark}:(\d+)\]", text)):
            if index % 2:
                parts.append(self._printed[int(piece)])
            elif piece:
                parts.append({"type": "text", "text": piece})
        return parts


def _part_of(value: object, modality: str = "") -> Mapping[str, Any] | None:
    """The part for what a template prints, a medium of `modality` unless that is empty; None for what is no medium."""
    if isinstance(value, Mapping) and value.get("type") in MEDIA_PART_TYPES:
        return value
    if isinstance(value, np.ndarray):
        modality = modality or "image"
    return {"type": modality, modality: value} if modality else part_of_value(value)


def compiled_prompt(prompt: object) -> jinja2.Template:
    """Raises `ArgumentError`."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    @jinja2.pass_context
    def finalize(context: jinja2.runtime.Context, value: Any) -> Any:
        part = _part_of(value)
        return value if part is None else context.resolve(_MEDIA).mark_of(part)

    def filter_of(modality: str) -> Callable[[jinja2.runtime.Context, Any], str]:
        @jinja2.pass_context
        def printed(context: jinja2.runtime.Context, value: Any) -> str:
            mark: str = context.resolve(_MEDIA).mark_of(_part_of(value, modality))
            return mark

        return printed

    if isinstance(prompt, Path):
        try:
            prompt = prompt.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError("prompt", prompt, f"the template cannot be read: {error}") from error
    if not isinstance(prompt, str) or not prompt.strip():
        raise ArgumentError("prompt", prompt, "pass the text of a Jinja template, or its Path")
    environment = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, finalize=finalize, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {modality: filter_of(modality) for modality in ("image", "audio")}
    try:
        return environment.from_string(prompt)
    except jinja2.TemplateSyntaxError as error:
        raise ArgumentError("prompt", prompt, f"line {error.lineno} of the template: {error.message}") from error


def printed_parts(template: jinja2.Template, messages: Sequence[Mapping[str, Any]], task: Any) -> list[dict[str, Any]]:
    """The texts and media that a template prints of a conversation. Raises whatever the template does."""
    media = _PrintedMedia()
    shown = [{**message, "content": media.text_of(message.get("content", ""))} for message in messages]
    return media.parts(template.render(messages=shown, completion=shown[-1], task=task, **{_MEDIA: media}))
