"""Content in the form that a template reads: text where it reads strings, parts where it reads lists of parts.

A template of a model that sees often loops over the parts of a message and prints nothing of a string (Idefics3), or
fails on one (LLaVA-NeXT); one of a model that reads only text fails on a list, or prints it as data. Servers detect the
form and convert before they print, so a conversation that is printed as given is not the one that the server sees.

vLLM detects by the syntax tree of the template: one form for all roles, "openai" if some loop runs over something named
`content`. Here the template is asked instead: a message of each role is printed in either form, under trace, and what
reaches the output says which forms are read. That is exact for what was printed, tells the roles apart (Pixtral's
template reads parts of a user, but of an assistant only a string; one version of Gemma 4's prints a system message in
parts as data, which the syntax tree does not show), and works for a template that is Python code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from renderers.errors import LoadError, TemplateError, TemplateLimitError
from renderers.template.chat_template import Printed, Template
from renderers.template.probe_conversation import (
    PROBE_TOOL,
    ContentForm,
    content,
    content_form_of,
    probe_content,
    probe_message,
    reads,
    smallest_conversation,
)

_FORMS: tuple[ContentForm, ...] = ("text", "parts")
_OTHER: Mapping[ContentForm, ContentForm] = {"text": "parts", "parts": "text"}
_CALL_ID = "call00000"
# Between the texts of several parts that are made one string; as in vLLM, empty ones are left out.
_SEPARATOR = "\n"


class _Forms(NamedTuple):
    """The forms that a template reads of a role: wherever it prints the role at all, and at some place at least."""

    everywhere: frozenset[ContentForm]
    somewhere: frozenset[ContentForm]


class ContentForms:
    """Which forms of content a template reads, by role; asked once for each role. Safe to share between threads."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._known: dict[str, _Forms] = {}

    def of_role(self, role: str) -> frozenset[ContentForm]:
        """The forms that the template reads of a role; empty where it prints neither, or each only here or there."""
        return self._of(role).everywhere

    def _of(self, role: str) -> _Forms:
        known = self._known.get(role)
        if known is None:
            known = self._known[role] = self._ask(role)
        return known

    def content(self, role: str, text: str) -> str | list[dict[str, str]]:
        """A text as content that the template reads; as a string where it reads both forms or none."""
        return content(text, "parts" if self.of_role(role) == {"parts"} else "text")

    def converted(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A checked message in a form that the template reads: as it is where that is read, or cannot be converted.

        Several texts are joined by a line break, as in vLLM. Content that holds an image stays a list of parts: no
        string can show one.
        """
        given = message.get("content")
        if given is None or _shows_media(given):
            return message
        form = content_form_of(message)
        is_read = self._of(message["role"]).somewhere
        return message if not is_read or form in is_read else _in_form(message, _OTHER[form])

    def converted_in_place(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, prompt: bool
    ) -> list[Mapping[str, Any]]:
        """All messages of a conversation `converted`, also where their form is read elsewhere but not at their place.

        Llama 3.2 prints the parts of a user, but those of the first user as data once tools are given. So where it
        depends on the place, this conversation is printed with other words in those contents, and once more with those
        of them converted that were not read. `prompt`: whether the generation prompt is printed.
        """
        shown = [self.converted(message) for message in messages]
        asked = {
            index: content_form_of(message) for index, message in enumerate(shown) if self._depends_on_place(message)
        }
        if asked:
            asked = {i: _OTHER[asked[i]] for i in asked.keys() - self._read_there(shown, asked, tools, prompt)}
        if asked:
            for index in self._read_there(shown, asked, tools, prompt):
                shown[index] = _in_form(shown[index], asked[index])
        return shown

    def _depends_on_place(self, message: Mapping[str, Any]) -> bool:
        """Whether the content, which could be converted, is in a form that is read here and not there."""
        given = message.get("content")
        if given is None or _shows_media(given):
            return False
        forms, form = self._of(message["role"]), content_form_of(message)
        return form in forms.somewhere and form not in forms.everywhere and _OTHER[form] in forms.somewhere

    def _read_there(
        self,
        messages: Sequence[Mapping[str, Any]],
        asked: Mapping[int, ContentForm],
        tools: Sequence[Mapping[str, Any]] | None,
        prompt: bool,
    ) -> set[int]:
        """The messages of `asked` that the template would read in that form at their place."""
        probes = [
            {**message, "content": probe_content(asked[index], f" {index}")} if index in asked else message
            for index, message in enumerate(messages)
        ]
        try:
            printed = self._template.print(probes, tools=tools, add_generation_prompt=prompt)
        except TemplateLimitError:
            raise
        except TemplateError:
            return set()
        return {index for index in asked if reads(printed, index, f" {index}")}

    def _ask(self, role: str) -> _Forms:
        try:
            answers = [tuple(map(self._is_read, case)) for case in self._cases(role)]
        except TemplateLimitError:  # each further attempt would take as long
            return _Forms(frozenset(), frozenset())
        text, parts = (any(column) for column in zip(*answers, strict=True)) if answers else (False, False)
        unread = {form for form, case in zip(_FORMS, ((False, True), (True, False)), strict=True) if case in answers}
        somewhere = frozenset(form for form, is_read in zip(_FORMS, (text, parts), strict=True) if is_read)
        return _Forms(somewhere - unread, somewhere)

    def _is_read(self, case: _Case) -> bool:
        messages, index, tools = case
        try:
            printed: Printed = self._template.print(messages, tools=tools)
        except TemplateLimitError:
            raise
        except TemplateError:
            return False
        return reads(printed, index)

    def _cases(self, role: str) -> Iterator[tuple[_Case, _Case]]:
        """Small conversations with a message of that role, as a pair: its content as text, and as parts."""
        try:
            small = smallest_conversation(self._template)
        except LoadError:  # whoever builds a renderer of this template is told
            return
        opening, answer, question = small.opening, small.answer, small.question
        arguments: tuple[Any, ...] = ({}, "{}")
        calls = [_calling(answer, value) for value in arguments]
        around: list[tuple[list[Mapping[str, Any]], dict[str, Any], list[Mapping[str, Any]]]]
        match role:
            case "user":
                before = [*small.before]
                around = [(before, {}, []), ([*opening, answer], {}, []), (before, {}, [answer, question])]
            case "assistant":
                around = [(opening, {}, []), (opening, {}, [question])]
                around += [(opening, {"tool_calls": calling["tool_calls"]}, []) for calling in calls]
            case "tool":
                fields = {"tool_call_id": _CALL_ID}
                around = [([*opening, calling], fields, behind) for calling in calls for behind in ([], [answer])]
            case "system":
                around = [([], {}, [question]), ([], {}, [question, answer, question])]
            case _:
                around = [([], {}, [question]), ([*small.before], {}, [question])]
        for before, fields, behind in around:
            for tools in (small.tools, [PROBE_TOOL]):
                text, parts = (
                    ([*before, probe_message(role, form, **fields), *behind], len(before), tools) for form in _FORMS
                )
                yield text, parts


def _shows_media(given: str | Sequence[Mapping[str, Any]]) -> bool:
    return not isinstance(given, str) and any(part["type"] != "text" for part in given)


def _in_form(message: Mapping[str, Any], form: ContentForm) -> dict[str, Any]:
    """The message, which shows no media, with its content in that form."""
    given = message["content"]
    if form == "parts":
        return {**message, "content": given if isinstance(given, list) else content(given, form)}
    texts = [given] if isinstance(given, str) else [part["text"] for part in given if part["text"]]
    return {**message, "content": _SEPARATOR.join(texts)}


def has_text(message: Mapping[str, Any]) -> bool:
    """Whether the content of a checked message says anything in text."""
    given = message.get("content") or ""
    return any(text.strip() for text in ([given] if isinstance(given, str) else [p.get("text", "") for p in given]))


_Case = tuple[list[Mapping[str, Any]], int, Sequence[Mapping[str, Any]] | None]
"""Messages, the index of the one that is asked about, tools."""


def _calling(answer: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    """A turn that calls the probe tool, its content in the form of `answer`."""
    call = {"id": _CALL_ID, "type": "function", "function": {"name": "probe", "arguments": arguments}}
    return {"role": "assistant", "content": content("", content_form_of(answer)), "tool_calls": [call]}


class ConvertingTemplate:
    """A template that is shown every message in a form that it reads; else it prints like the one that it wraps."""

    def __init__(self, template: Template) -> None:
        self.source = template.source
        self._template = template
        self._forms = ContentForms(template)

    def print(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> Printed:
        """As `Template.print`; the messages stay as many and in their order, so that every index is still right."""
        shown = self._forms.converted_in_place(messages, tools, prompt=add_generation_prompt)
        return self._template.print(shown, tools=tools, add_generation_prompt=add_generation_prompt)
