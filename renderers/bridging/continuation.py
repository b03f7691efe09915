"""What a template does to a conversation when new messages follow an assistant's turn.

A bridge keeps history as it was sampled and prints only what is new. Whether that is what the template means depends on
the template: it may drop earlier reasoning, move tools to the last user message, number images, look up the name of a
tool. None of this can be read off its source, so it is *asked*: for each shape of conversation (which roles follow,
with which parts, behind a turn with or without tool calls) small conversations are printed and compared. The answers
are kept; a bridge then costs nothing for the turns before it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from renderers.bridging.turn_printer import TurnPrinter
from renderers.errors import TemplateError
from renderers.messages import part_kind, without_media
from renderers.parsing.format import Format
from renderers.parsing.response import ParsedResponse
from renderers.template.content_forms import ContentForms
from renderers.template.probe_conversation import PROBE_TOOL, ProbeConversation

# Unlike anything that a message of a real history says.
_THOUGHT = "thought 5c1fe0a7"


class ContinuationShape(NamedTuple):
    """What decides how a template continues: the new messages without their words, and what the turn before did.

    A new message is (role, types of its parts or None for text, whether it names its tool).
    """

    new: tuple[tuple[str, tuple[str, ...] | None, bool], ...]
    spoke: bool
    called_tools: bool
    has_tools: bool


class Continuation(NamedTuple):
    """How a template continues a conversation of one shape, or one conversation.

    `keeps_history`: all but reasoning is printed as before; `keeps_prompt`: what stands before the turn, reasoning
    included; `keeps_reasoning`, `keeps_empty_reasoning`: the turn, with reasoning or with what is printed where there
    is none (`<think>\n\n</think>`). What is said of a shape holds behind every history; `at_best` says what holds
    behind some, where that is more. `needs_history`: what is printed depends on earlier messages; `counts_media`: on
    nothing of them but which media they show, and in which order (`Picture 2: `).
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
    """What a bridge must know of a sampled turn; `calls` are (id, name) of its well-formed tool calls."""

    stopped: bool
    reasoning_complete: bool
    spoke: bool
    called_tools: bool
    calls: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, parsed: ParsedResponse) -> TurnSummary:
        calls = parsed.to_message().get("tool_calls", [])
        return cls(
            parsed.stopped,
            parsed.reasoning_complete,
            bool(parsed.content.strip()),
            bool(parsed.tool_calls),
            tuple((call["id"], call["function"]["name"]) for call in calls),
        )


def shape_of(
    new: Sequence[Mapping[str, Any]], turn: TurnSummary, tools: Sequence[Mapping[str, Any]] | None
) -> ContinuationShape:
    """The shape of checked new messages behind a turn."""
    return ContinuationShape(
        tuple((message["role"], _part_types(message.get("content")), "name" in message) for message in new),
        turn.spoke,
        turn.called_tools,
        tools is not None,
    )


def _part_types(content: Any) -> tuple[str, ...] | None:
    if not isinstance(content, list):
        return None
    types = [part_kind(part) for part in content]
    return tuple(kind for index, kind in enumerate(types) if index == 0 or types[index - 1] != kind)


def unused_ids(used: Collection[str]) -> Iterator[str]:
    """Ids for tool calls that have none: nine letters and digits, as the strictest templates want them."""
    return (made_up for number in itertools.count() if (made_up := f"call{number:05d}") not in used)


class ProbeMessages:
    """Messages without meaning, in the forms that a template reads.

    No two of one conversation are equal: a template may look for the last question by comparing messages (Mistral's).
    `before` is what the template wants before any question, mostly nothing. `arguments` is `object` or `json`: how it
    reads those of a tool call.
    """

    def __init__(self, small: ProbeConversation, forms: ContentForms, arguments: str) -> None:
        self._forms = forms
        self._arguments: Any = {} if arguments == "object" else json.dumps({})
        self.before = small.before

    def message(self, role: str, text: str, **fields: Any) -> dict[str, Any]:
        return {"role": role, "content": self._forms.content(role, text), **fields}

    def opening(self, media: Sequence[str] = ()) -> list[Mapping[str, Any]]:
        """The shortest conversation that an assistant answers; its question shows media of these modalities."""
        return [*self.before, self.question("question", media)]

    def question(self, words: str, media: Sequence[str] = ()) -> dict[str, Any]:
        """A question that shows media of these modalities before its words."""
        if not media:
            return self.message("user", words)
        parts = [{"type": kind, kind: "<media>"} for kind in media]
        return {"role": "user", "content": [*parts, {"type": "text", "text": words}]}

    def call(self, call_id: str, name: str) -> dict[str, Any]:
        """A tool call without arguments."""
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": self._arguments}}

    def turn(self, calls: Sequence[Mapping[str, Any]], *, spoke: bool = False) -> dict[str, Any]:
        """An assistant's turn that makes these calls, beside words or without; without calls, one of words."""
        if not calls:
            return self.message("assistant", "turn")
        return self.message("assistant", "turn" if spoke else "", tool_calls=list(calls))

    def of_shape(self, shape: ContinuationShape) -> Iterator[dict[str, Any]]:
        """New messages of that shape."""
        ids = unused_ids(())
        for number, (role, types, named) in enumerate(shape.new):
            words = f"new {number}"
            message: dict[str, Any] = self.message(role, words)
            if types is not None:
                # Two texts where a message has one or more: how they are joined may depend on the conversation.
                contents = {"text": (words, "more words")}
                message["content"] = [
                    {"type": kind, kind: shown} for kind in types for shown in contents.get(kind, ("<media>",))
                ]
            if role == "tool":
                message["tool_call_id"] = next(ids)
            if named:
                message["name"] = "probe"
            yield message


