"""Encodes markers: each control token of a marker becomes one character that no decoded text contains.

The parsers read a completion as a string in which a control token of a marker is a lone surrogate.
`<tool_call>` is then a single character where the tokenizer has that token, and the same letters sampled as
text stay ordinary text; where the tokenizer has no such token, the marker is its text. `re` does the
searching.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto
from operator import itemgetter

from renderers.tokens.decoding import Decoded, TokenDecoder
from renderers.tokens.tokenizer import TemplateTokenizer

MARKER_CHARACTER = re.compile("[\ud800-\udfff]")


class MarkerEncoding:
    """The encoded forms of a set of markers for one tokenizer."""

    def __init__(self, tokenizer: TemplateTokenizer, markers: Iterable[str]) -> None:
        #: id of a control token -> the character that stands for it
        self.character_of_id: dict[int, str] = {}
        self._token_of_character: dict[str, str] = {}
        self._tokenizer = tokenizer
        self._encoded = {marker: self._encode(marker, tokenizer) for marker in markers}

    def _encode(self, marker: str, tokenizer: TemplateTokenizer) -> str:
        pieces: list[str] = []
        position = 0
        for match in tokenizer.controls(marker):
            start, end = match.text_range
            new = chr(0xDC00 + len(self.character_of_id))
            character = self.character_of_id.setdefault(match.token_id, new)
            self._token_of_character[character] = marker[start:end]
            pieces += [marker[position:start], character]
            position = end
        return "".join([*pieces, marker[position:]])

    def __getitem__(self, marker: str) -> str:
        """The encoded form of a marker."""
        return self._encoded[marker]

    def decode(self, text: str) -> str:
        """`text` with the token's text in place of each marker character."""
        if MARKER_CHARACTER.search(text) is None:
            return text
        return MARKER_CHARACTER.sub(lambda found: self._token_of_character[found.group()], text)

    def has_control(self, text: str) -> bool:
        """Whether decoded text contains the text of a control token, sampled as that token or not."""
        return self._tokenizer.find_control(text, 0, len(text)) is not None


class Role(Enum):
    """The effect of a marker on the state of the parser."""

    REASONING_START = auto()
    REASONING_END = auto()
    BLOCK_START = auto()
    BLOCK_END = auto()
    BARE_CALL_START = auto()
    BARE_CALL_END = auto()
    HEADER_START = auto()
    BODY_START = auto()
    BODY_END = auto()


class MarkerSearch:
    """Finds the first of several markers in a text that is still growing.

    `roles` maps encoded markers to their roles; no marker begins with another.
    """

    def __init__(self, roles: Mapping[str, Role]) -> None:
        self.roles = dict(roles)
        longest_first = sorted(self.roles, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._longest = len(longest_first[0]) if longest_first else 0
        self._prefix = re.compile("|".join(_prefixes(marker) for marker in longest_first if len(marker) > 1) or r"(?!)")

    def find(self, text: str, start: int) -> re.Match[str] | None:
        return self._whole.search(text, start)

    def settled(self, text: str, start: int) -> int:
        """Where the part of `text` ends in which no marker can begin; it holds no whole one from `start` on."""
        if self._longest < 2:
            return len(text)
        prefix = self._prefix.search(text, max(start, len(text) - self._longest + 1))
        return len(text) if prefix is None else prefix.start()


def _prefixes(marker: str) -> str:
    """A pattern for every proper prefix of `marker` at the end of a text."""
    pattern = ""
    for character in reversed(marker[1:-1]):
        pattern = f"(?:{re.escape(character)}{pattern})?"
    return rf"{re.escape(marker[0])}{pattern}\Z"


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
        at = bisect_right(self._whole, first, key=itemgetter(1))
        while at < len(self._whole) and self._whole[at][0] < last:
            first, last = min(first, self._whole[at][0]), max(last, self._whole[at][1])
            at += 1
        return first, last

    def _add(self, decoded: Decoded) -> str:
        first = len(self._begun)
        self._begun += [self._length + begun for begun in decoded.begun] if self._length else decoded.begun
        if decoded.inside:
            self._inside.update(first + index for index in decoded.inside)
        self._length += len(decoded.text)
        return decoded.text
