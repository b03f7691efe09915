"""Added tokens of a tokenizer: which of them are control tokens, and how to find those in text."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from renderers.errors import LoadError, short_repr

# Tokenizers also add tokens that are ordinary text: letters (DeepSeek), runs of white space, HTML tags (Gemma).
# \uff5c is DeepSeek's bar.
_MARKUP = re.compile(r"[<>\[\]{}|\uff5c/]")
_NO_SPACE = re.compile(r"\S")
_SURROGATE = re.compile("[\ud800-\udfff]")  # half of a surrogate pair is not Unicode text
#: All ids are smaller; engines and arrays store them in 32 bits.
TOKEN_ID_LIMIT = 2**31
_HTML_TAG = re.compile(
    r"</?(?:a|b|i|u|s|p|br|hr|em|strong|code|pre|sub|sup|ul|ol|li|dl|dt|dd|h[1-6]|blockquote|caption|table|thead|tbody"
    r"|tfoot|tr|th|td|div|span|img|figure|figcaption|del|ins|kbd|mark|small)>"
)


@dataclass(frozen=True, slots=True)
class AddedToken:
    """One entry of `added_tokens`; `definition` is the entry as tokenizer.json has it."""

    id: int
    content: str
    definition: Mapping[str, Any]

    @property
    def is_control(self) -> bool:
        """Whether content must never become this token: a special token, or one that looks like markup."""
        if self.definition.get("special"):
            return True
        return bool(_MARKUP.search(self.content)) and not _HTML_TAG.fullmatch(self.content)


class ControlMatch(NamedTuple):
    """A control token found at characters `start:end`; without the white space around it, at `text_range`."""

    start: int
    end: int
    token_id: int
    text_range: tuple[int, int]


def added_tokens(definition: Mapping[str, Any], more: Mapping[int, Mapping[str, Any]]) -> list[AddedToken]:
    """The added tokens of a tokenizer.json, and those of `more` (id -> token) that it does not have.

    Raises `LoadError` where an id of `more` is already that of another token.
    """
    entries = definition.get("added_tokens") or []
    for entry in entries if isinstance(entries, list) else [entries]:
        if not is_token_entry(entry) or type(entry.get("id")) is not int or not 0 <= entry["id"] < TOKEN_ID_LIMIT:
            raise LoadError(f"tokenizer.json: added_tokens holds no id and content at {short_repr(entry)}")
    tokens = {entry["content"]: AddedToken(entry["id"], entry["content"], entry) for entry in entries}
    text_of_id = {token.id: token.content for token in tokens.values()}
    for token_id, entry in more.items():
        content = entry["content"]
        if content in tokens:
            continue
        if token_id in text_of_id:
            raise LoadError(
                f"tokenizer_config.json: added_tokens_decoder says that id {token_id} is {content!r}, "
                f"tokenizer.json that it is {text_of_id[token_id]!r}"
            )
        tokens[content] = AddedToken(token_id, content, {**entry, "id": token_id})
        text_of_id[token_id] = content
    return list(tokens.values())


def is_token_entry(entry: Any) -> bool:
    """Whether an entry of a tokenizer's file describes a token: its `content` is Unicode text."""
    content = entry.get("content") if isinstance(entry, dict) else None
    return isinstance(content, str) and content != "" and not _SURROGATE.search(content)


class ControlPattern:
    """Finds control tokens in text as `tokenizers` does: leftmost, longest, with the flags of each token.

    With `lstrip` and `rstrip` a token includes the white space beside it; with `single_word` it is not found beside a
    word character.
    """

    def __init__(self, tokens: Sequence[AddedToken]) -> None:
        self.id_of = {token.content: token.id for token in tokens}
        self._flags = {
            token.content: token.definition
            for token in tokens
            if any(token.definition.get(flag) for flag in ("lstrip", "rstrip", "single_word"))
        }
        self._longest = max(map(len, self.id_of), default=1)
        self._pattern = re.compile(_alternatives(sorted(self.id_of)) or r"(?!)")

    def find(self, text: str, start: int, end: int, *, before: int | None = None) -> ControlMatch | None:
        """The first control token inside `text[start:end]`; with `before`, one that begins before that character."""
        last_end = end if before is None else min(end, before + self._longest - 1)
        while (found := self._pattern.search(text, start, last_end)) is not None:
            flags = self._flags.get(found.group())
            if flags is None:
                return ControlMatch(*found.span(), self.id_of[found.group()], found.span())
            around = text[max(0, found.start() - 1) : found.start()] + text[found.end() : found.end() + 1]
            if not flags.get("single_word") or re.search(r"\w", around) is None:
                return self._stripped(found, flags, text, start, end)
            start = found.end()
        return None

    def _stripped(
        self, found: re.Match[str], flags: Mapping[str, Any], text: str, start: int, end: int
    ) -> ControlMatch:
        first, last = found.span()
        if flags.get("lstrip"):
            first = start + len(text[start:first].rstrip())
        if flags.get("rstrip"):
            behind = _NO_SPACE.search(text, last, end)
            last = end if behind is None else behind.start()
        return ControlMatch(first, last, self.id_of[found.group()], found.span())


def _alternatives(words: Sequence[str]) -> str:
    """A pattern that matches the longest of the sorted words and tries their common prefixes once.

    Models have up to 1,300 control tokens, most with a common prefix; trying one after the other at every `<` of a text
    takes a hundred times as long.
    """
    branches: dict[str, list[str]] = {}
    for word in words:
        branches.setdefault(word[:1], []).append(word[1:])
    ends_here = branches.pop("", None) is not None
    pieces = [re.escape(character) + _alternatives(rest) for character, rest in branches.items()]
    if not pieces:
        return ""
    if ends_here:
        return f"(?:{'|'.join(pieces)})?"
    return pieces[0] if len(pieces) == 1 else f"(?:{'|'.join(pieces)})"
