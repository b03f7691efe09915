"""The smallest conversation that a template prints; all probing of a template starts from it.

Most templates print a question and its answer. Some refuse them without tools (the `tool_use` template of
Hermes) or without a system message, and some read content only as a list of parts. So several conversations
are tried, the simplest first, until the texts of both the question and the answer are printed.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from renderers.errors import LoadError, TemplateError, TemplateLimitError
from renderers.template.chat_template import Messages, Printed, Template, Tools

ContentForm = Literal["text", "parts"]
"""A content as a string, or as a list of parts, which some templates of multimodal models need."""

PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": ".",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}
CALL_ID = "call00000"
_TEXT = "probe words"
# A field of a text part that no template prints, unless it prints the list of parts as data.
_FIELD, _VALUE = "probe_field", "probe value"


class ProbeConversation(NamedTuple):
    """A question, an answer, and what the template requires besides: messages `before`, one of `tools`."""

    before: tuple[Mapping[str, Any], ...]
    question: Mapping[str, Any]
    answer: Mapping[str, Any]
    tools: tuple[Mapping[str, Any], ...] | None

    @property
    def opening(self) -> list[Mapping[str, Any]]:
        """The messages before the answer."""
        return [*self.before, self.question]


def content(text: str, form: ContentForm) -> str | list[dict[str, str]]:
    """Content of this text in this form."""
    return text if form == "text" else [{"type": "text", "text": text}]


def probe_content(form: ContentForm, mark: str = "") -> str | list[dict[str, str]]:
    """Content that `reads` looks for; `mark` distinguishes several in one conversation."""
    text = _TEXT + mark
    return text if form == "text" else [{"type": "text", "text": text, _FIELD: f"{_VALUE}{mark}."}]


def probe_message(role: str, form: ContentForm, **fields: Any) -> dict[str, Any]:
    """A message whose content is a `probe_content`."""
    return {"role": role, "content": probe_content(form), **fields}


def calling_turns(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Turns that call the probe tool, without arguments, as object and as text: either may be refused."""
    return [calling_turn(answer, {}), calling_turn(answer, "{}")]


def result_of_call(content: str | list[dict[str, str]]) -> dict[str, Any]:
    """The result of the call of a `calling_turn`."""
    return {"role": "tool", "tool_call_id": CALL_ID, "name": "probe", "content": content}


def calling_turn(answer: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    """A turn that calls the probe tool, with content in the form of `answer`."""
    call = {"id": CALL_ID, "type": "function", "function": {"name": "probe", "arguments": arguments}}
    return {"role": "assistant", "content": content("", content_form_of(answer)), "tool_calls": [call]}


def reads(printed: Printed, index: int, mark: str = "") -> bool:
    """Whether the template printed the text of the `probe_content` of message `index`.

    False if the template printed nothing of it, or the list of parts as data, with every field of a part:
    `[{'type': 'text', ...}]`.
    """
    return f"{_VALUE}{mark}." not in printed.text and any(
        segment.origin is not None
        and segment.origin.message_index == index
        and segment.origin.path.startswith("content")
        for segment in printed.segments
    )


def print_if_accepted(
    template: Template, messages: Messages, tools: Tools | None, *, prompt: bool = False
) -> Printed | None:
    """The print of a conversation, None if the template refuses it. `prompt`: with the generation prompt.

    Raises `TemplateLimitError`: each further attempt would take as long.
    """
    try:
        return template.print(messages, tools=tools, add_generation_prompt=prompt)
    except TemplateLimitError:
        raise
    except TemplateError:
        return None


def smallest_conversation(template: Template) -> ProbeConversation:
    """The simplest conversation that the template prints whole, or most of. `LoadError` if none."""
    best: tuple[int, ProbeConversation] | None = None
    refusal = ""
    for candidate in _candidates():
        messages = [*candidate.opening, candidate.answer]
        try:
            printed = template.print(messages, tools=candidate.tools)
        except TemplateLimitError as error:  # each further attempt would take as long
            raise LoadError(
                f"the chat template refuses a plain question and answer: {error.template_message}"
            ) from error
        except TemplateError as error:
            refusal = refusal or error.template_message
            continue
        count = sum(reads(printed, index) for index in range(len(messages)))
        if best is None or count - len(messages) > best[0]:
            best = count - len(messages), candidate
        if count == len(messages):
            break
    if best is None:
        raise LoadError(
            f"the chat template refuses a plain question and answer, with tools and a system message too: {refusal}"
        )
    return _plain(best[1])


def _candidates() -> Iterator[ProbeConversation]:
    """Conversations to try, the simplest first: text before parts, tools and a system message last."""
    forms: tuple[ContentForm, ...] = ("text", "parts")
    alike_first = sorted(itertools.product(forms, forms), key=lambda pair: pair[0] != pair[1])
    systems: list[tuple[Mapping[str, Any], ...]] = [(), *((probe_message("system", form),) for form in forms)]
    for tools, before, (of_user, of_assistant) in itertools.product((None, (PROBE_TOOL,)), systems, alike_first):
        question, answer = probe_message("user", of_user), probe_message("assistant", of_assistant)
        yield ProbeConversation(before, question, answer, tools)


def _plain(conversation: ProbeConversation) -> ProbeConversation:
    """The conversation without the probe field in its parts."""

    def plain(message: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**message, "content": content(_TEXT, content_form_of(message))}

    before, question, answer, tools = conversation
    return ProbeConversation(tuple(map(plain, before)), plain(question), plain(answer), tools)


def content_form_of(message: Mapping[str, Any]) -> ContentForm:
    """The form of a message's content."""
    return "text" if isinstance(message.get("content"), str) else "parts"