class Continuations:
    """Asks a template how it continues, once for each shape. Safe to share between threads: answers are equal."""

    def __init__(
        self, printer: TurnPrinter, stand_ins: ProbeMessages, format: Format, *, modalities: Sequence[str]
    ) -> None:
        self._printer = printer
        self._stand_ins = stand_ins
        self._reasoning = format.reasoning
        self._ends = (*format.stop_tokens, *format.history_ends)
        self._modalities = tuple(modalities)
        self._known: dict[ContinuationShape, Continuation] = {}

    def of(self, shape: ContinuationShape) -> Continuation:
        known = self._known.get(shape)
        if known is None:
            if len(self._known) >= 1024:  # shapes come from callers' messages
                self._known.clear()
            known = self._known[shape] = self._ask(shape)
        return known

    def _ask(self, shape: ContinuationShape) -> Continuation:
        new = list(self._stand_ins.of_shape(shape))
        opening = self._stand_ins.opening()
        tools = [PROBE_TOOL] if shape.has_tools else None
        calls = [self._stand_ins.call(m["tool_call_id"], "probe") for m in new if m["role"] == "tool"]
        if shape.called_tools and not calls:
            calls = [self._stand_ins.call(next(unused_ids(())), "probe")]
        turn = self._stand_ins.turn(calls, spoke=shape.spoke)
        try:
            alone = self._printer.print_continued([*opening, turn, *new], len(opening), tools)
        except TemplateError:
            return Continuation()
        if alone is None:
            return Continuation(accepted=True)
        answers = []
        for history in self._histories():
            # A template that knows no system messages, or no tools, refuses some of them.
            with contextlib.suppress(TemplateError):
                answers.append(self._compare(history, turn, new, tools, alone.behind))
        if not answers:
            return Continuation()
        needs_history = any(answer.needs_history for answer in answers)
        needs_tools = tools is not None and self._needs_tools([*opening, turn, *new], len(opening), alone.behind)
        counts_media = needs_history and self._counts_media(turn, new, tools)
        always, sometimes = (
            Continuation(
                accepted=True,
                ends_turn=of_all(answer.ends_turn for answer in answers),
                keeps_history=of_all(answer.keeps_history for answer in answers),
                keeps_prompt=of_all(answer.keeps_prompt for answer in answers),
                keeps_reasoning=of_all(answer.keeps_reasoning for answer in answers),
                keeps_empty_reasoning=of_all(answer.keeps_empty_reasoning for answer in answers),
                needs_history=needs_history,
                counts_media=counts_media,
                needs_tools=needs_tools,
            )
            for of_all in (all, any)
        )
        return always if always == sometimes else always._replace(at_best=sometimes)

    def behind(
        self,
        history: Sequence[Mapping[str, Any]],
        turn: Mapping[str, Any],
        new: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> Continuation:
        """How the template continues this very conversation of checked messages: `history`, an assistant's turn, `new`.

        Takes a handful of prints of the whole conversation, and nothing is kept of the answer.
        """
        try:
            *shown, shown_turn = without_media([*history, turn])
            return self._compare(shown, shown_turn, without_media(new), tools, None)
        except TemplateError:
            return Continuation()

    def _compare(
        self,
        history: Sequence[Mapping[str, Any]],
        turn: Mapping[str, Any],
        new: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        alone: str | None,
    ) -> Continuation:
        """What happens behind one history; `alone` is what is printed behind a single question."""
        continued = self._printer.print_continued([*history, turn, *new], len(history), tools)
        if continued is None:
            return Continuation(accepted=True)
        prompt = self._printer.print_prompt(history, tools)
        last = self._printer.print_history([*history, turn], tools)
        keeps_prompt, keeps_reasoning = self._keeps_reasoning(history, turn, new, tools)
        without = self._without_reasoning
        return Continuation(
            accepted=True,
            ends_turn=True,
            keeps_history=self._is_same(without(prompt), without(last), without(continued.before)),
            keeps_prompt=keeps_prompt and continued.before.startswith(prompt),
            keeps_reasoning=keeps_reasoning,
            keeps_empty_reasoning=self._is_same(prompt, last, continued.before),
            needs_history=alone != continued.behind,
        )

    def _is_same(self, prompt: str, last: str, before: str) -> bool:
        """Whether what was sampled (`prompt`, then the rest of `last`) is what stands `before` the turn's end."""
        if not (last.startswith(before) and last.startswith(prompt)):
            return False
        rest = last[len(before) :]
        return not rest.strip() or rest.startswith(self._ends)

    def _keeps_reasoning(
        self,
        history: Sequence[Mapping[str, Any]],
        turn: Mapping[str, Any],
        new: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> tuple[bool, bool]:
        """Whether reasoning is still printed, as before, once new messages follow: that of the prompt, of the turn."""
        if self._reasoning is None:
            return True, True
        for think in (_with_field, self._within_content):
            thoughtful = [think(message) if message["role"] == "assistant" else message for message in history]
            last = self._printer.print_history([*thoughtful, think(turn)], tools)
            prompt = self._printer.print_prompt(thoughtful, tools)
            if _THOUGHT in last[len(prompt) :]:
                continued = self._printer.print_continued([*thoughtful, think(turn), *new], len(thoughtful), tools)
                if continued is None:
                    return False, False
                return continued.before.startswith(prompt), self._is_same(prompt, last, continued.before)
        return False, False  # not even the last turn shows what it thought

    def _within_content(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        """For a template that knows no field for reasoning: the words as they were sampled."""
        assert self._reasoning is not None
        thought = f"{self._reasoning.start}\n{_THOUGHT}\n{self._reasoning.end}\n\n."
        return {**turn, **self._stand_ins.message("assistant", thought)}

    def _counts_media(
        self, turn: Mapping[str, Any], new: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> bool:
        """Whether a question that shows the media of a history stands for the history."""
        compared = False
        for media in ((), self._modalities[:1], (*self._modalities, *self._modalities)):
            opening = self._stand_ins.opening(media)
            try:
                alone = self._printer.print_continued([*opening, turn, *new], len(opening), tools)
            except TemplateError:
                return False
            for history in self._talks(media):
                with contextlib.suppress(TemplateError):
                    continued = self._printer.print_continued([*history, turn, *new], len(history), tools)
                    if alone is None or continued is None or alone.behind != continued.behind:
                        return False
                    compared = True
        return compared

    def _needs_tools(self, messages: Sequence[Mapping[str, Any]], turn: int, with_tools: str) -> bool:
        """Whether the extension would be another if the tools were left out."""
        try:
            without = self._printer.print_continued(messages, turn, None)
        except TemplateError:
            return True
        return without is None or without.behind != with_tools

    def _histories(self) -> Iterator[list[Mapping[str, Any]]]:
        """Histories of many kinds, with a medium of each modality and without any."""
        for modality in self._modalities:  # they are counted apart: images do not change the number of a video
            yield from self._talks((modality,))
        yield from self._talks(())

    def _talks(self, media: Sequence[str]) -> Iterator[list[Mapping[str, Any]]]:
        """Histories that show these media, half of them in each of two questions.

        The turn that follows may begin or end a tool cycle, or know of none.
        """
        make = self._stand_ins
        called = make.turn([make.call("earlier00", "earlier")])
        cycle = [called, make.message("tool", "earlier result", tool_call_id="earlier00", name="earlier")]
        system = make.message("system", "earlier system message")
        half = (len(media) + 1) // 2
        seen: list[Mapping[str, Any]] = []
        if media:
            seen = [make.question("earlier question 1", media[:half]), make.message("assistant", "earlier answer 1")]
        question, last = make.question("earlier question 2", media[half:]), make.question("earlier question 3")
        answer = make.message("assistant", "earlier answer 2")
        for talk in (
            [question, *cycle, answer, last],
            [question, answer, last, *cycle],
            [question, answer, last],
        ):
            yield [system, *seen, *talk]
            yield [*seen, *talk]

    def _without_reasoning(self, text: str) -> str:
        if self._reasoning is None:
            return text
        start, end = re.escape(self._reasoning.start), re.escape(self._reasoning.end)
        return re.sub(rf"{start}.*?(?:{end}|\Z)\s*|{end}\s*", "", text, flags=re.DOTALL)


def _with_field(turn: Mapping[str, Any]) -> dict[str, Any]:
    return {**turn, "reasoning_content": _THOUGHT, "thinking": _THOUGHT}
