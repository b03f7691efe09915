"""Small messages with which a template is tested, in the forms that it reads."""

import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from renderers.errors import TemplateError, TemplateLimitError
from renderers.template.chat_template import Template
from renderers.template.content_forms import ContentForms
from renderers.template.probe_conversation import PROBE_TOOL, ProbeConversation


def unused_call_ids(used: Collection[str] = ()) -> Iterator[str]:
    """Ids for tool calls that have none: nine letters and digits, as the strictest templates require."""
    return (call_id for number in itertools.count() if (call_id := f"call{number:05d}") not in used)


class ProbeMessages:
    """Makes probe messages with their content in the form that a template reads.

    No two messages of one conversation are equal: a template may find the last question by comparing messages
    (Mistral's). `before` are the messages that the template requires before any question; usually none.
    `arguments` is `object` or `json`: how the template reads the arguments of a tool call. `one_call`:
    whether the template refuses turns with several, which is found by printing such a turn.
    """

    def __init__(self, template: Template, smallest: ProbeConversation, forms: ContentForms, arguments: str) -> None:
        self._forms = forms
        self._arguments: Any = {} if arguments == "object" else json.dumps({})
        self.before = smallest.before
        self.one_call = not self._is_printed(template, 2) and self._is_printed(template, 1)

    def message(self, role: str, text: str, **fields: Any) -> dict[str, Any]:
        return {"role": role, "content": self._forms.content(role, text), **fields}

    def opening(self, media: Sequence[str] = ()) -> list[Mapping[str, Any]]:
        """The shortest conversation that an assistant answers; its question shows media of these modalities."""
        return [*self.before, self.question("question", media)]

    def question(self, text: str, media: Sequence[str] = ()) -> dict[str, Any]:
        """A question that shows media of these modalities before its text."""
        if not media:
            return self.message("user", text)
        parts = [{"type": kind, kind: "<media>"} for kind in media]
        return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}

    def call(self, call_id: str, name: str) -> dict[str, Any]:
        """A tool call without arguments."""
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": self._arguments}}

    def turn(self, calls: Sequence[Mapping[str, Any]], *, has_text: bool = False) -> dict[str, Any]:
        """An assistant's turn that makes these calls, with text beside them or without; without calls, only text.

        It makes the first of them alone where the template refuses several.
        """
        if not calls:
            return self.message("assistant", "turn")
        made = list(calls[:1] if self.one_call else calls)
        return self.message("assistant", "turn" if has_text else "", tool_calls=made)

    def _is_printed(self, template: Template, count: int) -> bool:
        """Whether the template prints a turn with this many calls and their results, or takes too long for it."""
        ids = list(itertools.islice(unused_call_ids(), count))
        turn = self.message("assistant", "", tool_calls=[self.call(each, "probe") for each in ids])
        results = [self.message("tool", f"result {each}", tool_call_id=each, name="probe") for each in ids]
        try:
            template.print([*self.opening(), turn, *results], tools=[PROBE_TOOL])
        except TemplateLimitError:
            return True
        except TemplateError:
            return False
        return True
