"""Content and calls that a chat template does not read: found in each conversation, and logged once per role.

transformers prints the same text and logs nothing, so the model would answer without a message that it was to
be given. The origins of the printed characters show which fields are printed. Where a field is not among
them, the conversation is printed again with another value of it: the field is unread if the text stays the
same.

Not counted as unread: white space; names, ids and reasoning; and what a template drops from earlier turns by
design: `<think>` in content, and content beside tool calls where it prints such content in some turn.
"""

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from renderers.errors import TemplateError
from renderers.messages import ROLES
from renderers.parsing.format import Format
from renderers.rendered import UnprintedField
from renderers.template.chat_template import Messages, Printed, Template, Tools
from renderers.template.content_forms import ContentForms
from renderers.template.probe_conversation import (
    PROBE_TOOL,
    ProbeConversation,
    calling_turns,
    print_if_accepted,
    reads,
    result_of_call,
)

_log = logging.getLogger("renderers")


class UnreadInput:
    """Finds and logs what a template does not read. Safe to share between threads.

    `smallest` is a question and answer that the template prints, `forms` the forms of content that it reads.
    """

    def __init__(
        self, template: Template, smallest: ProbeConversation, forms: ContentForms, format: Format, *, model: str
    ) -> None:
        self._template = template
        self._smallest = smallest
        self._forms = forms
        self._format = format
        self._model = model
        self._logged: dict[tuple[str, str], object] = {}  # by role and field

    def of_messages(
        self, messages: Messages, printed: Printed, tools: Tools | None, *, prompt: bool, first: int = 0
    ) -> tuple[UnprintedField, ...]:
        """The contents, parts of contents and tool calls of which the template prints nothing.

        `printed` is the print of `messages`; those before message `first` are not looked at.
        """
        paths: dict[int, set[str]] = {}
        for segment in printed.segments:
            if segment.origin is not None:
                paths.setdefault(segment.origin.message_index, set()).add(segment.origin.path)
        missing = [
            (index, field)
            for index, message in enumerate(messages[first:], first)
            for field in self._without_origin(message, paths.get(index, set()))
        ]
        unprinted = []
        for index, field in self._confirmed(missing, messages, printed, tools, prompt):
            role, reason = messages[index]["role"], self._reason(messages[index], field)
            unprinted.append(UnprintedField(index - first, field, reason))
            if self._is_first(role, field.partition("[")[0]):
                text = "message %d, %s of the role %s: %s (not logged again for this role)"
                _log.warning(text, index - first, field, role, reason)
        return tuple(unprinted)

    def of_tools(self, messages: Messages, tools: Tools | None, printed: Printed) -> None:
        """Log, once, that the template does not print tools, or that calls of them are not parsed.

        `printed` is the prompt of `messages` with `tools`.
        """
        if not tools or not self._is_first("", "tools"):
            return
        try:
            is_printed = self._template.print(messages, add_generation_prompt=True).text != printed.text
        except TemplateError:  # it prints conversations with tools alone
            is_printed = True
        has_calls = self._format.tool_calls is not None or self._format.channels is not None
        if not is_printed:
            _log.warning(
                "the chat template of %s does not print tools: the model is not told of them. Describe them "
                "in a message, or load the renderer with a chat_template= that prints them",
                self._model,
            )
        if not has_calls:
            _log.warning(
                "the format of %s (%s) has no tool calls: calls in its completions stay text. Load the "
                "renderer with a chat_template= or a format= that has them",
                self._model,
                self._format.name,
            )

    # Which fields are unread.

    def _without_origin(self, message: Mapping[str, Any], paths: set[str]) -> Iterator[str]:
        """The fields of a message that hold something of which no printed character is known to come."""

        def has_origin(field: str) -> bool:
            return any(path.startswith(field) for path in paths)

        def unread_of(name: str, fields: list[str]) -> list[str]:
            unread = [field for field in fields if not has_origin(field)]
            return [name] if unread and unread == fields else unread

        content = message.get("content") or ""
        if isinstance(content, str):
            text, unread = content, [] if has_origin("content") else ["content"]
        else:
            text = "".join(part.get("text", "") for part in content)
            texts = [f"content[{at}]" for at, part in enumerate(content) if part.get("text", "").strip()]
            # Several parts may have been converted to one string.
            unread = [] if "content" in paths else unread_of("content", texts)
        if unread and text.strip() and not self._is_dropped_content(message, text):
            yield from unread
        yield from unread_of("tool_calls", [f"tool_calls[{at}]" for at in range(len(message.get("tool_calls") or ()))])

    def _is_dropped_content(self, message: Mapping[str, Any], text: str) -> bool:
        """Whether the content of an assistant is one that the template drops from earlier turns by design."""
        if message["role"] != "assistant":
            return False
        reasoning = self._format.reasoning
        if reasoning is not None and reasoning.end in text and not text.rpartition(reasoning.end)[2].strip():
            return True
        return bool(message.get("tool_calls")) and self._prints_beside_calls

    @cached_property
    def _prints_beside_calls(self) -> bool:
        """Whether the template prints content beside tool calls in some small conversation."""
        smallest = self._smallest
        result = result_of_call(self._forms.content("tool", "probe result"))
        text = self._forms.content("assistant", "probe words")
        turns = [{**turn, "content": text} for turn in calling_turns(smallest.answer)]
        for turn, behind, tools in itertools.product(turns, ([], [result]), (smallest.tools, [PROBE_TOOL])):
            printed = print_if_accepted(self._template, [*smallest.opening, turn, *behind], tools)
            if printed is not None and reads(printed, len(smallest.opening)):
                return True
        return False

    def _confirmed(
        self,
        missing: Sequence[tuple[int, str]],
        messages: Messages,
        printed: Printed,
        tools: Tools | None,
        prompt: bool,
    ) -> Sequence[tuple[int, str]]:
        """Those fields whose value does not change the print.

        Of data that a template prints as a whole, such as `message | tojson`, only the first origin is known.
        """
        if not missing:
            return missing
        probes = {place: f"probe_{number}_words" for number, place in enumerate(missing)}
        text = self._text_with(probes, messages, tools, prompt)
        if text == printed.text:
            return missing
        rest = {place: probe for place, probe in probes.items() if text is not None and probe not in text}
        is_unread = len(rest) < len(missing) and self._text_with(rest, messages, tools, prompt) == printed.text
        return list(rest) if is_unread else []

    def _text_with(
        self, values: Mapping[tuple[int, str], str], messages: Messages, tools: Tools | None, prompt: bool
    ) -> str | None:
        """The print of a conversation with other values of fields; None if the template refuses them."""
        changed = list(messages)
        for (index, field), value in values.items():
            changed[index] = _with_value(changed[index], field, value)
        try:
            return self._template.print(changed, tools=tools, add_generation_prompt=prompt).text
        except TemplateError:
            return None

    # What is logged.

    def _reason(self, message: Mapping[str, Any], field: str) -> str:
        role, others = message["role"], "load the renderer with a chat_template= that prints it"
        if field.startswith("tool_calls"):
            cure = f"Describe the calls in the content, or {others}"
        elif field != "content":
            cure = f"Join the parts to one text, or {others}"
        elif message.get("tool_calls"):
            cure = f"It prints content in messages without tool calls; {others}"
        elif self._forms.reads(role):
            cure = f"It prints a {role} at other places of a conversation: move the message there, or {others}"
        else:
            known = [other for other in ROLES if other not in ("assistant", "tool") and self._forms.reads(other)]
            cure = f"Send the message as {' or '.join(known) or 'another role'}, or {others}"
        return f"the chat template of {self._model} prints nothing of it: the model does not see it. {cure}"

    def _is_first(self, role: str, kind: str) -> bool:
        """Whether nothing was logged of the role and kind before; atomic."""
        mark = object()
        return self._logged.setdefault((role, kind), mark) is mark


def _with_value(message: Mapping[str, Any], field: str, value: str) -> dict[str, Any]:
    """The message with `value` as the text of a field; a tool call gets it as the name of its function."""
    name = field.partition("[")[0]
    given = message.get(name)
    if not isinstance(given, list):
        return {**message, name: value}
    entries = []
    for at, entry in enumerate(given):
        if field not in (name, f"{name}[{at}]"):
            entries.append(entry)
        elif name == "tool_calls":
            entries.append({**entry, "function": {**entry["function"], "name": value}})
        else:
            entries.append({**entry, "text": value} if "text" in entry else entry)
    return {**message, name: entries}
