"""Whether a prompt ends inside reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from renderers.parsing.grammar import grammar_of
from renderers.parsing.lexer import Lexer
from renderers.tokens.tokenizer import TemplateTokenizer

if TYPE_CHECKING:
    from renderers.parsing.format import Format

# A marker of several tokens is searched in this many last ids; the longest known marker has 5.
_TAIL = 32


def ends_in_reasoning(prompt_ids: Sequence[int], format: Format, tokenizer: TemplateTokenizer) -> bool:
    """Whether the completion of a prompt continues reasoning that the prompt has opened.

    Where both markers are control tokens, the last one in the prompt decides. Otherwise any content may contain their
    text, so only a prompt that ends with the start marker counts.
    """
    if format.reasoning is None:
        return False
    start = tokenizer.control_id(format.reasoning.start)
    end = tokenizer.control_id(format.reasoning.end)
    if start is not None and end is not None:
        # The search stops at the end of the last turn: behind it is little more than the generation prompt.
        search_ends = {end, *(tokenizer.control_id(token) for token in format.stop_tokens)}
        return next((token for token in reversed(prompt_ids) if token == start or token in search_ends), None) == start
    grammar = grammar_of(format, tokenizer)
    lexer = Lexer(tokenizer, grammar.decoder, grammar.encoding)
    tail = lexer.feed(prompt_ids[-_TAIL:]) + lexer.finish()
    return tail.rstrip().endswith(grammar.reasoning_start)
