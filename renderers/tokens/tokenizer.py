"""A tokenizer that never encodes ordinary text as a control token.

The control tokens (`<|im_start|>`, `<think>`...) are removed from the tokenizer that encodes text and kept in a table:
where the template printed one, its id comes from the table; the same characters in content are ordinary text. Uses
`tokenizers` directly; neither torch nor transformers is needed.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Encoding, Tokenizer

from renderers.errors import LoadError, MessageError, missing_token
from renderers.process.caches import ByteLRU
from renderers.process.files import read_json
from renderers.tokens.added_tokens import AddedToken, ControlMatch, ControlPattern, added_tokens
from renderers.tokens.length_bound import covers_every_character


class EncodedRun(NamedTuple):
    """One BPE pass: token ids, and for some characters the first token that starts there or later."""

    ids: list[int]
    token_at: dict[int, int]


class TemplateTokenizer:
    """Encodes runs of plain text and maps control tokens by table. Safe to share between threads."""

    def __init__(
        self,
        definition: Mapping[str, Any],
        *,
        model: str,
        more_added_tokens: Mapping[int, Mapping[str, Any]] | None = None,
        cache_bytes: int = 64 * 2**20,
    ) -> None:
        """`definition` is the parsed tokenizer.json; `model` names the model in errors.

        `more_added_tokens` maps id -> token, as `added_tokens_decoder` of tokenizer_config.json does: tokens that
        transformers adds to those of tokenizer.json.
        """
        self.model = model
        added = added_tokens(definition, more_added_tokens or {})
        self._added_token_of = {token.id: token.content for token in added}
        self._control = ControlPattern([token for token in added if token.is_control])
        self._token_of = {token_id: content for content, token_id in self._control.id_of.items()}
        unknown_id, body_definition = _body_definition(definition, added)
        self._covers_text = covers_every_character(body_definition)
        #: The tokenizer of ordinary text, without control tokens.
        self.body = _tokenizer(body_definition)
        inner = _without_first_prefix(body_definition)
        self._inner = self.body if inner is None else _tokenizer(inner)
        # Encoding unknown characters as the unknown token is correct.
        self._forbidden = frozenset(self._token_of.keys() - {unknown_id})
        self.vocab_size = max([self.body.get_vocab_size(with_added_tokens=True) - 1, *self._added_token_of]) + 1
        self._runs: ByteLRU[tuple[bool, str], EncodedRun] = ByteLRU(cache_bytes)

    @classmethod
    def from_file(
        cls,
        path: Path,
        *,
        model: str,
        more_added_tokens: Mapping[int, Mapping[str, Any]] | None = None,
        cache_bytes: int = 64 * 2**20,
    ) -> TemplateTokenizer:
        """Read a tokenizer.json. Raises `LoadError` where it is not one."""
        definition = read_json(path)
        if not isinstance(definition.get("model"), dict):
            raise LoadError(f"{path!s}: not a tokenizer.json: it has no `model`")
        return cls(definition, model=model, more_added_tokens=more_added_tokens, cache_bytes=cache_bytes)

    # Control tokens.

    def control_id(self, token: str) -> int | None:
        """The id of a control token, or None."""
        return self._control.id_of.get(token)

    def require_control_id(self, token: str, needed_by: str) -> int:
        """The id of a control token. Raises `LoadError` with the token, the model and `needed_by`."""
        token_id = self._control.id_of.get(token)
        if token_id is None:
            raise missing_token(token, self.model, needed_by)
        return token_id

    def control_token(self, token_id: int) -> str | None:
        """The text of a control token, or None for any other id."""
        return self._token_of.get(token_id)

    def find_control(self, text: str, start: int, end: int, *, before: int | None = None) -> ControlMatch | None:
        """The first control token in `text[start:end]`; with `before`, one that begins before it."""
        return self._control.find(text, start, end, before=before)

    def controls(self, text: str) -> Iterator[ControlMatch]:
        """The control tokens in a text, from left to right."""
        position = 0
        while (found := self.find_control(text, position, len(text))) is not None:
            yield found
            position = found.end

    def encode_scaffold(self, scaffold: str) -> list[int]:
        """The ids of text as a template prints it: control tokens by table, the rest as ordinary text."""
        ids: list[int] = []
        position = 0
        for found in self.controls(scaffold):
            ids += [*self.encode_run(scaffold[position : found.start]).ids, found.token_id]
            position = found.end
        return ids + self.encode_run(scaffold[position:]).ids

    def vocabulary(self) -> dict[str, int]:
        """The id of every token, as the tokenizer writes it; the control tokens are among them."""
        hidden = self._token_of.keys()
        body = self.body.get_vocab(with_added_tokens=True)
        return {token: token_id for token, token_id in body.items() if token_id not in hidden} | self._control.id_of

    # Text.

    @cached_property
    def longest_piece(self) -> int | None:
        """The most characters of a text that one token covers; None where there is no bound."""
        if not self._covers_text:
            return None
        return max(map(len, self.body.get_vocab(with_added_tokens=True)), default=1)

    def added_token(self, token_id: int) -> str | None:
        """The text of an added token, control or not, or None for an id of the base vocabulary."""
        return self._added_token_of.get(token_id)

    def encode_run(self, text: str, cuts: Sequence[int] = (), *, first: bool = False) -> EncodedRun:
        """Encode text in one pass; the result holds no control token.

        `cuts` are the characters for which `token_at` gives the token. `first`: the run begins the prompt; some
        tokenizers put a space before the first word of a prompt only.
        """
        run = self._runs.get((first, text))
        if run is None or not run.token_at.keys() >= set(cuts):
            run = self._encode(text, cuts, self.body if first else self._inner)
            # About: the string, list slots and int objects, dict entries, the rest.
            size = 4 * len(text) + 36 * len(run.ids) + 100 * len(run.token_at) + 400
            self._runs.put((first, text), run, size)
        return run

    def _encode(self, text: str, cuts: Sequence[int], body: Tokenizer) -> EncodedRun:
        try:
            encoding = body.encode(text, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError) as error:  # depends on the release of tokenizers
            raise MessageError(
                f"text with half a surrogate pair is not Unicode and cannot be encoded: {text[:80]!r}. Decode its "
                "source with errors='replace'."
            ) from error
        ids, token_at = encoding.ids, {cut: _token_at(encoding, cut, len(text)) for cut in cuts}
        if not self._forbidden.isdisjoint(ids):
            token = next(self._token_of[token_id] for token_id in ids if token_id in self._forbidden)
            raise MessageError(
                f"the tokenizer of {self.model} encodes plain text {text[:80]!r} as the control token {token!r}; "
                "content could forge it. Remove the token from the base vocabulary or reject such content."
            )
        return EncodedRun(ids, token_at)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, that of control tokens included.

        Bytes that are not UTF-8 become U+FFFD, and so does an id without a token: a model's embedding often has more
        rows than its vocabulary, and a policy may sample such a row.
        """
        pieces: list[str] = []
        run_start = 0
        for index, token_id in enumerate(token_ids):
            token = self._added_token_of.get(token_id)
            if token is None and not 0 <= token_id < self.vocab_size:
                token = "\ufffd"
            if token is not None:
                pieces += [self._decode_run(token_ids[run_start:index]), token]
                run_start = index + 1
        pieces.append(self._decode_run(token_ids[run_start:]))
        return "".join(pieces)

    def _decode_run(self, token_ids: Sequence[int]) -> str:
        return self.body.decode(list(token_ids), skip_special_tokens=False) if len(token_ids) else ""


