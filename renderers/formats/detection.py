"""Detects the format of a model from its tokenizer and its template, not from its name."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from renderers.errors import LoadError, TemplateError, missing_token
from renderers.formats.families import FAMILIES, Family
from renderers.messages import check_messages
from renderers.parsing.format import Format, ReasoningMarkers
from renderers.parsing.parser import parse_response
from renderers.parsing.response import ArgumentsForm, ParsedResponse, ToolCallParseStatus
from renderers.template.chat_template import Printed, Template, Tools
from renderers.template.probe_conversation import ProbeConversation, content, content_form_of, smallest_conversation
from renderers.tokens.tokenizer import TemplateTokenizer

_ANSWER = "probe answer"
_REASONING = "probe thought"
_ARGUMENTS = {"city": 'probe "city"', "days": 3}
_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "c"}, "days": {"type": "integer", "description": "d"}},
    "required": ["city"],
}
_TOOL = {
    "type": "function",
    "function": {"name": "probe_tool", "description": "probe", "parameters": _PARAMETERS},
}

_PARTIAL_MARKER = re.compile(r"<[^<>\s]*\Z")
_LAST_MARKER = re.compile(r"[<\[][^<\[\s]*\Z")
_LOOKS_LIKE_CONTROL = re.compile(r"<\|[^|<>\s]{1,64}\|>")


def detect_format(template: Template, tokenizer: TemplateTokenizer, *, eos_token: str | None) -> Format:
    """The format of the first family whose tokens exist and which parses the turns that the template prints.

    A template of no known family gets the format "chatml" or "generic": content and, where their markers exist,
    reasoning. Raises `LoadError` if the template prints a control token that the tokenizer would encode as
    text, and `LoadError` if it refuses every small conversation or if nothing would ever stop a turn.
    """
    small = smallest_conversation(template)
    conversation = small._replace(
        question={"role": "user", "content": content("probe question", content_form_of(small.question))},
        answer={"role": "assistant", "content": content(_ANSWER, content_form_of(small.answer))},
    )
    history = template.print([*conversation.opening, conversation.answer], tools=conversation.tools)
    prompt = template.print(conversation.opening, tools=conversation.tools, add_generation_prompt=True)
    for printed in (history, prompt):
        _require_printed_tokens(printed, tokenizer)

    turn_end = _first_control_after_answer(history, len(conversation.opening), tokenizer)
    probe = _Probe(template, tokenizer, conversation, history, turn_end, prompt.text)
    for family in FAMILIES:
        if (format := probe.adapt(family)) is not None:
            return probe.complete(format, eos_token)
    turn_end = turn_end or eos_token
    if turn_end is None:
        raise LoadError(
            f"the chat template of {tokenizer.model} closes an assistant turn with no control token and the tokenizer "
            "names no eos_token: generation would never stop. Add eos_token to tokenizer_config.json."
        )
    tokenizer.require_control_id(turn_end, "the end of an assistant turn")
    for reasoning in (ReasoningMarkers(), probe.printed_reasoning_markers(), None):
        generic = probe.complete(Format("generic", (turn_end,), reasoning), eos_token)
        if probe.reads_reasoning(generic):
            break
    return generic


class _Probe(NamedTuple):
    """A template and the texts that it prints for a small conversation. `turn_end` is the control token behind the
    answer, if any.
    """

    template: Template
    tokenizer: TemplateTokenizer
    conversation: ProbeConversation
    history: Printed
    turn_end: str | None
    prompt: str

    def adapt(self, family: Family) -> Format | None:
        """The family's format, adapted to the template, or None if the template is of another family."""
        format, control_id = family.format, self.tokenizer.control_id
        if any(control_id(token) is None for token in (format.stop_tokens[0], *family.tokens)):
            return None
        if any(text not in self.template.source for text in family.source):
            return None
        if self.turn_end is not None and self.turn_end not in format.stop_tokens:
            return None
        if self.turn_end is None and len(format.stop_tokens) == 1 and not self._is_closed_later(format.stop_tokens[0]):
            return None  # a turn that nothing closes is stopped by the next role's token, a second stop token
        format = self._with_reasoning(format)
        if not self.reads_reasoning(format):
            return None
        if format.tool_calls is None and format.channels is None:
            return format
        forms: tuple[ArgumentsForm, ...] = ("object", "json")
        return next((replace(format, arguments=form) for form in forms if self._reads_calls(format, form)), None)

    def _is_closed_later(self, stop: str) -> bool:
        """Whether the template prints the stop token once another question follows the answer."""
        again = {**self.conversation.question, "content": content("more", content_form_of(self.conversation.question))}
        try:
            messages = [*self.conversation.opening, self.conversation.answer, again]
            text = self.template.print(messages, tools=self.conversation.tools).text
        except TemplateError:
            return False
        return stop in text.partition(_ANSWER)[2]

    def complete(self, format: Format, eos_token: str | None) -> Format:
        """The format with the stop tokens of this tokenizer and the leading newlines of this template."""
        stops = [token for token in format.stop_tokens if self.tokenizer.control_id(token) is not None]
        if eos_token is not None and eos_token not in stops and self.tokenizer.control_id(eos_token) is not None:
            stops.append(eos_token)
        format = self._with_reasoning(format)
        reasoning = format.reasoning
        if reasoning is not None and format.channels is None:
            # Whether it prints reasoning, line breaks at its ends included, directly between the markers; of layout,
            # templates print one line break.
            thought = f"\n\n{_REASONING}\n\n"
            verbatim = f"{reasoning.start}{reasoning.label}{thought}{reasoning.end}" in self._print_reasoned(thought)
            reasoning = replace(reasoning, verbatim=verbatim)
        return replace(
            format,
            stop_tokens=tuple(stops),
            reasoning=reasoning,
            leading_newlines=self._leading_newlines(format),
            trailing_newlines=format.trailing_newlines
            if _ANSWER + format.trailing_newlines in self.history.text
            else "",
        )

    def _print_reasoned(self, thought: str) -> str:
        """A conversation whose answer has this reasoning; "" if the template refuses it."""
        turn = {**self.conversation.answer, "reasoning_content": thought}
        try:
            return self.template.print([*self.conversation.opening, turn], tools=self.conversation.tools).text
        except TemplateError:
            return ""

    def _leading_newlines(self, format: Format) -> str:
        turn = _sampled(self.prompt, self.history.text)[1]
        stripped = turn.lstrip("\n")
        begins = (_ANSWER, format.reasoning.start) if format.reasoning is not None else (_ANSWER,)
        return turn[: len(turn) - len(stripped)] if stripped.startswith(begins) else ""

    def _with_reasoning(self, format: Format) -> Format:
        """The format without reasoning that cannot occur, else with whether this prompt opens it."""
        reasoning = format.reasoning
        if reasoning is None or format.channels is not None:
            return format
        markers = (reasoning.start, reasoning.end)
        if not all(self.tokenizer.control_id(marker) is not None for marker in markers) and not all(
            marker in self.template.source for marker in markers
        ):
            return replace(format, reasoning=None)
        opened = _opens_reasoning(self.prompt, reasoning)
        return replace(format, reasoning=replace(reasoning, opened_by_prompt=opened))

    def reads_reasoning(self, format: Format) -> bool:
        """Whether the format parses the reasoning that the template prints, if it prints any."""
        turn = {**self.conversation.answer, "reasoning_content": _REASONING}
        printed, parsed = self._read_back(turn, format)
        if parsed is None or _REASONING not in printed:
            return True
        return (parsed.reasoning_content, parsed.content) == (_REASONING, _ANSWER)

    def printed_reasoning_markers(self) -> ReasoningMarkers | None:
        """The markers that the template prints around reasoning: control tokens, or `<x>` and `</x>`."""
        before, reasoning, rest = self._print_reasoned(_REASONING).partition(_REASONING)
        between, answer, _ = rest.partition(_ANSWER)
        start, end = _LAST_MARKER.search(before.rstrip()), between.strip()
        if not (reasoning and answer and start is not None) or len(end.split()) != 1:
            return None
        is_tag = end == start.group().replace("<", "</", 1)
        are_tokens = all(self.tokenizer.control_id(marker) is not None for marker in (start.group(), end))
        return ReasoningMarkers(start.group(), end) if is_tag or are_tokens else None

    def _reads_calls(self, format: Format, form: ArgumentsForm) -> bool:
        """Whether the format parses a call that the template prints of arguments of this form."""
        arguments = _ARGUMENTS if form == "object" else json.dumps(_ARGUMENTS)
        call_id = format.call_id.replace("{name}", "probe_tool").replace("{index}", "0")
        call = {"id": call_id, "type": "function", "function": {"name": "probe_tool", "arguments": arguments}}
        _, parsed = self._read_back({"role": "assistant", "content": "", "tool_calls": [call]}, format, [_TOOL])
        if parsed is None or parsed.content.strip():
            return False
        calls = [(call.status, call.name, call.arguments) for call in parsed.tool_calls]
        return calls == [(ToolCallParseStatus.OK, "probe_tool", _ARGUMENTS)]

    def _read_back(
        self, turn: Mapping[str, Any], format: Format, tools: Tools | None = None
    ) -> tuple[str, ParsedResponse | None]:
        """The text that the template prints for a turn, and its parse; "" and None if it refuses."""
        tools = self.conversation.tools if tools is None else tools
        *opening, answer = check_messages([*self.conversation.opening, turn])
        try:
            printed = self.template.print([*opening, answer], tools=tools).text
            prompt = self.template.print(opening, tools=tools, add_generation_prompt=True).text
        except TemplateError:
            return "", None
        prefix, sampled = _sampled(prompt, printed)
        return sampled, parse_response(
            self.tokenizer.encode_scaffold(sampled),
            format,
            self.tokenizer,
            reasoning_open=format.reasoning is not None and _opens_reasoning(prefix, format.reasoning),
            tools=tools,
        )


