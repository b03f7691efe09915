"""Tool-call arguments in the form that a template reads: a JSON object, or the text of one.

OpenAI's API carries arguments as text. A template that loops over arguments (GLM, MiniMax, Qwen3.5) fails on text,
one that joins strings (DeepSeek) fails on an object, and many print either. The template is printed once with each
form, and the output shows which are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from renderers.errors import TemplateError
from renderers.template.chat_template import Messages, Printed, Template, Tools
from renderers.template.probe_conversation import PROBE_TOOL, calling_turn, smallest_conversation

_ARGUMENTS = {"probe_key": "probe value"}
_ARGUMENT_TEXT = json.dumps(_ARGUMENTS)


class ArgumentConvertingTemplate:
    """Wraps a template: converts arguments that it does not read to the form that it reads, then prints.

    Arguments that cannot be converted (text that is no JSON object) stay unchanged.
    """

    def __init__(self, template: Template) -> None:
        self.source = template.source
        self._template = template

    def print(self, messages: Messages, *, tools: Tools | None = None, add_generation_prompt: bool = False) -> Printed:
        """As `Template.print`; message indices of the result are those of `messages`."""
        if any(message.get("tool_calls") for message in messages):
            messages = [self._converted(message) for message in messages]
        return self._template.print(messages, tools=tools, add_generation_prompt=add_generation_prompt)

    def _converted(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if not message.get("tool_calls"):
            return message
        return {**message, "tool_calls": [self._converted_call(call) for call in message["tool_calls"]]}

    def _converted_call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str) and self._read_forms == {"object"}:
            arguments = _json_object(arguments)
        elif isinstance(arguments, Mapping) and self._read_forms == {"json"}:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    @cached_property
    def _read_forms(self) -> frozenset[str]:
        """The forms that the template reads: `json` (text), `object`."""
        forms: set[str] = set()
        if (text := self._print_call(_ARGUMENT_TEXT)) is not None and _ARGUMENT_TEXT in text:
            forms.add("json")
        text = self._print_call(_ARGUMENTS)
        # A template that joins a string and an object may print it as Python prints a dict.
        if text is not None and _ARGUMENTS["probe_key"] in text and str(_ARGUMENTS) not in text:
            forms.add("object")
        return frozenset(forms)

    def _print_call(self, arguments: Any) -> str | None:
        smallest = smallest_conversation(self._template)
        messages = [*smallest.opening, calling_turn(smallest.answer, arguments)]
        try:
            return self._template.print(messages, tools=[PROBE_TOOL]).text
        except TemplateError:
            return None


def _json_object(text: str) -> Any:
    """The JSON object that the text holds, else the text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
