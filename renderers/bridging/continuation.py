"""What a template does to a conversation when new messages follow an assistant's turn.

A bridge keeps history as it was sampled and prints only the new messages. Whether a full render would give
the same depends on the template: it may drop earlier reasoning, move tools to the last user message, number
images, look up the name of a tool. The source does not show this, so it is tested by printing: for each shape
of conversation (which roles follow, with which parts, after a turn with or without tool calls) small
conversations are printed and compared. The results are cached; a bridge then does no work for the turns
before it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from renderers.bridging.probe_messages import ProbeMessages, unused_call_ids
from renderers.bridging.turn_printer import TurnPrinter
from renderers.errors import TemplateError
from renderers.messages import part_kind, without_media
from renderers.parsing.format import Format
from renderers.parsing.response import ParsedResponse
from renderers.template.chat_template import Messages, Tools
from renderers.template.probe_conversation import PROBE_TOOL

# A text that occurs in no real message.
_PROBE_REASONING = "thought 5c1fe0a7"


class ContinuationShape(NamedTuple):
    """What decides how a template continues: the new messages without their text, and what the turn before them holds.

    A new message is (role, types of its parts or None for text, whether it names its tool).
    """

    new_messages: tuple[tuple[str, tuple[str, ...] | None, bool], ...]
    has_text: bool
    called_tools: bool
    has_tools: bool


class Continuation(NamedTuple):
    """How a template continues conversations of one shape, or one conversation.

    `keeps_history`: all but reasoning is printed as before. `keeps_prompt`: the text before the turn,
    reasoning included, is printed as before. `keeps_reasoning`, `keeps_empty_reasoning`: so is the turn, with
    reasoning or with what is printed where there is none (`<think>\n\n</think>`). `needs_history`: what is
    printed depends on earlier messages. `counts_media`: it depends on nothing of them but which media they
    show, in which order (`Picture 2: `). For a shape, each field holds after every history; `at_best` has the
    fields that hold after some history, if these are more.
    """

    accepted: bool = False
    ends_turn: bool = False
    keeps_history: bool = False
    keeps_prompt: bool = False
    keeps_reasoning: bool = False
    keeps_empty_reasoning: bool = False
    needs_history: bool = True
    counts_media: bool = False
    needs_tools: bool = True
    at_best: Continuation | None = None


class TurnSummary(NamedTuple):
    """What a bridge needs of a sampled turn; `calls` are (id, name) of its well-formed tool calls."""

    stopped: bool
    reasoning_complete: bool
    has_text: bool
    called_tools: bool
    calls: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, parsed: ParsedResponse) -> TurnSummary:
        calls = parsed.to_message().get("tool_calls", []) if parsed.tool_calls else []
        return cls(
            parsed.stopped,
            parsed.reasoning_complete,
            bool(parsed.content.strip()),
            bool(parsed.tool_calls),
            tuple([(call["id"], call["function"]["name"]) for call in calls]),
        )


def shape_of(new_messages: Messages, turn: TurnSummary, tools: Tools | None) -> ContinuationShape:
    """The shape of checked new messages after a turn."""
    return ContinuationShape(
        tuple([(message["role"], _part_types(message.get("content")), "name" in message) for message in new_messages]),
        turn.has_text,
        turn.called_tools,
        tools is not None,
    )


def _part_types(content: Any) -> tuple[str, ...] | None:
    """The types of the parts, several of one type in a row once; None for text."""
    if not isinstance(content, list):
        return None
    types: list[str] = []
    for part in content:
        kind = part_kind(part)
        if types[-1:] != [kind]:
            types.append(kind)
    return tuple(types)


class Continuations:
    """Finds how a template continues, once for each shape. Safe to share between threads: each would find the same."""

    def __init__(
        self, printer: TurnPrinter, probes: ProbeMessages, format: Format, *, modalities: Sequence[str]
    ) -> None:
        self._printer = printer
        self._probes = probes
        self._reasoning = format.reasoning
        self._ends = (*format.stop_tokens, *format.history_ends)
        self._modalities = tuple(modalities)
        self._cache: dict[ContinuationShape, Continuation] = {}

    def of_shape(self, shape: ContinuationShape) -> Continuation:
        """What holds for conversations of this shape."""
        cached = self._cache.get(shape)
        if cached is None:
            if len(self._cache) >= 1024:  # shapes come from callers' messages
                self._cache.clear()
            cached = self._cache[shape] = self._probe(shape)
        return cached

    def of_conversation(
        self, history: Messages, turn: Mapping[str, Any], new_messages: Messages, tools: Tools | None
    ) -> Continuation:
        """What holds for one conversation of checked messages, printed several times and not cached."""
        try:
            *history, turn = without_media([*history, turn])
            return self._compare(history, turn, without_media(new_messages), tools, None)
        except TemplateError:
            return Continuation()

    def _probe(self, shape: ContinuationShape) -> Continuation:
        new = self._new_messages(shape)
        opening = self._probes.opening()
        tools = [PROBE_TOOL] if shape.has_tools else None
        calls = [self._probes.call(m["tool_call_id"], "probe") for m in new if m["role"] == "tool"]
        if shape.called_tools and not calls:
            calls = [self._probes.call(next(unused_call_ids()), "probe")]
        turn = self._probes.turn(calls, has_text=shape.has_text)
        try:
            shortest = self._printer.print_continued([*opening, turn, *new], len(opening), tools)
        except TemplateError:
            return Continuation()
        if shortest is None:
            return Continuation(accepted=True)
        found = []
        for history in self._histories():
            # A template that knows no system messages, or no tools, refuses some of them.
            with contextlib.suppress(TemplateError):
                found.append(self._compare(history, turn, new, tools, shortest.extension))
        if not found:
            return Continuation()
        needs_history = any(each.needs_history for each in found)
        needs_tools = tools is not None and self._needs_tools([*opening, turn, *new], len(opening), shortest.extension)
        counts_media = needs_history and self._counts_media(turn, new, tools)
        always, sometimes = (
            Continuation(
                accepted=True,
                ends_turn=of_all(each.ends_turn for each in found),
                keeps_history=of_all(each.keeps_history for each in found),
                keeps_prompt=of_all(each.keeps_prompt for each in found),
                keeps_reasoning=of_all(each.keeps_reasoning for each in found),
                keeps_empty_reasoning=of_all(each.keeps_empty_reasoning for each in found),
                needs_history=needs_history,
                counts_media=counts_media,
                needs_tools=needs_tools,
            )
            for of_all in (all, any)
        )
        return always if always == sometimes else always._replace(at_best=sometimes)

    def _new_messages(self, shape: ContinuationShape) -> list[dict[str, Any]]:
        ids = unused_call_ids()
        messages = []
        for number, (role, types, is_named) in enumerate(shape.new_messages):
            text = f"new {number}"
            message = self._probes.message(role, text)
            if types is not None:
                # Two texts where a message has one or more: how they are joined may depend on the conversation.
                values = {"text": (text, "more text")}
                message["content"] = [
                    {"type": kind, kind: value} for kind in types for value in values.get(kind, ("<media>",))
                ]
            if role == "tool":
                message["tool_call_id"] = next(ids)
            if is_named:
                message["name"] = "probe"
            messages.append(message)
        return messages

    def _compare(
        self,
        history: Messages,
        turn: Mapping[str, Any],
        new: Messages,
        tools: Tools | None,
        shortest_extension: str | None,
    ) -> Continuation:
        """What holds after one history; `shortest_extension` is the text printed after one question."""
        continued = self._printer.print_continued([*history, turn, *new], len(history), tools)
        if continued is None:
            return Continuation(accepted=True)
        prompt = self._printer.print_prompt(history, tools)
        ending = self._printer.template.print([*history, turn], tools=tools).text
        keeps_prompt, keeps_reasoning = self._keeps_reasoning(history, turn, new, tools)
        strip = self._without_reasoning
        return Continuation(
            accepted=True,
            ends_turn=True,
            keeps_history=self._is_kept(strip(prompt), strip(ending), strip(continued.kept_text)),
            keeps_prompt=keeps_prompt and continued.kept_text.startswith(prompt),
            keeps_reasoning=keeps_reasoning,
            keeps_empty_reasoning=self._is_kept(prompt, ending, continued.kept_text),
            needs_history=shortest_extension != continued.extension,
        )

    def _is_kept(self, prompt: str, ending: str, kept_text: str) -> bool:
        """Whether the sampled text is kept; `ending` is a print that ends with the turn behind `prompt`."""
        if not (ending.startswith(kept_text) and ending.startswith(prompt)):
            return False
        rest = ending[len(kept_text) :]
        return not rest.strip() or rest.startswith(self._ends)

    def _keeps_reasoning(
        self, history: Messages, turn: Mapping[str, Any], new: Messages, tools: Tools | None
    ) -> tuple[bool, bool]:
        """Whether the prompt's reasoning, and the turn's, is printed as before once new messages follow."""
        ways = (_with_field,) if self._reasoning is None else (_with_field, self._within_content)
        for add_reasoning in ways:
            reasoned = [add_reasoning(message) if message["role"] == "assistant" else message for message in history]
            ending = self._printer.template.print([*reasoned, add_reasoning(turn)], tools=tools).text
            prompt = self._printer.print_prompt(reasoned, tools)
            if _PROBE_REASONING in ending[len(prompt) :]:
                continued = self._printer.print_continued([*reasoned, add_reasoning(turn), *new], len(reasoned), tools)
                if continued is None:
                    return False, False
                return continued.kept_text.startswith(prompt), self._is_kept(prompt, ending, continued.kept_text)
        # The template does not print even the last turn's reasoning. Without markers, no turn has reasoning.
        kept = self._reasoning is None
        return kept, kept

    def _within_content(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        """The turn with reasoning in its content, for a template that reads no field for it."""
        assert self._reasoning is not None
        content = f"{self._reasoning.start}\n{_PROBE_REASONING}\n{self._reasoning.end}\n\n."
        return {**turn, **self._probes.message("assistant", content)}

    def _counts_media(self, turn: Mapping[str, Any], new: Messages, tools: Tools | None) -> bool:
        """Whether one question with the media of a history gives the same extension as the history."""
        compared = False
        for media in ((), self._modalities[:1], (*self._modalities, *self._modalities)):
            opening = self._probes.opening(media)
            try:
                shortest = self._printer.print_continued([*opening, turn, *new], len(opening), tools)
            except TemplateError:
                return False
            for history in self._histories_with(media):
                with contextlib.suppress(TemplateError):
                    continued = self._printer.print_continued([*history, turn, *new], len(history), tools)
                    if shortest is None or continued is None or shortest.extension != continued.extension:
                        return False
                    compared = True
        return compared

    def _needs_tools(self, messages: Messages, turn: int, extension: str) -> bool:
        """Whether the template prints another extension without the tools."""
        try:
            without = self._printer.print_continued(messages, turn, None)
        except TemplateError:
            return True
        return without is None or without.extension != extension

    def _histories(self) -> Iterator[list[Mapping[str, Any]]]:
        """Histories of many kinds, with a medium of each modality and without any."""
        for modality in self._modalities:  # templates number each modality by itself
            yield from self._histories_with((modality,))
        yield from self._histories_with(())

    def _histories_with(self, media: Sequence[str]) -> Iterator[list[Mapping[str, Any]]]:
        """Histories with these media, half in each of two questions, and some with a call and result."""
        make = self._probes
        call = make.turn([make.call("earlier00", "earlier")])
        cycle = [call, make.message("tool", "earlier result", tool_call_id="earlier00", name="earlier")]
        system = make.message("system", "earlier system message")
        half = (len(media) + 1) // 2
        first: list[Mapping[str, Any]] = []
        if media:
            first = [make.question("earlier question 1", media[:half]), make.message("assistant", "earlier answer 1")]
        question, last = make.question("earlier question 2", media[half:]), make.question("earlier question 3")
        answer = make.message("assistant", "earlier answer 2")
        for rest in (
            [question, *cycle, answer, last],
            [question, answer, last, *cycle],
            [question, answer, last],
        ):
            yield [system, *first, *rest]
            yield [*first, *rest]

    def _without_reasoning(self, text: str) -> str:
        if self._reasoning is None:
            return text
        start, end = re.escape(self._reasoning.start), re.escape(self._reasoning.end)
        return re.sub(rf"{start}.*?(?:{end}|\Z)\s*|{end}\s*", "", text, flags=re.DOTALL)


def _with_field(turn: Mapping[str, Any]) -> dict[str, Any]:
    return {**turn, "reasoning_content": _PROBE_REASONING, "thinking": _PROBE_REASONING}
