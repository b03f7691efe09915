"""Prints conversations, and finds where the assistant's turns begin and end in the printed text."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from renderers.errors import TemplateError
from renderers.parsing.format import Format
from renderers.template.chat_template import Messages, Printed, Template, Tools
from renderers.template.probe_conversation import (
    PROBE_TOOL,
    ProbeConversation,
    calling_turns,
    content,
    content_form_of,
    result_of_call,
)
from renderers.tokens.encoding import BodyPolicy, PrintedControl, find_controls
from renderers.tokens.tokenizer import TemplateTokenizer
from renderers.turn_bounds import TurnEnd, TurnShape, regions, sampled_start, turn_end


class Continued(NamedTuple):
    """A print of (history, turn, new messages, generation prompt); `end` is the token that ends the turn."""

    printed: Printed
    controls: list[PrintedControl]
    end: TurnEnd

    @property
    def extension_start(self) -> int:
        """The character where the extension begins if the token that ends the turn was not sampled."""
        return self.end.control.end if self.end.inside else self.end.control.start

    @property
    def kept_text(self) -> str:
        """The text up to the token that ends the turn."""
        return self.printed.text[: self.end.control.start]

    @property
    def extension(self) -> str:
        """The text from `extension_start` on."""
        return self.printed.text[self.extension_start :]


class TurnPrinter:
    """Prints conversations with a template and finds assistant turns in the printed text by their tokens."""

    def __init__(
        self,
        template: Template,
        tokenizer: TemplateTokenizer,
        format: Format,
        smallest: ProbeConversation,
        body_policies: Mapping[str, BodyPolicy],
    ) -> None:
        """`smallest` is a question and answer that the template prints."""
        self.template = template
        self.tokenizer = tokenizer
        self.stop_ids = [tokenizer.require_control_id(token, "the format") for token in format.stop_tokens]
        self.reasoning_ids = (
            None
            if format.reasoning is None
            else (tokenizer.encode_scaffold(format.reasoning.start), tokenizer.encode_scaffold(format.reasoning.end))
        )
        self._body_policies = body_policies
        self.shape = self._turn_shape(smallest, format)
        self.generation_prompt_ids = tokenizer.encode_scaffold(self.shape.generation_prompt)
        self.empty_reasoning_ids = self._empty_reasoning(smallest, format)

    def controls(self, printed: Printed, messages: Messages) -> list[PrintedControl]:
        """The control tokens in a print of these messages."""
        roles = [message["role"] for message in messages]
        return find_controls(printed, self.tokenizer, roles, self._body_policies)

    def print_continued(self, messages: Messages, turn: int, tools: Tools | None) -> Continued | None:
        """Print a conversation up to the next prompt; find the end of assistant `turn`, None without one."""
        printed = self.template.print(messages, tools=tools, add_generation_prompt=True)
        controls = self.controls(printed, messages)
        region = regions(printed).get(turn)
        if region is None:
            return None
        begin = sampled_start(printed, controls, region, self.shape)
        end = turn_end(printed, controls, turn, region, begin, self.shape)
        return None if end is None else Continued(printed, controls, end)

    def print_prompt(self, messages: Messages, tools: Tools | None) -> str:
        """The text before an assistant's turn, without the generation prompt."""
        text = self.template.print(messages, tools=tools, add_generation_prompt=True).text
        return text.removesuffix(self.shape.generation_prompt)

    def _turn_shape(self, smallest: ProbeConversation, format: Format) -> TurnShape:
        without = self.template.print(smallest.opening, tools=smallest.tools).text
        prompt = self.template.print(smallest.opening, tools=smallest.tools, add_generation_prompt=True).text
        controls = [match.text_range for match in self.tokenizer.controls(prompt)]
        # A token that a template prints at the end of a conversation (eos) may begin like the generation prompt.
        begin = next((i for i, (a, b) in enumerate(zip(without, prompt, strict=False)) if a != b), len(without))
        begin = next((start for start, end in controls if start < begin < end), begin)
        return TurnShape(
            prompt[begin:],
            tuple((start - begin, end - begin) for start, end in controls if start >= begin),
            self._prompt_after_result(smallest),
            frozenset(self.stop_ids),
            self._ids(format.history_ends),
            self._ids(format.sampled_markers) | frozenset(self.stop_ids),
        )

    def _prompt_after_result(self, smallest: ProbeConversation) -> str:
        """The text that the template prints of an answer to a call's result before there is one."""
        result = result_of_call(content("probe result", content_form_of(smallest.answer)))
        for history in ([*smallest.opening, turn, result] for turn in calling_turns(smallest.answer)):
            try:
                printed = self.template.print([*history, smallest.answer], tools=[PROBE_TOOL])
                prompt = self.template.print(history, tools=[PROBE_TOOL], add_generation_prompt=True).text
            except TemplateError:
                continue
            answer = regions(printed).get(len(history))
            if answer is not None and printed.text.startswith(prompt[: answer.start]):
                return prompt[answer.start :]
        return ""

    def _empty_reasoning(self, smallest: ProbeConversation, format: Format) -> list[int] | None:
        """The ids between the markers of a turn without reasoning; None without markers."""
        if format.reasoning is None:
            return None
        text = self.template.print([*smallest.opening, smallest.answer], tools=smallest.tools).text
        _, opening, rest = text.partition(format.reasoning.start)
        inside, closing, _ = rest.partition(format.reasoning.end)
        return self.tokenizer.encode_scaffold(inside) if opening and closing else None

    def _ids(self, tokens: Iterable[str]) -> frozenset[int]:
        ids = (self.tokenizer.control_id(token) for token in tokens)
        return frozenset(token_id for token_id in ids if token_id is not None)
