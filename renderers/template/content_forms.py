"""Content in the form that a template reads: a string, or a list of parts.

A template of a multimodal model often prints nothing of a string or fails on it; one of a text model fails on
a list, or prints it as data. Servers convert content before they print. vLLM finds one form for all roles in
the syntax tree of the template; here a message of each role is printed in either form, under trace, and the
output shows which forms are read. This differs by role, and works for templates in Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from renderers.errors import LoadError, TemplateLimitError
from renderers.template.chat_template import Messages, Template, Tools
from renderers.template.probe_conversation import (
    CALL_ID,
    PROBE_TOOL,
    ContentForm,
    calling_turns,
    content,
    content_form_of,
    print_if_accepted,
    probe_content,
    probe_message,
    reads,
    smallest_conversation,
)

_FORMS: tuple[ContentForm, ...] = ("text", "parts")
_OTHER: Mapping[ContentForm, ContentForm] = {"text": "parts", "parts": "text"}
# OpenAI calls one role by two names, the second for its reasoning models.
_OTHER_ROLE: Mapping[str, str] = {"developer": "system", "system": "developer"}
# Between the texts of several parts in one string; as in vLLM, empty texts are left out.
_SEPARATOR = "\n"


class _Forms(NamedTuple):
    """The forms that a template reads of a role: wherever it prints the role, and at some position."""

    everywhere: frozenset[ContentForm]
    somewhere: frozenset[ContentForm]


class ContentForms:
    """Which forms of content a template reads, found once for each role. Safe to share between threads."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._cache: dict[str, _Forms] = {}

    def reads(self, role: str) -> bool:
        """Whether the template prints the content of a role, in some form, at some position."""
        return bool(self._of(role).somewhere)

    def _of(self, role: str) -> _Forms:
        cached = self._cache.get(role)
        if cached is None:
            cached = self._cache[role] = self._probe(role)
        return cached

    def content(self, role: str, text: str) -> str | list[dict[str, str]]:
        """A text as content in a form that the template reads; a string where it reads both forms or none."""
        return content(text, "parts" if self._of(role).everywhere == {"parts"} else "text")

    def converted(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A checked message in a form that the template reads; unchanged if it is read or cannot be converted.

        A developer message is a system message where the template reads only those, and the other way round.
        Several texts are joined by a line break, as in vLLM. Content with a medium stays a list of parts: a
        string cannot hold one.
        """
        other = _OTHER_ROLE.get(message["role"])
        if other is not None and not self.reads(message["role"]) and self.reads(other):
            message = {**message, "role": other}
        if not _is_convertible(message):
            return message
        form = content_form_of(message)
        forms = self._of(message["role"]).somewhere
        return message if not forms or form in forms else _in_form(message, _OTHER[form])

    def convert(self, messages: Messages, tools: Tools | None, prompt: bool) -> tuple[Messages, Tools | None]:
        """A `Conversion`: each message to a form that the template reads at the message's position.

        Llama 3.2 reads the parts of a user, but prints those of the first user as data once tools are
        given. So where the form depends on the position, this conversation is printed with probe texts in
        those contents, and once more with those contents converted that were not read. `prompt`: whether
        the generation prompt is printed.
        """
        result = [self.converted(message) for message in messages]
        forms = {
            index: content_form_of(message)
            for index, message in enumerate(result)
            if self._depends_on_position(message)
        }
        if forms:
            unread = forms.keys() - self._read_in_position(result, forms, tools, prompt)
            forms = {index: _OTHER[forms[index]] for index in unread}
        if forms:
            for index in self._read_in_position(result, forms, tools, prompt):
                result[index] = _in_form(result[index], forms[index])
        return result, tools

    def _depends_on_position(self, message: Mapping[str, Any]) -> bool:
        """Whether the content could be converted and is in a form that is read at some positions only."""
        if not _is_convertible(message):
            return False
        forms, form = self._of(message["role"]), content_form_of(message)
        return form in forms.somewhere and form not in forms.everywhere and _OTHER[form] in forms.somewhere

    def _read_in_position(
        self, messages: Messages, forms: Mapping[int, ContentForm], tools: Tools | None, prompt: bool
    ) -> set[int]:
        """The messages of `forms` (index -> form) that the template reads in that form at their position."""
        probes = [
            {**message, "content": probe_content(forms[index], f" {index}")} if index in forms else message
            for index, message in enumerate(messages)
        ]
        printed = print_if_accepted(self._template, probes, tools, prompt=prompt)
        return {index for index in forms if printed is not None and reads(printed, index, f" {index}")}

    def _probe(self, role: str) -> _Forms:
        try:
            results = [tuple(map(self._is_read, case)) for case in self._cases(role)]
        except TemplateLimitError:  # each further attempt would take as long
            return _Forms(frozenset(), frozenset())
        somewhere = frozenset(form for index, form in enumerate(_FORMS) if any(case[index] for case in results))
        unread = {form for index, form in enumerate(_FORMS) if any(any(case) and not case[index] for case in results)}
        return _Forms(somewhere - unread, somewhere)

    def _is_read(self, case: _Case) -> bool:
        messages, index, tools = case
        printed = print_if_accepted(self._template, messages, tools)
        return printed is not None and reads(printed, index)

    def _cases(self, role: str) -> Iterator[tuple[_Case, _Case]]:
        """Small conversations with a message of that role, as a pair: its content as text, and as parts."""
        try:
            smallest = smallest_conversation(self._template)
        except LoadError:  # raised again when a renderer of this template is built
            return
        opening, answer, question = smallest.opening, smallest.answer, smallest.question
        calls = calling_turns(answer)
        around: list[tuple[list[Mapping[str, Any]], dict[str, Any], list[Mapping[str, Any]]]]
        match role:
            case "user":
                before = [*smallest.before]
                around = [(before, {}, []), ([*opening, answer], {}, []), (before, {}, [answer, question])]
            case "assistant":
                around = [(opening, {}, []), (opening, {}, [question])]
                around += [(opening, {"tool_calls": calling["tool_calls"]}, []) for calling in calls]
            case "tool":
                fields = {"tool_call_id": CALL_ID}
                around = [([*opening, calling], fields, behind) for calling in calls for behind in ([], [answer])]
            case "system":
                around = [([], {}, [question]), ([], {}, [question, answer, question])]
            case _:
                around = [([], {}, [question]), ([*smallest.before], {}, [question])]
        for before, fields, behind in around:
            for tools in (smallest.tools, [PROBE_TOOL]):
                text, parts = (
                    ([*before, probe_message(role, form, **fields), *behind], len(before), tools) for form in _FORMS
                )
                yield text, parts


def _is_convertible(message: Mapping[str, Any]) -> bool:
    """Whether the message has content and no media in it."""
    given = message.get("content")
    return isinstance(given, str) or (given is not None and all(part["type"] == "text" for part in given))


def _in_form(message: Mapping[str, Any], form: ContentForm) -> dict[str, Any]:
    """The message, which holds no media, with its content in that form."""
    given = message["content"]
    if form == "parts":
        return {**message, "content": given if isinstance(given, list) else content(given, form)}
    texts = [given] if isinstance(given, str) else [part["text"] for part in given if part["text"]]
    return {**message, "content": _SEPARATOR.join(texts)}


_Case = tuple[list[Mapping[str, Any]], int, Tools | None]
"""Messages, the index of the probe message, tools."""
