"""Parses sampled ids to content, reasoning and tool calls; tells whether a prompt has opened reasoning."""

from collections.abc import Mapping, Sequence
from typing import Any

from renderers.parsing.format import Format
from renderers.parsing.grammar import Grammar, grammar_of
from renderers.parsing.markers import Lexer
from renderers.parsing.message_turn import MessageTurnParser
from renderers.parsing.response import Delta, ParsedResponse
from renderers.parsing.tagged_turn import TaggedTurnParser
from renderers.parsing.tool_schemas import ToolSchemas
from renderers.parsing.transcript import TextBuffer, Transcript
from renderers.tokens.tokenizer import TemplateTokenizer


def parse_response(
    token_ids: Sequence[int],
    format: Format,
    tokenizer: TemplateTokenizer,
    *,
    reasoning_open: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> ParsedResponse:
    """Parse a completion of any ids. `reasoning_open`: the prompt ended inside reasoning.

    With `tools` (as given to the template), calls of other names are `unknown_tool` and untyped arguments
    get the types that the schemas declare.
    """
    parser = ResponseParser(format, tokenizer, reasoning_open=reasoning_open, tools=tools)
    parser.feed(token_ids)
    return parser.finish()


def plain_response(token_ids: list[int], grammar: Grammar) -> ParsedResponse | None:
    """What `parse_response` returns for the usual turn, after a prompt that has not opened reasoning.

    That turn is content alone: ordinary tokens that hold no marker, then a stop token, or none. None for any other.
    """
    if not grammar.plain_text_is_content:
        return None
    stopped = bool(token_ids) and token_ids[-1] in grammar.plain_stop_ids
    text = grammar.decoder.text_of_run(token_ids[:-1] if stopped else token_ids)
    if text is None or grammar.before_reasoning.find(text, 0) is not None:
        return None
    format = grammar.format
    if text.startswith("\n") or text.endswith("\n"):
        buffer = TextBuffer.of_content(format)
        buffer.add(text)
        buffer.finish(strip_trailing=False)
        text = buffer.text
    return ParsedResponse(text, None, [], True, stopped, format.arguments, format.call_id)


class ResponseParser:
    """Parses a completion while it is sampled; the deltas, joined, are the content and reasoning of the response.

    The first stop token ends the turn; ids behind it are ignored. Text that may be layout or the beginning
    of a marker is held back until that is decided.
    """

    def __init__(
        self,
        format: Format,
        tokenizer: TemplateTokenizer,
        *,
        reasoning_open: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        grammar = grammar_of(format, tokenizer)
        self._format, self._grammar = format, grammar
        self._lexer = Lexer(tokenizer, grammar.decoder, grammar.encoding)
        schemas = ToolSchemas(tools, checks_names=format.reports_unknown_tools)
        self._transcript = Transcript(self._lexer, grammar.encoding, schemas, format)
        turn_parser = TaggedTurnParser if grammar.channels is None else MessageTurnParser
        self._turn = turn_parser(grammar, self._transcript, reasoning_open=reasoning_open)
        self._stopped = False
        self._ended = False

    def feed(self, token_ids: Sequence[int]) -> list[Delta]:
        """The deltas of these ids. A stop token ends the turn and releases the text that was held back."""
        if self._ended:
            return []
        ids = list(token_ids)
        stop = self._grammar.find_stop(ids)
        self._turn.feed(self._lexer.feed(ids[:stop]))
        if stop is None:
            return self._transcript.take_deltas()
        self._stopped = True
        if ids[stop] in self._grammar.encoding.character_of_id:  # the token both closes a call and stops the turn
            self._turn.feed(self._lexer.feed(ids[stop : stop + 1]))
        return self.end()

    def end(self) -> list[Delta]:
        """End the completion; the deltas that were held back."""
        if not self._ended:
            self._ended = True
            self._turn.feed(self._lexer.finish())
            self._turn.finish(stopped=self._stopped)
            self._transcript.finish()
        return self._transcript.take_deltas()

    def finish(self) -> ParsedResponse:
        """The whole completion, ended if it was not."""
        self.end()
        transcript, format = self._transcript, self._format
        reasoning: str | None = transcript.reasoning.text
        if not reasoning and not (transcript.reasoned and transcript.reasoning_open):
            reasoning = None  # absent, or empty and closed: templates print that where there is none
        return ParsedResponse(
            content=transcript.content.text,
            reasoning_content=reasoning,
            tool_calls=list(transcript.calls),
            reasoning_complete=not transcript.reasoning_open,
            stopped=self._stopped,
            arguments_form=format.arguments,
            call_id=format.call_id,
        )


def leaves_reasoning_open(prompt_ids: Sequence[int], grammar: Grammar) -> bool:
    """Whether the completion of a prompt continues reasoning that the prompt has opened.

    Where both markers are control tokens, the last one in the prompt decides. Otherwise any content may
    contain their text, so only a prompt that ends with the start marker counts.
    """
    if not grammar.has_reasoning:
        return False
    if grammar.reasoning_start_id is not None:
        for token_id in reversed(prompt_ids):
            if token_id in grammar.reasoning_edge_ids:
                return token_id == grammar.reasoning_start_id
        return False
    lexer = Lexer(grammar.tokenizer, grammar.decoder, grammar.encoding)
    # A marker of several tokens is searched in this many last ids of a prompt; the longest known marker has 5.
    tail = lexer.feed(prompt_ids[-32:]) + lexer.finish()
    return tail.rstrip().endswith(grammar.reasoning_start)


def ends_unbegun_reasoning(token_ids: Sequence[int], format: Format, tokenizer: TemplateTokenizer) -> bool:
    """Whether a completion holds the end marker of reasoning with no start marker before it."""
    if format.reasoning is None:
        return False
    grammar = grammar_of(format, tokenizer)
    ids = list(token_ids)
    stop = grammar.find_stop(ids)
    lexer = Lexer(tokenizer, grammar.decoder, grammar.encoding)
    text = lexer.feed(ids[:stop]) + lexer.finish()
    end = text.find(grammar.reasoning_end)
    return end >= 0 and grammar.reasoning_start not in text[:end]
