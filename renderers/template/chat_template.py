"""A compiled chat template: messages in, text with provenance out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import jinja2

from renderers.errors import TemplateError, TemplateSyntaxError
from renderers.template.environment import TracedMessage, TracingEnvironment
from renderers.template.traced import LoopMark, Origin, TracedStr, plain


class Segment(NamedTuple):
    """Characters `start:end`: printed for message `owner` (-1: none), copied from `origin` (None: template text)."""

    start: int
    end: int
    owner: int
    origin: Origin | None


class Printed(NamedTuple):
    """A template's output: the text and segments that partition it."""

    text: str
    segments: list[Segment]


class ChatTemplate:
    """One Jinja chat template, compiled once and safe to run from many threads.

    `model` names the model in errors; `special_tokens` are the extra variables that a template may use (`bos_token`,
    `eos_token`...); `now` is the clock behind `strftime_now`.
    """

    def __init__(
        self,
        source: str,
        *,
        model: str,
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._model = model
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = TracingEnvironment(now).compile_chat_template(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateSyntaxError(error.message or "syntax error", model=model, line=error.lineno) from error

    def print(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> Printed:
        """Run the template over checked messages without their media.

        Raises `TemplateError` with the template's own words.
        """
        try:
            text = self._template.render(
                messages=[_traced_message(message, index) for index, message in enumerate(messages)],
                tools=None if tools is None else [_traced(tool, -1, f"tools[{i}]") for i, tool in enumerate(tools)],
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
                **variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # Jinja passes on whatever Python raised inside the template's expressions.
            raise TemplateError(
                str(error) or type(error).__name__,
                model=self._model,
                cure="Change the conversation so that the template accepts it (order of roles, content type).",
            ) from error
        return Printed(plain(text), _segments(text))


def _traced_message(message: Mapping[str, Any], index: int) -> TracedMessage:
    fields: dict[str, Any] = {}
    for key, value in message.items():
        if key == "role":
            fields[key] = value  # one of five known words: templates build control tokens from it
        elif key == "content" and isinstance(value, list):
            fields[key] = [_traced_part(part, index, f"content[{i}]") for i, part in enumerate(value)]
        else:
            fields[key] = _traced(value, index, key)
    return TracedMessage(fields, index)


def _traced_part(part: Mapping[str, Any], index: int, path: str) -> dict[str, Any]:
    # The type is one of a few known words, which templates compare and sometimes print as scaffold.
    return {key: value if key == "type" else _traced(value, index, f"{path}.{key}") for key, value in part.items()}


def _traced(value: Any, index: int, path: str) -> Any:
    if isinstance(value, str):
        return TracedStr.of(plain(value), Origin(index, path))
    if isinstance(value, Mapping):
        return {
            _traced(key, index, f"{path}.{key}#key"): _traced(item, index, f"{path}.{key}")
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_traced(item, index, f"{path}[{i}]") for i, item in enumerate(value)]
    return value


def _segments(text: str) -> list[Segment]:
    """Turn spans and loop marks into segments that partition the text."""
    spans = text.spans if isinstance(text, TracedStr) else ()
    segments: list[Segment] = []
    loops: list[LoopMark] = []  # the loops over messages that are running, innermost last
    position = 0

    def close(end: int, origin: Origin | None = None) -> None:
        nonlocal position
        if end > position:
            owner = loops[-1].message_index if loops else None
            if owner is None:
                owner = -1 if origin is None else origin.message_index
            segments.append(Segment(position, end, owner, origin))
            position = end

    for start, end, origin in spans:
        close(start)
        if isinstance(origin, Origin):
            close(end, origin)
            continue
        if loops and loops[-1].loop == origin.loop:
            loops.pop()
        if origin.message_index is not None:
            loops.append(origin)
    close(len(text))
    return segments
