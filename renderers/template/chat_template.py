"""A chat template: what it is given, what it prints, with the origin of each character."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Protocol

import jinja2

from renderers.errors import LoadError, TemplateError, TemplateLimitError, WorkLimitError
from renderers.process.caches import ByteLRU, cache_key
from renderers.template.environment import TracingEnvironment
from renderers.template.syntax_rewriting import RUN
from renderers.template.traced import Origin, TracedStr, plain
from renderers.template.traced_input import TracedMessage, traced_message, traced_tools
from renderers.template.work_limit import InputDict, InputList, TemplateRun

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]

# Python raises these inside the expressions of a template, and Jinja does not wrap them.
_EXPRESSION_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)
NESTED_TOO_DEEPLY = "it calls itself, or a tool or tool call is nested, deeper than Python allows"


class Segment(NamedTuple):
    """Characters `start:end`: printed for message `owner` (-1: none), from `origin` (None: the template)."""

    start: int
    end: int
    owner: int
    origin: Origin | None


class Printed(NamedTuple):
    """A template's output: the text and segments that partition it."""

    text: str
    segments: list[Segment]


class Template(Protocol):
    """Prints prompts: a Jinja chat template or Python code. `source` is its text or describes it."""

    source: str

    def print(
        self, messages: Messages, *, tools: Tools | None = None, add_generation_prompt: bool = False
    ) -> Printed: ...


#: Messages, tools, and whether with the generation prompt -> messages and tools as a template reads them.
Conversion = Callable[[Messages, Tools | None, bool], tuple[Messages, Tools | None]]


class ConvertedTemplate:
    """A template whose conversations go through a conversion before it prints them."""

    def __init__(self, template: Template, convert: Conversion) -> None:
        self.source = template.source
        self._template = template
        self._convert = convert

    def print(self, messages: Messages, *, tools: Tools | None = None, add_generation_prompt: bool = False) -> Printed:
        """The print of the converted conversation; message indices of the result are those of `messages`."""
        messages, tools = self._convert(messages, tools, add_generation_prompt)
        return self._template.print(messages, tools=tools, add_generation_prompt=add_generation_prompt)


