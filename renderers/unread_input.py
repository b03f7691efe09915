"""Input that a chat template does not read: it is found in each conversation, and logged once per role and field.

transformers prints the same text and logs nothing, so the model would answer without a message that it was to
be given. The origins of the printed characters show which fields are printed. Where a field is not among
them, the conversation is printed again with another value of it: the field is unread if the text stays the
same.

Not counted as unread: white space; ids and names of tool results, which only tell results apart; and what a
template drops from earlier turns by design: reasoning (`<think>` in content, too), and content beside tool
calls where it prints such content in some turn.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from renderers.errors import TemplateError
from renderers.messages import ROLES
from renderers.parsing.format import Format
from renderers.rendered import UnprintedField
from renderers.template.chat_template import Messages, Printed, Template, Tools
from renderers.template.content_forms import ContentForms, has_text
from renderers.template.probe_conversation import (
    PROBE_TOOL,
    ProbeConversation,
    calling_turns,
    content_form_of,
    result_of_call,
)

_log = logging.getLogger("renderers")

#: Both names of reasoning in a checked message.
_REASONING = ("reasoning_content", "thinking")
#: Fields of which a prompt may be without: they are logged, and are no `UnprintedField` of the result.
_LOGGED_ONLY = ("name", "reasoning_content")


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
        self._prints_in_some_turn: dict[tuple[str, bool], bool] = {}

    def of_messages(
        self, messages: Messages, printed: Printed, tools: Tools | None, *, prompt: bool, first: int = 0
    ) -> tuple[UnprintedField, ...]:
        """The contents, parts of contents and tool calls of which the template prints nothing.

        `printed` is the print of `messages`; those before message `first` are not looked at. Names and
        reasoning that are not read, and content that is printed as data, are logged only.
        """
        paths: dict[int, set[str]] = {}
        for segment in printed.segments:
            if segment.origin is not None:
                paths.setdefault(segment.origin.message_index, set()).add(segment.origin.path)
        last_user = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=0)
        missing = [
            (index, field)
            for index, message in enumerate(messages[first:], first)
            for field in self._without_origin(message, paths.get(index, set()), is_earlier=index < last_user)
        ]
        unprinted = []
        for index, field in self._confirmed(missing, messages, printed, tools, prompt):
            message, kind = messages[index], field.partition("[")[0]
            wrong_form = self._wrong_form(message) if kind == "content" else None
            reason = wrong_form or self._reason(message, field)
            if kind not in _LOGGED_ONLY:
                unprinted.append(UnprintedField(index - first, field, reason))
            if wrong_form is None:
                self._log_once(message, index - first, kind, field, reason)
        for index, message in enumerate(messages[first:]):
            if (wrong_form := self._wrong_form(message)) is not None:
                self._log_once(message, index, "form", "content", wrong_form)
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

    def _without_origin(self, message: Mapping[str, Any], paths: set[str], *, is_earlier: bool) -> Iterator[str]:
        """The fields of a message that hold something of which no printed character is known to come.

        `is_earlier`: whether a message of a user follows.
        """

        def has_origin(field: str) -> bool:
            return any(path.startswith(field) for path in paths)

        def unread_of(name: str, fields: list[str]) -> list[str]:
            unread = [field for field in fields if not has_origin(field)]
            return [name] if unread and unread == fields else unread

        role, content = message["role"], message.get("content") or ""
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
        if message.get("name") and role != "tool" and (role, "name") not in self._logged and not has_origin("name"):
            yield "name"
        if (
            message.get("reasoning_content", "").strip()
            and (role, "reasoning_content") not in self._logged
            and not (is_earlier and self._format.reasoning is not None)
            and not any(map(has_origin, _REASONING))
            and not self._prints("reasoning_content", message)
        ):
            yield "reasoning_content"

    def _is_dropped_content(self, message: Mapping[str, Any], text: str) -> bool:
        """Whether the content of an assistant is one that the template drops from earlier turns by design."""
        if message["role"] != "assistant":
            return False
        reasoning = self._format.reasoning
        if reasoning is not None and reasoning.end in text and not text.rpartition(reasoning.end)[2].strip():
            return True
        return bool(message.get("tool_calls")) and self._prints("content", message)

    def _prints(self, field: str, message: Mapping[str, Any]) -> bool:
        """Whether the template prints this field of an assistant in some turn, with tool calls if the message has some.

        Found once, from small conversations.
        """
        key = field, bool(message.get("tool_calls"))
        known = self._prints_in_some_turn.get(key)
        if known is None:
            known = self._prints_in_some_turn[key] = any(self._probes(*key))
        return known

    def _probes(self, field: str, has_calls: bool) -> Iterator[bool]:
        _, _, answer, _ = smallest = self._smallest
        turns = calling_turns(answer) if has_calls else [answer]
        result = result_of_call(self._forms.content("tool", "probe result"))
        words = "probe words"
        text = self._forms.content("assistant", words) if field == "content" else words
        names = _REASONING if field == "reasoning_content" else (field,)
        for turn in turns:
            turn = {**turn, **dict.fromkeys(names, text)}
            for behind in ([], [result]) if has_calls else ([],):
                for tools in (smallest.tools, [PROBE_TOOL]):
                    messages = [*smallest.opening, turn, *behind]
                    try:
                        printed = self._template.print(messages, tools=tools)
                    except TemplateError:
                        continue
                    yield any(
                        segment.origin is not None
                        and segment.origin.message_index == len(smallest.opening)
                        and segment.origin.path.startswith(names)
                        for segment in printed.segments
                    )

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
        elif field == "reasoning_content":  # a template that drops it may drop `<think>` in content, too
            cure = f"Remove it, or {others}"
        elif field in _LOGGED_ONLY:
            cure = f"Write it into the content, or {others}"
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

    def _wrong_form(self, message: Mapping[str, Any]) -> str | None:
        """Why content in a form that the template does not read is lost or printed as data; None for any other."""
        form = content_form_of(message)
        if content_form_of(self._forms.converted(message)) == form or not has_text(message):
            return None
        return (
            f"the chat template of {self._model} reads content of a {message['role']} as "
            f"{'a list of parts' if form == 'text' else 'a string'} and is given {form}: text is lost or "
            "printed as "
            'data. Convert it, or load the renderer with RendererOptions(content_form="auto")'
        )

    def _log_once(self, message: Mapping[str, Any], index: int, kind: str, field: str, reason: str) -> None:
        role = message["role"]
        if self._is_first(role, kind):
            text = "message %d, %s of the role %s: %s (not logged again for this role)"
            _log.warning(text, index, field, role, reason)

    def _is_first(self, role: str, kind: str) -> bool:
        """Whether nothing was logged of the role and kind before; atomic."""
        mark = object()
        return self._logged.setdefault((role, kind), mark) is mark


def _with_value(message: Mapping[str, Any], field: str, value: str) -> dict[str, Any]:
    """The message with `value` as the text of a field; a tool call gets it as the name of its function."""
    name = field.partition("[")[0]
    given = message.get(name)
    if not isinstance(given, list):
        return {**message, **dict.fromkeys(_REASONING if name == "reasoning_content" else (name,), value)}
    entries = []
    for at, entry in enumerate(given):
        if field not in (name, f"{name}[{at}]"):
            entries.append(entry)
        elif name == "tool_calls":
            entries.append({**entry, "function": {**entry["function"], "name": value}})
        else:
            entries.append({**entry, "text": value} if "text" in entry else entry)
    return {**message, name: entries}
