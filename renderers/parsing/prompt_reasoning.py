"""What a prompt says about the completion that follows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from renderers.parsing.grammar import grammar_of
from renderers.parsing.lexer import Lexer
from renderers.tokens.tokenizer import TemplateTokenizer

if TYPE_CHECKING:
    from renderers.parsing.format import Format

# A marker that is several tokens is looked for here; the longest known one is 5.
_TAIL = 32


def ends_in_reasoning(prompt_ids: Sequence[int], format: Format, tokenizer: TemplateTokenizer) -> bool:
    """Whether what is sampled behind the prompt continues reasoning that the prompt opened.

    Where both markers are control tokens, the last one in the prompt decides. Otherwise any content may spell them, so
    only a prompt that ends with the opening marker counts.
    """
    if format.reasoning is None:
        return False
    start = tokenizer.control_id(format.reasoning.start)
    end = tokenizer.control_id(format.reasoning.end)
    if start is not None and end is not None:
        # Behind the last turn's end there is little more than the generation prompt; what is before it cannot matter.
        settled = {end, *(tokenizer.control_id(token) for token in format.stop_tokens)}
        return next((token for token in reversed(prompt_ids) if token == start or token in settled), None) == start
    grammar = grammar_of(format, tokenizer)
    lexer = Lexer(tokenizer, grammar.decoder, grammar.encoding)
    tail = lexer.feed(prompt_ids[-_TAIL:]) + lexer.finish()
    return tail.rstrip().endswith(grammar.reasoning_start)
