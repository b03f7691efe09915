"""Sampled ids -> text with encoded markers, and from its characters back to tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from renderers.parsing.markers import MarkerEncoding
from renderers.tokens.decoding import Decoded, TokenDecoder
from renderers.tokens.tokenizer import TemplateTokenizer


class Lexer:
    """Decodes ids piece by piece. The results of `feed` and `finish`, joined, are the completion with encoded markers.

    Control tokens that belong to no marker become their text; an id that is no token becomes U+FFFD.
    """

    def __init__(self, tokenizer: TemplateTokenizer, decoder: TokenDecoder, encoding: MarkerEncoding) -> None:
        self._tokenizer, self._decoder, self._encoding = tokenizer, decoder, encoding
        self._run = decoder.new_run()
        self._length = 0
        self._begun: list[int] = []  # per token: how many characters have begun once it is read
        self._inside: set[int] = set()  # tokens that begin inside a character
        self._whole: list[tuple[int, int]] = []  # runs whose characters belong to no token in particular

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that is complete with these ids."""
        pieces = self._decoder.pieces(token_ids)
        if None not in pieces:
            return self._add(self._run.feed(pieces))
        texts: list[str] = []
        position = 0
        for _ in range(pieces.count(None)):
            control = pieces.index(None, position)
            token_id = token_ids[control]
            text = self._encoding.character_of_id.get(token_id) or self._tokenizer.added_token(token_id) or "\ufffd"
            texts += [self._add(self._run.feed(pieces[position:control])), self.finish()]
            texts.append(self._add(Decoded(text, [len(text)], [])))
            position = control + 1
        texts.append(self._add(self._run.feed(pieces[position:])))
        return "".join(texts)

    def finish(self) -> str:
        """The text of the incomplete rest; the next ids begin a new run."""
        first = len(self._begun)
        text = self._add(self._run.finish())
        if self._run.whole and len(self._begun) > first:
            self._whole.append((first, len(self._begun)))
        self._run = self._decoder.new_run()
        return text

    def span(self, start: int, end: int) -> tuple[int, int]:
        """The half-open range of the tokens of the characters `start:end`, which are at least one."""
        first = bisect_right(self._begun, start)
        last = bisect_right(self._begun, end)  # the token in which the next character begins
        begun_before = self._begun[last - 1] if last else 0
        if last < len(self._begun) and (last in self._inside or begun_before < end):
            last += 1  # that token also holds the end of this character
        for run_start, run_end in self._whole:
            if first < run_end and run_start < last:
                first, last = min(first, run_start), max(last, run_end)
        return first, last

    def _add(self, decoded: Decoded) -> str:
        first = len(self._begun)
        self._begun += [self._length + begun for begun in decoded.begun] if self._length else decoded.begun
        if decoded.inside:
            self._inside.update(first + index for index in decoded.inside)
        self._length += len(decoded.text)
        return decoded.text