class ChatTemplate:
    """One Jinja chat template, compiled once and safe to run from many threads.

    `model` names the model in errors; `variables` are the template's variables beside the conversation
    (`bos_token`, `eos_token`, `enable_thinking`...); `now` is the clock of `strftime_now`.
    """

    def __init__(
        self,
        source: str,
        *,
        model: str,
        variables: Mapping[str, Any] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self.model = model
        self._variables = dict(variables or {})
        self._names_tools = "tools" in source
        self._tools: ByteLRU[bytes, list[Any]] = ByteLRU(2**20)
        try:
            with TemplateRun():  # Jinja evaluates constant expressions while it compiles
                self._template = TracingEnvironment(now).compile_chat_template(source)
        except jinja2.TemplateSyntaxError as error:
            reason = f"line {error.lineno}: {error.message or 'syntax error'}"
            raise LoadError(f"the chat template of {model} is not valid Jinja, {reason}") from error
        except (SyntaxError, RecursionError, ValueError, MemoryError) as error:
            # Jinja generated invalid Python: a stray break, deep nesting, half a surrogate pair.
            reason = str(error) or type(error).__name__
            raise LoadError(f"the chat template of {model} is not valid Jinja: {reason}") from error

    def print(
        self, messages: Messages, *, tools: Tools | None = None, add_generation_prompt: bool = False, **variables: Any
    ) -> Printed:
        """Run the template over checked messages without their media.

        Raises `TemplateError` with the template's own message, `TemplateLimitError` if the run exceeds its
        work limit.
        """
        run = TemplateRun(len(messages), (messages, tools))
        try:
            with run:
                text = self._template.render(
                    messages=[traced_message(message, index) for index, message in enumerate(messages)],
                    tools=self._traced_tools(tools) if tools is not None and self._names_tools else None,
                    add_generation_prompt=add_generation_prompt,
                    **{"documents": None, **self._variables, **variables, RUN: run},
                )
            return Printed(plain(text), segments_of(text))
        except (WorkLimitError, RecursionError, MemoryError) as error:
            nested = isinstance(error, RecursionError)
            reason = str(error) or "there is not enough memory for the text that it makes"
            raise TemplateLimitError(
                NESTED_TOO_DEEPLY if nested else reason, model=self.model, message_index=run.last_entered
            ) from error
        except (jinja2.TemplateError, *_EXPRESSION_ERRORS) as error:
            raise TemplateError(
                # Characters of a template's own message in an error.
                _with_builtin_type_names(str(error)[:2000]) or type(error).__name__,
                model=self.model,
                cure=_cure(error, messages, lacks_tools=tools is None and self._names_tools),
                message_index=run.last_entered,
            ) from error

    def _traced_tools(self, tools: Tools) -> list[Any]:
        """The tools as the template gets them, cached: large, and equal in every turn."""
        key = cache_key(list(tools))
        if key is None:
            return traced_tools(tools)  # they hold something other than plain data
        traced = self._tools.get(key)
        if traced is None:
            traced = traced_tools(tools)
            self._tools.put(key, traced, 20 * len(key))
        return traced


class TemplateWithTools:
    """Two templates of one model: `default`, and `tool_use` for conversations with tools.

    As in transformers, `tool_use` is used for an empty list of tools too, and without `default` a
    conversation needs tools. `model` names the model in errors.
    """

    def __init__(self, default: Template | None, tool_use: Template, *, model: str) -> None:
        self._default, self._tool_use = default, tool_use
        self._model = model
        self.source = ("" if default is None else default.source) + tool_use.source

    def print(self, messages: Messages, *, tools: Tools | None = None, add_generation_prompt: bool = False) -> Printed:
        template = self._default if tools is None else self._tool_use
        if template is None:
            raise TemplateError(
                "this model has a template for conversations with tools, and none for others",
                model=self._model,
                cure="Pass tools=, or load the renderer with another chat_template=.",
            )
        return template.print(messages, tools=tools, add_generation_prompt=add_generation_prompt)


def _cure(error: Exception, messages: Messages, *, lacks_tools: bool) -> str:
    if lacks_tools and isinstance(error, TypeError) and "NoneType" in str(error):
        return "If it prints only conversations with tools, pass tools=; a list without any is enough for some."
    if "integer string conversion" in str(error):  # the message of CPython
        return "An integer of the conversation has more digits than Python writes: pass it as text."
    if not isinstance(error, jinja2.TemplateError) or isinstance(error, jinja2.UndefinedError):
        arguments = [call["function"]["arguments"] for m in messages for call in m.get("tool_calls", ())]
        if any(isinstance(value, str) for value in arguments):
            dicts = "json.loads(arguments), or {} where that gives none"
            return f"If it cannot read tool-call arguments as text, pass a dict in their place: {dicts}."
        if arguments:
            return "If it cannot read tool-call arguments as a dict, pass them as JSON text: json.dumps(arguments)."
    return "Change the conversation so that the template accepts it (order of roles, content type)."


def _with_builtin_type_names(message: str) -> str:
    """An error message of Jinja or Python with `str`, `dict` and `list` in place of our subclasses of them."""
    for ours, known in ((TracedStr, "str"), (TracedMessage, "dict"), (InputDict, "dict"), (InputList, "list")):
        message = message.replace(f"{ours.__module__}.{ours.__qualname__} object", f"{known} object")
        message = message.replace(f"'{ours.__name__}'", f"'{known}'").replace(f'"{ours.__name__}"', f'"{known}"')
    return message


def segments_of(text: str) -> list[Segment]:
    """Segments that partition a printed text, from its spans and loop marks."""
    spans = text.spans if isinstance(text, TracedStr) else ()
    segments: list[Segment] = []
    loops: list[tuple[int, int]] = []  # the running loops over messages, innermost last, and their messages
    printing = -1  # the message of the innermost loop
    position = 0
    for start, end, origin in spans:
        if start > position:
            segments.append(Segment(position, start, printing, None))
            position = start
        if isinstance(origin, Origin):
            segments.append(Segment(start, end, origin.message_index if printing < 0 else printing, origin))
            position = end
            continue
        loop, message_index = origin
        # A mark of the innermost loop begins its next pass, or ends it.
        if loops and loops[-1][0] == loop:
            loops.pop()
        if message_index is not None:
            loops.append((loop, message_index))
        printing = loops[-1][1] if loops else -1
    if len(text) > position:
        segments.append(Segment(position, len(text), printing, None))
    return segments
