"""The format of a model family's turns, as frozen data."""

from dataclasses import dataclass

from renderers.errors import ConfigError
from renderers.parsing.response import ArgumentsForm
from renderers.parsing.syntaxes.syntax import ToolCallSyntax


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The markers around reasoning, and whether the generation prompt already opens it.

    `start` and `end` are single tokens where the tokenizer has them; `label` follows `start` and is not
    part of the reasoning. `verbatim`: the template prints reasoning unchanged directly between the markers,
    so that line breaks next to them belong to it; otherwise they are layout.
    """

    start: str = "<think>"
    end: str = "</think>"
    opened_by_prompt: bool = False
    label: str = ""
    verbatim: bool = False


@dataclass(frozen=True, slots=True)
class MessageChannels:
    """A turn written as messages: `start`, a header with `channel` and `message`, a body, one of `ends`."""

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    message: str = "<|message|>"
    ends: tuple[str, ...] = ("<|end|>", "<|call|>")


@dataclass(frozen=True, slots=True)
class Format:
    """How one model family writes a turn.

    `stop_tokens` end a turn; the canonical one, which a template prints at the end of a turn, comes first.
    `history_ends` are tokens that a template prints in place of a stop token for earlier turns.
    `tool_calls` is the syntax of calls in a turn of one stream; in a turn of several messages (`channels`)
    calls are messages. `arguments` is the form of tool-call arguments that the template reads, `call_id`
    the id of a call for which the model writes none (`{name}` and `{index}` are filled in).
    `leading_newlines` are those that the template prints between the generation prompt and the model's
    text, `trailing_newlines` those that it prints between content and the stop token. `one_call`: the
    template refuses a turn with several tool calls (Llama 3.1), so only the first is a call of the message
    and further ones are `surplus_call`; a renderer finds it by asking its template.

    Typed configurations (`renderers.configs`) set five rules of parsing. `calls_end_reasoning`: a tool-call
    marker inside open reasoning ends it, also where the call is cut off, unless the end marker of reasoning
    follows. `drops_repeated_start`: a start marker at the very start of reasoning that the prompt has
    opened is dropped. Without `assumes_open_reasoning`, a completion whose prompt is not given begins
    inside reasoning only if it ends reasoning that it has not begun. Without `reports_unknown_tools`, a
    call of a tool that is not offered is `ok`; without `reports_noncanonical`, so is a call in another form
    than the template's.

    Raises `ConfigError` for a text in place of a tuple of texts, for a format without a stop token, which
    would never end, and for a syntax without a marker, which would read no call.
    """

    name: str
    stop_tokens: tuple[str, ...]
    reasoning: ReasoningMarkers | None = None
    tool_calls: ToolCallSyntax | None = None
    channels: MessageChannels | None = None
    arguments: ArgumentsForm = "object"
    call_id: str = "call_{index}"
    history_ends: tuple[str, ...] = ()
    leading_newlines: str = ""
    trailing_newlines: str = ""
    one_call: bool = False
    calls_end_reasoning: bool = False
    drops_repeated_start: bool = False
    assumes_open_reasoning: bool = True
    reports_unknown_tools: bool = True
    reports_noncanonical: bool = True

    def __post_init__(self) -> None:
        syntax, tuples = self.tool_calls, {"stop_tokens": self.stop_tokens, "history_ends": self.history_ends}
        if syntax is not None:
            tuples |= {"start_markers": syntax.start_markers, "end_markers": syntax.end_markers}
        for name, value in tuples.items():  # a text would be read letter by letter
            is_tuple_of_text = isinstance(value, tuple) and all(isinstance(text, str) and text for text in value)
            if not is_tuple_of_text or not self.stop_tokens:
                allowed = ("a tuple of texts, of which stop_tokens needs one",)
                raise ConfigError(f"{name} of the Format {self.name}", value, allowed)
        if syntax is not None and not (syntax.start_markers or syntax.unmarked_starts):
            # A subclass without @dataclass has the fields of its base, which are empty.
            cure = "not empty unless unmarked_starts is given, in a class with @dataclass(frozen=True)"
            raise ConfigError(f"start_markers of {type(syntax).__name__}", (), (cure,))

    def __hash__(self) -> int:
        # Equal formats have equal names and stop tokens; a hash of all fields would take several times as long.
        return hash((self.name, self.stop_tokens))

    @property
    def sampled_markers(self) -> tuple[str, ...]:
        """The markers with which a model may begin its turn; in a prompt the template has printed them."""
        reasoning = () if self.reasoning is None else (self.reasoning.start, self.reasoning.end)
        return (*reasoning, *(() if self.tool_calls is None else self.tool_calls.start_markers))

    def __str__(self) -> str:
        parts = [f"stops {' '.join(self.stop_tokens)}"]
        if self.reasoning is not None:
            opened = ", opened by the prompt" if self.reasoning.opened_by_prompt else ""
            parts.append(f"reasoning {self.reasoning.start}{self.reasoning.label}...{self.reasoning.end}{opened}")
        if self.tool_calls is not None:
            limit = ", one call in a turn" if self.one_call else ""
            parts.append(f"{type(self.tool_calls).__name__} with {self.arguments} arguments{limit}")
        elif self.channels is not None:
            parts.append(f"calls as messages with {self.arguments} arguments")
        else:
            parts.append("no tool calls")
        return f"{self.name}: {'; '.join(parts)}"