def _sampled(prompt: str, printed: str) -> tuple[str, str]:
    """Cut printed text where the model begins to sample: behind what it shares with the prompt."""
    pairs = enumerate(zip(prompt, printed, strict=False))
    length = next((i for i, (a, b) in pairs if a != b), min(len(prompt), len(printed)))
    # Different markers may begin alike: `<think>` in the prompt, `<tool_call>` in the history.
    partial = _PARTIAL_MARKER.search(printed[:length]) if length < len(prompt) else None
    if partial is not None:
        length = partial.start()
    return printed[:length], printed[length:]


def _opens_reasoning(prompt: str, reasoning: ReasoningMarkers) -> bool:
    return prompt.rstrip().endswith(reasoning.start + reasoning.label)


def _first_control_after_answer(history: Printed, answer: int, tokenizer: TemplateTokenizer) -> str | None:
    answers = [s for s in history.segments if s.origin is not None and s.origin.message_index == answer]
    if not answers:
        raise LoadError(f"the chat template of {tokenizer.model} does not print the content of an assistant message")
    found = tokenizer.find_control(history.text, answers[-1].end, len(history.text))
    return None if found is None else tokenizer.control_token(found.token_id)


def _require_printed_tokens(printed: Printed, tokenizer: TemplateTokenizer) -> None:
    """Raise `LoadError` for a `<|...|>` that the template itself prints and that is not a token."""
    for segment in printed.segments:
        if segment.origin is None:
            for match in _LOOKS_LIKE_CONTROL.finditer(printed.text, segment.start, segment.end):
                if tokenizer.control_id(match.group()) is None:
                    raise missing_token(match.group(), tokenizer.model, "the chat template")
