"""Tool calls and tools in the form that a template reads: arguments as an object or as text, no content as "" or None.

OpenAI's API carries arguments as text, and None as the content beside calls. A template that loops over
arguments (GLM, MiniMax, Qwen3.5) fails on text, one that writes them as JSON (gpt-oss, Llama 3.1, Qwen2.5)
prints text as a quoted string, one that joins strings (DeepSeek) fails on an object, and many print either.
DeepSeek V3 prints calls where content is None alone, its distillates fail on that. The template is printed
once with each combination, and the output shows which are read.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from renderers.errors import LoadError, TemplateLimitError
from renderers.messages import as_chat_tool
from renderers.template.chat_template import Messages, Template, Tools
from renderers.template.probe_conversation import (
    PROBE_TOOL,
    ProbeConversation,
    calling_turn,
    content,
    content_form_of,
    print_if_accepted,
    result_of_call,
    smallest_conversation,
)

_ARGUMENTS: Final = {"probe_key": "probe value"}
_ARGUMENT_TEXT: Final = json.dumps(_ARGUMENTS)
# How a turn with calls says that it has no content, in the order in which another way is looked for.
_NO_CONTENT: Final[Mapping[str, Mapping[str, Any]]] = {"text": {"content": ""}, "none": {"content": None}, "absent": {}}


class CallForms:
    """Converts turns with tool calls, and tools, to a form that a template reads.

    A call or a tool without a `type` is a function's; a schema alone becomes a tool of chat completions.
    Arguments that cannot be converted (text that is no JSON object) stay unchanged, and so does content that
    is not empty.
    """

    def __init__(self, template: Template) -> None:
        self._template = template

    def convert(self, messages: Messages, tools: Tools | None, prompt: bool) -> tuple[Messages, Tools | None]:
        """A `Conversion` of checked messages."""
        if any(message.get("tool_calls") for message in messages):
            messages = [self._converted(message) if message.get("tool_calls") else message for message in messages]
        return messages, None if tools is None else [as_chat_tool(tool) for tool in tools]

    def _converted(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        given = way = "text" if "content" in message else "absent"
        if not self._read_forms[given]:
            way = next((other for other, forms in self._read_forms.items() if forms), given)
        calls = [_converted_call(call, self._read_forms[way]) for call in message["tool_calls"]]
        if way == given or message.get("content"):
            return {**message, "tool_calls": calls}
        others = {name: value for name, value in message.items() if name != "content"}
        return {**others, **_NO_CONTENT[way], "tool_calls": calls}

    @cached_property
    def _read_forms(self) -> Mapping[str, frozenset[str]]:
        """By the way of having no content, the forms of arguments that the template prints: `text`, `object`.

        Those that it prints both in the last turn and before the result of the call, as far as it prints calls there.
        """
        found: list[Mapping[str, frozenset[str]]] = []
        try:
            smallest = smallest_conversation(self._template)
            result = result_of_call(content("probe result", content_form_of(smallest.answer)))
            for behind in ([], [result]):
                forms = {way: self._read_beside(fields, smallest, behind) for way, fields in _NO_CONTENT.items()}
                if any(forms.values()):
                    found.append(forms)
        except (LoadError, TemplateLimitError):  # raised again when the conversation itself is printed
            found.clear()
        if not found:
            return dict.fromkeys(_NO_CONTENT, frozenset[str]())
        return {way: frozenset.intersection(*(forms[way] for forms in found)) for way in _NO_CONTENT}

    def _read_beside(
        self, no_content: Mapping[str, Any], smallest: ProbeConversation, behind: Sequence[Mapping[str, Any]]
    ) -> frozenset[str]:
        def printed(arguments: Any) -> str:
            turn = calling_turn(smallest.answer, arguments)
            del turn["content"]
            messages = [*smallest.opening, {**turn, **no_content}, *behind]
            result = print_if_accepted(self._template, messages, [PROBE_TOOL])
            return "" if result is None else result.text

        text, of_object = printed(_ARGUMENT_TEXT), printed(_ARGUMENTS)
        # A template that joins a string and an object may print it as Python prints a dict.
        reads_object = "probe_key" in of_object and str(_ARGUMENTS) not in of_object
        # Text that is printed otherwise than the object is none that the model writes: Gemma's `{{"probe_key": ...}}`.
        reads_text = _ARGUMENT_TEXT in text and (text == of_object or not reads_object)
        return frozenset(name for name, is_read in (("text", reads_text), ("object", reads_object)) if is_read)


def _converted_call(call: Mapping[str, Any], forms: frozenset[str]) -> Mapping[str, Any]:
    """The call with a type, and with arguments in one of the forms where it is known how to convert them."""
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str) and forms == {"object"}:
        arguments = _json_object(arguments)
    elif isinstance(arguments, Mapping) and forms == {"text"}:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", **call, "function": {**call["function"], "arguments": arguments}}


def _json_object(text: str) -> Any:
    """The JSON object that the text holds, else the text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