def _token_at(encoding: Encoding, character: int, end: int) -> int:
    """The first token that starts at the character or later."""
    if character == 0:
        return 0
    for position in range(character, end):
        token = encoding.char_to_token(position)
        if token is not None:  # None: a character that the tokenizer drops
            first, _ = encoding.token_to_chars(token) or (character, end)
            return int(token) + (first < character)
    return len(encoding)


def _body_definition(definition: Mapping[str, Any], added: Sequence[AddedToken]) -> tuple[int | None, dict[str, Any]]:
    """The id of the unknown token, and the definition without control tokens."""
    model = definition["model"]
    unknown_id = model.get("unk_id")
    if unknown_id is None:
        unknown_id = next((token.id for token in added if token.content == model.get("unk_token")), None)
    # Random names, so that no text holds one.
    hidden = {token.id: f"\ufdd0{os.urandom(8).hex()}" for token in added if token.is_control}
    if model.get("type") == "Unigram":
        # Its vocabulary holds the control tokens too. They are renamed and not removed, because ids are positions.
        vocabulary = [
            [hidden.get(token_id, piece) if token_id != unknown_id else piece, score]
            for token_id, (piece, score) in enumerate(model["vocab"])
        ]
        model = {**model, "vocab": vocabulary}
    renamed: list[Mapping[str, Any]] = []
    if len(hidden) < len(added):
        # `tokenizers` numbers added tokens by position: removing one would change the ids of those behind it.
        renamed = [{**token.definition, "content": hidden.get(token.id, token.content)} for token in added]
    return unknown_id, {**definition, "model": model, "added_tokens": renamed, "post_processor": None}


def _tokenizer(definition: Mapping[str, Any]) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(json.dumps(definition))
    except Exception as error:
        if type(error) is not Exception:  # `tokenizers` raises a plain Exception for an invalid definition
            raise
        raise LoadError(f"tokenizer.json: not a tokenizer that `tokenizers` can read: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _without_first_prefix(definition: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The definition without the space before the first word; None if it has none there, or one before every run."""
    pre_tokenizer = copy.deepcopy(definition.get("pre_tokenizer")) or {}
    found = False
    for step in (pre_tokenizer, *pre_tokenizer.get("pretokenizers", ())):
        if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"
            found = True
    return {**definition, "pre_tokenizer": pre_tokenizer} if found else None
