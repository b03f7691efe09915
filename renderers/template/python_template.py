"""Prompts that a vendor prints with Python code instead of a Jinja template.

A prompt function is `prompt(messages, tools, *, add_generation_prompt, <options>) -> str`. It joins its pieces with
`traced_join` (an f-string would drop the spans), puts a `message_mark` before the text of each message, and raises
`TemplateError` for a conversation that its format cannot express.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from renderers.errors import TemplateError, TemplateLimitError
from renderers.template.chat_template import NESTED_TOO_DEEPLY, Messages, Printed, Tools, segments_of
from renderers.template.traced import TracedStr, loop_mark, plain
from renderers.template.traced_input import traced_message, traced_tools


def message_mark(index: int | None) -> TracedStr:
    """An empty string that gives the text behind it, up to the next, to a message, or (None) to none."""
    return loop_mark(0, index)  # a prompt function has one loop, the one over the messages


class PythonTemplate:
    """A prompt function with the interface of `ChatTemplate`. Safe to run from many threads.

    `source` is a stable description of the format with the markers that it prints; `model` names the model
    in errors; `variables` are values for the function's options; a single `print` may override them.
    """

    def __init__(
        self,
        prompt: Callable[..., str],
        *,
        source: str,
        model: str,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.source = source
        self._prompt = prompt
        self._model = model
        parameters = inspect.signature(prompt).parameters.values()
        options = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        self._known_options = [name for name in options if name != "add_generation_prompt"]
        self._variables = self._checked(variables or {})

    def print(
        self, messages: Messages, *, tools: Tools | None = None, add_generation_prompt: bool = False, **variables: Any
    ) -> Printed:
        """Run the prompt function over checked messages without media. Raises `TemplateError`."""
        chosen = {**self._variables, **self._checked(variables)}
        try:
            text = self._prompt(
                [traced_message(message, index) for index, message in enumerate(messages)],
                None if tools is None else traced_tools(tools),
                add_generation_prompt=add_generation_prompt,
                **chosen,
            )
        except RecursionError as error:
            raise TemplateLimitError(NESTED_TOO_DEEPLY, model=self._model) from error
        except TemplateError as refusal:
            raise TemplateError(
                refusal.template_message, model=self._model, cure=refusal.cure, message_index=refusal.message_index
            ) from refusal
        return Printed(plain(text), segments_of(text))

    def _checked(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        # Jinja ignores variables that a template does not read; here the options are known, so a wrong name is refused.
        for name in variables:
            if name not in self._known_options:
                raise TemplateError(
                    f"there is no option {name!r}",
                    model=self._model,
                    cure=f"The options of this format are {', '.join(self._known_options) or 'none'}.",
                )
        return dict(variables)
