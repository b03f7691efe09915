"""A format compiled for a tokenizer: the encoding of its markers, and the markers that count in each state."""

import re
from collections.abc import Sequence
from functools import lru_cache

from renderers.parsing.format import Format
from renderers.parsing.markers import MarkerEncoding, MarkerSearch, Role
from renderers.parsing.values import JSON_STRING
from renderers.tokens.decoding import TokenDecoder
from renderers.tokens.tokenizer import TemplateTokenizer


class Grammar:
    """The parts of a parser that are equal for all completions. Safe to share between threads."""

    def __init__(self, format: Format, tokenizer: TemplateTokenizer) -> None:
        reasoning, syntax, channels = format.reasoning, format.tool_calls, format.channels
        starts = () if reasoning is None else (reasoning.start + reasoning.label,)
        ends = () if reasoning is None else (reasoning.end,)
        opens = () if syntax is None else syntax.start_markers
        closes = () if syntax is None else syntax.end_markers
        inner = () if syntax is None else syntax.inner_markers
        bare = () if syntax is None else syntax.bare_calls
        framing = () if channels is None else (channels.start, channels.channel, channels.message, *channels.ends)
        self.format = format
        self.tokenizer = tokenizer
        self.decoder = TokenDecoder(tokenizer)
        self.encoding = MarkerEncoding(tokenizer, (*starts, *ends, *opens, *closes, *inner, *bare, *framing))
        self.stop_ids = {token_id for token_id in map(tokenizer.control_id, format.stop_tokens) if token_id is not None}
        self.syntax = syntax
        self.channels = channels
        self.calls_end_reasoning = format.calls_end_reasoning
        self.drops_repeated_start = format.drops_repeated_start
        self.has_reasoning = reasoning is not None
        self.reasoning_start = "".join(map(self.encoding.__getitem__, starts))
        self.reasoning_end = "".join(map(self.encoding.__getitem__, ends))
        self.block_ends = closes
        self.unmarked_starts = () if syntax is None else tuple(syntax.unmarked_starts)
        #: A start marker that stands in no well-formed block, as a pattern.
        self.stray = "|".join(re.escape(self.encoding[marker]) for marker in opens) or "(?!)"
        #: Where values begin and end in a block of calls, or in the body of a message that is a call.
        self.values = (JSON_STRING,) if syntax is None else syntax.values(self.encoding)
        #: Whether text without any marker is content, whatever it says.
        self.plain_text_is_content = channels is None and not self.unmarked_starts
        #: The stop tokens that are not a marker, too.
        self.plain_stop_ids = self.stop_ids - self.encoding.character_of_id.keys()
        start_id = None if reasoning is None else tokenizer.control_id(reasoning.start)
        end_id = None if reasoning is None else tokenizer.control_id(reasoning.end)
        #: The start marker of reasoning, if both markers are control tokens.
        self.reasoning_start_id = None if end_id is None else start_id
        #: The tokens of a prompt of which the last one tells whether it ends inside reasoning. The search stops at the
        #: end of the last turn: behind it is little more than the generation prompt.
        self.reasoning_edge_ids = {start_id, end_id, *self.stop_ids}

        start = self._roles(starts, Role.REASONING_START)
        end = self._roles(ends, Role.REASONING_END)
        open_block, close_block = self._roles(opens, Role.BLOCK_START), self._roles(closes, Role.BLOCK_END)
        open_call, close_call = self._roles(bare[:1], Role.BARE_CALL_START), self._roles(bare[1:], Role.BARE_CALL_END)
        self.before_reasoning = MarkerSearch(start | end | open_block | open_call)
        self.after_reasoning = MarkerSearch(open_block | open_call)
        self.in_reasoning = MarkerSearch(end | open_block)
        self.at_start_of_reasoning = MarkerSearch(start | end | open_block)
        self.behind_call_in_reasoning = MarkerSearch(end)
        self.in_block = MarkerSearch(close_block)
        self.in_draft = MarkerSearch(close_block | end)
        self.in_bare_call = MarkerSearch(close_call | open_call | open_block | close_block)
        #: Behind a call without the markers of a block, by whether reasoning may begin.
        self.behind_bare_call = {
            may_reason: MarkerSearch(search.roles | close_block)
            for may_reason, search in ((True, self.before_reasoning), (False, self.after_reasoning))
        }
        self.bare_call_start = "".join(map(self.encoding.__getitem__, bare[:1]))
        self.no_markers = MarkerSearch({})
        self.body_ends = () if channels is None else tuple(map(self.encoding.__getitem__, channels.ends))
        if channels is not None:
            header = self._roles((channels.start,), Role.HEADER_START)
            self.in_header = MarkerSearch(header | self._roles((channels.message,), Role.BODY_START))
            self.in_body = MarkerSearch(header | self._roles(channels.ends, Role.BODY_END))

    def find_stop(self, token_ids: Sequence[int]) -> int | None:
        """The index of the first stop token, None if there is none."""
        stops = [token_ids.index(token_id) for token_id in self.stop_ids if token_id in token_ids]
        return min(stops) if stops else None

    def _roles(self, markers: tuple[str, ...], role: Role) -> dict[str, Role]:
        return {self.encoding[marker]: role for marker in markers}


@lru_cache(maxsize=8)
def grammar_of(format: Format, tokenizer: TemplateTokenizer) -> Grammar:
    """The grammar of a format for a tokenizer, cached."""
    return Grammar(format, tokenizer)
