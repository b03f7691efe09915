"""The length of a prompt is judged before its text is encoded: by the longest text that the context can hold.

Encoding takes about 170 bytes of memory for each byte of text. A token covers no more characters than the longest piece
of the vocabulary has, where the tokenizer drops no character, and replaces no run of unknown ones by one token.
"""

import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from renderers.errors import OverlongPromptError

_most_tokens: ContextVar[int | None] = ContextVar("most_tokens", default=None)


@contextmanager
def at_most_tokens(count: int | None) -> Iterator[None]:
    """Let prompts that are made in the block, of which the text alone shows that they have more tokens, raise.

    They raise `OverlongPromptError` before they are encoded. None: no bound.
    """
    before = _most_tokens.set(count)
    try:
        yield
    finally:
        _most_tokens.reset(before)


def check_length(text: str, characters: int, longest_piece: int | None) -> None:
    """Raise `OverlongPromptError` if so many characters have more tokens than the block allows."""
    most = _most_tokens.get()
    if most is None or longest_piece is None or characters <= most * longest_piece:
        return
    if not unicodedata.is_normalized("NFC", text):
        characters //= _MOST_COMPOSED
    if (least := -(-characters // longest_piece)) > most:
        raise OverlongPromptError(prompt_len=least, max_prompt_len=most, is_least=True)


#: Characters that NFC may make one of: no canonical decomposition of Unicode is longer.
_MOST_COMPOSED: Final = 4
#: Steps of a tokenizer that drop no character, but for the composing of NFC.
_COVERING: Final = frozenset({"NFC", "NFD", "Prepend", "ByteLevel", "Metaspace", "Digits"})
#: Alternatives of GPT's pattern that together match every character.
_EVERYTHING: Final = frozenset({r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s+", r"[^\r\n\p{L}\p{N}]?\p{L}+"})


def covers_every_character(definition: Mapping[str, Any]) -> bool:
    """Whether each character of a text is in a token whose piece is that part of the text, for any text.

    `definition` is a tokenizer.json. The answer is no where it is not known.
    """
    model, added = definition["model"], definition.get("added_tokens") or ()
    pre_tokenizers = _steps(definition.get("pre_tokenizer"), "pretokenizers")
    steps = [*_steps(definition.get("normalizer"), "normalizers"), *pre_tokenizers]
    if model.get("type") != "BPE" or any(token.get("lstrip") or token.get("rstrip") for token in added):
        return False
    bytes_known = model.get("byte_fallback") or any(step["type"] == "ByteLevel" for step in steps)
    names = [f"<0x{byte:02X}>" for byte in range(256)] if model.get("byte_fallback") else _BYTE_LETTERS
    return bool(bytes_known) and model["vocab"].keys() >= set(names) and all(map(_covers, steps))


#: The letters by which ByteLevel writes the bytes: those of ASCII and Latin-1 that are printed, then U+0100 and on.
_BYTE_LETTERS: Final = [*map(chr, (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144)))]


def _covers(step: Mapping[str, Any]) -> bool:
    pattern = step.get("pattern") or {}
    match step["type"]:
        case "Replace":
            return "String" in pattern and 0 < len(pattern["String"]) <= len(step["content"])
        case "Split" if step.get("behavior") == "Removed":
            return bool(step.get("invert")) and set(pattern.get("Regex", "").split("|")) >= _EVERYTHING
        case "Split":
            return True
    return step["type"] in _COVERING


def _steps(step: Mapping[str, Any] | None, members: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    return [one for each in step[members] for one in _steps(each, members)] if step["type"] == "Sequence" else [step]
