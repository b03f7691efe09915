"""Markers in one encoding: a control token is one character that no text can spell, the rest is text.

A completion is read as a string in which each control token that takes part in a marker is a lone surrogate (decoded
text never holds one). `<tool_call>` is then a single character where the tokenizer has it as a token, and what merely
spells it is ordinary text; where the tokenizer has no such token the marker is that text. Searching is left to `re`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from renderers.tokens.tokenizer import TemplateTokenizer

R = TypeVar("R")

_FIRST = 0xDC00
_MARK = re.compile("[\ud800-\udfff]")


class MarkerEncoding:
    """The marker characters of one tokenizer for a set of markers."""

    def __init__(self, tokenizer: TemplateTokenizer, markers: Iterable[str]) -> None:
        self._mark_of_token: dict[str, str] = {}
        #: id of a control token -> the character that stands for it
        self.character_of_id: dict[int, str] = {}
        self._marked: dict[str, str] = {}
        for marker in markers:
            self._marked[marker] = self._spell(marker, tokenizer)
        self._token_of_mark = {mark: token for token, mark in self._mark_of_token.items()}

    def _spell(self, marker: str, tokenizer: TemplateTokenizer) -> str:
        pieces: list[str] = []
        position = 0
        while (match := tokenizer.find_control(marker, position, len(marker))) is not None:
            token = tokenizer.control_token(match.token_id)
            assert token is not None
            mark = self._mark_of_token.setdefault(token, chr(_FIRST + len(self._mark_of_token)))
            self.character_of_id[match.token_id] = mark
            start, end = match.text_range
            pieces += [marker[position:start], mark]
            position = end
        return "".join([*pieces, marker[position:]])

    def __getitem__(self, marker: str) -> str:
        """A marker in this encoding."""
        return self._marked[marker]

    def decode(self, text: str) -> str:
        """`text` with every marker character spelled out."""
        if _MARK.search(text) is None:
            return text
        return _MARK.sub(lambda found: self._token_of_mark[found.group()], text)


class MarkerSearch(Generic[R]):
    """Finds the first of several markers in a text that is still growing.

    `roles` maps markers in the encoding to what they mean; none of them begins with another.
    """

    def __init__(self, roles: Mapping[str, R]) -> None:
        self.roles = dict(roles)
        longest_first = sorted(self.roles, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._longest = len(longest_first[0]) if longest_first else 0
        self._begun = re.compile("|".join(_prefixes(marker) for marker in longest_first if len(marker) > 1) or r"(?!)")

    def find(self, text: str, start: int) -> re.Match[str] | None:
        return self._whole.search(text, start)

    def settled(self, text: str, start: int) -> int:
        """Up to where `text`, in which no marker is found from `start` on, cannot be the beginning of one."""
        if self._longest < 2:
            return len(text)
        begun = self._begun.search(text, max(start, len(text) - self._longest + 1))
        return len(text) if begun is None else begun.start()


def _prefixes(marker: str) -> str:
    """A pattern of every proper prefix of `marker` at the end of a text."""
    pattern = ""
    for character in reversed(marker[1:-1]):
        pattern = f"(?:{re.escape(character)}{pattern})?"
    return rf"{re.escape(marker[0])}{pattern}\Z"
