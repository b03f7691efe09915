"""A fast encoder for ASCII text: splits words with Python's `re` and encodes each word once.

Two thirds of the time of a byte-level BPE pass go into splitting text into words, by a regular expression over Unicode
properties. For ASCII text an equal expression of Python's own `re` is ten times as fast, and most words of a
conversation were encoded before. The encoder is used only for tokenizers whose steps it can reproduce, and only if it
agrees with the tokenizer on a probe that holds every ASCII character.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

# The ASCII characters of a Unicode property, as the inside of a character class.
_ASCII_OF = {
    "L": "A-Za-z",
    "Lu": "A-Z",
    "Ll": "a-z",
    "Lt": "",
    "Lm": "",
    "Lo": "",
    "M": "",
    "N": "0-9",
    "Nd": "0-9",
    "P": r"!\"#%&'()*,\-./:;?@\[\\\]_{}",
    "S": r"$+<=>\^`|~",
}
# The expression of ByteLevel(use_regex=True), which is that of GPT-2.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PROPERTY = re.compile(r"\\p\{(\w+)\}")
# Byte-level BPE writes unprintable bytes as characters from U+0100 on.
_UNPRINTABLE = {byte: 0x100 + byte for byte in range(33)} | {127: 0x121}
_PROBE = "".join(map(chr, range(1, 128))) + (
    " It's 1234567 o'clock:  DON'T  (x+y)\n\n\tfoo_bar.. \r\n  'LL we'll -- {\"a\": [1.25e-3, null]}\n   end "
)


# Longer words (base64, DNA) are not cached: the cache is bounded by the number of words, and they are rarely repeated.
_MAX_CACHED_LENGTH = 64


class _Step(NamedTuple):
    """One split: `pattern` has one group; the text between its matches is kept too, or dropped."""

    pattern: re.Pattern[str]
    keeps_gaps: bool

    def split(self, text: str) -> list[str]:
        pieces = self.pattern.split(text)  # gap, match, gap, match, ..., gap
        return [piece for piece in (pieces if self.keeps_gaps else pieces[1::2]) if piece]


class AsciiEncoder:
    """Encodes ASCII text exactly as its tokenizer does. Safe to share between threads."""

    def __init__(self, steps: Sequence[_Step], body: Tokenizer, max_words: int) -> None:
        self._steps = steps
        self._token_length = _TokenLengths(body)
        self._ids_of = _WordCache(body, max_words)

    @classmethod
    def of(cls, definition: Mapping[str, Any], body: Tokenizer, *, max_words: int) -> AsciiEncoder | None:
        """The encoder of a tokenizer, or None. `definition` is its tokenizer.json without control tokens."""
        steps = _steps(definition)
        if steps is None or definition["added_tokens"] or not _is_plain_bpe(definition["model"]):
            return None
        if any(body.token_to_id(chr(_UNPRINTABLE.get(byte, byte))) is None for byte in range(128)):
            return None  # a character without a token would shift the positions of those behind it
        if not _leaves_ascii_alone(definition.get("normalizer")):
            return None
        words = cls(steps, body, max_words)
        probed = words.encode(_PROBE)
        agrees = probed is not None and probed[0] == body.encode(_PROBE, add_special_tokens=False).ids
        return words if agrees else None

    def encode(self, text: str, cuts: Sequence[int] = ()) -> tuple[list[int], dict[int, int]] | None:
        """The ids of ASCII text, and for each of `cuts` (ascending characters) the first token from there on.

        None where a step drops characters: only the tokenizer itself knows the positions then.
        """
        words = [text]
        for step in self._steps:
            words = [piece for word in words for piece in step.split(word)]
        pieces = list(map(self._ids_of.__getitem__, words))
        ids = list(itertools.chain.from_iterable(pieces))
        if not any(cuts):
            return ids, dict.fromkeys(cuts, 0)
        starts = list(itertools.accumulate(map(len, words), initial=0))
        if starts[-1] != len(text):
            return None
        tokens = list(itertools.accumulate(map(len, pieces), initial=0))
        token_at: dict[int, int] = {}
        inside = token = 0
        for cut in cuts:
            word = bisect.bisect_right(starts, cut) - 1
            if inside < starts[word]:  # else the cut before lies in the same word
                inside, token = starts[word], tokens[word]
            while inside < cut:
                inside += self._token_length[ids[token]]
                token += 1
            token_at[cut] = token
        return ids, token_at


class _WordCache(dict[str, list[int]]):
    """Word -> its ids, encoded on the first access; cleared when it holds `max_words`."""

    def __init__(self, body: Tokenizer, max_words: int) -> None:
        super().__init__()
        self._model = body.model
        self._max_words = max_words

    def __missing__(self, word: str) -> list[int]:
        ids = [token.id for token in self._model.tokenize(word.translate(_UNPRINTABLE))]
        if len(word) <= _MAX_CACHED_LENGTH:
            if len(self) >= self._max_words:
                self.clear()
            self[word] = ids
        return ids


class _TokenLengths(dict[int, int]):
    """Id -> its number of ASCII characters: a byte-level token is written with one character for each byte."""

    def __init__(self, body: Tokenizer) -> None:
        super().__init__()
        self._body = body

    def __missing__(self, token_id: int) -> int:
        length = self[token_id] = len(self._body.id_to_token(token_id) or "")
        return length


def _is_plain_bpe(model: Mapping[str, Any]) -> bool:
    special = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "fuse_unk")
    return model.get("type") == "BPE" and not any(model.get(name) for name in special)


def _leaves_ascii_alone(normalizer: Mapping[str, Any] | None) -> bool:
    if normalizer is None or normalizer["type"] in ("NFC", "NFD", "NFKC", "NFKD"):
        return True
    return normalizer["type"] == "Sequence" and all(map(_leaves_ascii_alone, normalizer["normalizers"]))


def _steps(definition: Mapping[str, Any]) -> list[_Step] | None:
    """The pre-tokenizer's steps as expressions that split ASCII text; None if one of them cannot be expressed."""
    pre_tokenizer = definition.get("pre_tokenizer") or {}
    *splits, last = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    steps = [_split_step(part) for part in splits]
    if last.get("use_regex", True):
        steps.append(_step(_GPT2, keeps_gaps=True))
    return None if None in steps else [step for step in steps if step is not None]


def _split_step(part: Mapping[str, Any]) -> _Step | None:
    if part["type"] == "Digits":
        return _step(r"\p{N}" if part["individual_digits"] else r"\p{N}+", keeps_gaps=True)
    if part["type"] != "Split" or "Regex" not in part["pattern"]:
        return None
    how = (part["behavior"], part["invert"])
    if how not in (("Isolated", False), ("Isolated", True), ("Removed", True)):
        return None
    return _step(part["pattern"]["Regex"], keeps_gaps=how[0] == "Isolated")


def _step(pattern: str, *, keeps_gaps: bool) -> _Step | None:
    ascii_pattern = _in_ascii(pattern)
    if ascii_pattern is None:
        return None
    try:
        compiled = re.compile(f"({ascii_pattern})", re.ASCII)
    except re.error:
        return None
    # `split` would also return the matches of a group inside the pattern.
    return _Step(compiled, keeps_gaps) if compiled.groups == 1 else None


def _in_ascii(pattern: str) -> str | None:
    """The expression with ASCII classes for its Unicode properties; None where Python would read it differently."""
    pieces: list[str] = []
    position, in_class = 0, False
    while position < len(pattern):
        character = pattern[position]
        if (found := _PROPERTY.match(pattern, position)) is not None:
            inside = _ASCII_OF.get(found.group(1))
            if inside is None:
                return None
            pieces.append(inside if in_class else f"[{inside}]" if inside else "(?!)")
            position = found.end()
            continue
        if character == "\\":
            if pattern[position + 1] not in "rntsSdw.|()[]{}*+?^$-/'\"\\":
                return None
            pieces.append(pattern[position : position + 2])
            position += 2
            continue
        if in_class and (character == "[" or pattern.startswith("&&", position)):
            return None  # nested classes and intersections
        if character == "[" and not in_class:
            in_class = True
        elif character == "]" and in_class:
            in_class = False
        pieces.append(character)
        position += 1
    return "".join(pieces)
