"""A tokenizer.json read so that text can never become a control token by accident.

The added tokens (`<|im_start|>`, `<think>`...) are taken out of the tokenizer that encodes text and kept in a table
beside it: where the template printed one, its id comes from the table; where content spells one, it is ordinary text.
Uses `tokenizers` directly; neither torch nor transformers is needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from renderers.bounded_cache import BoundedCache
from renderers.errors import InvalidFileError, MissingTokenError, TokenizerError


@dataclass(frozen=True, slots=True)
class ControlMatch:
    """A control token spelled at characters `start:end`."""

    start: int
    end: int
    token_id: int


class EncodedRun(NamedTuple):
    """One BPE pass: token ids, and per token the character of the run where it starts (int32, same length)."""

    ids: list[int]
    starts: np.ndarray

    def held_bytes(self, text: str) -> int:
        """About what a cache entry costs: a list slot and an int object a token, the string, the dict entry."""
        return 4 * len(text) + 36 * len(self.ids) + self.starts.nbytes + 150


class TemplateTokenizer:
    """Encodes runs of plain text and maps control tokens by table. Safe to share between threads."""

    def __init__(self, definition: dict[str, Any], *, model: str, cache_bytes: int = 64 * 2**20) -> None:
        """`definition` is the parsed tokenizer.json; `model` names the model in errors."""
        self.model = model
        added: list[dict[str, Any]] = definition.get("added_tokens") or []
        self._id_of = {token["content"]: int(token["id"]) for token in added}
        self._token_of = {token_id: content for content, token_id in self._id_of.items()}
        try:
            self._body = Tokenizer.from_str(json.dumps({**definition, "added_tokens": [], "post_processor": None}))
        except Exception as error:
            if type(error) is not Exception:  # what tokenizers raises for a definition that it cannot read
                raise
            raise InvalidFileError("tokenizer.json", f"not a tokenizer that `tokenizers` can read: {error}") from error
        self._body.no_padding()
        self._body.no_truncation()
        self.vocab_size = max([self._body.get_vocab_size(with_added_tokens=False) - 1, *self._id_of.values()]) + 1
        # Longest first: a token takes priority over the tokens that it begins with.
        spelled = sorted((re.escape(content) for content in self._id_of), key=len, reverse=True)
        self._pattern = re.compile("|".join(spelled) or r"(?!)")
        self._runs: BoundedCache[str, EncodedRun] = BoundedCache(cache_bytes)

    @classmethod
    def from_file(cls, path: Path, *, model: str) -> TemplateTokenizer:
        try:
            definition = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise InvalidFileError(str(path), f"not readable as JSON: {error}") from error
        if not isinstance(definition, dict) or "model" not in definition:
            raise InvalidFileError(str(path), "not a tokenizer.json: it has no `model`")
        return cls(definition, model=model)

    # Control tokens.

    def control_id(self, token: str) -> int | None:
        """The id of an added token, or None."""
        return self._id_of.get(token)

    def require_control_id(self, token: str, needed_by: str) -> int:
        """The id of an added token; `MissingTokenError` names the token, the model and who needs it."""
        token_id = self._id_of.get(token)
        if token_id is None:
            raise MissingTokenError(token, self.model, needed_by)
        return token_id

    def control_token(self, token_id: int) -> str | None:
        """The text of an added token, or None for an ordinary id."""
        return self._token_of.get(token_id)

    def find_control(self, text: str, start: int, end: int) -> ControlMatch | None:
        """The first control token spelled wholly within `text[start:end]`."""
        found = self._pattern.search(text, start, end)
        return None if found is None else ControlMatch(found.start(), found.end(), self._id_of[found.group()])

    # Text.

    def encode_run(self, text: str) -> EncodedRun:
        """Encode text in one pass; no control token can come out of it."""
        run = self._runs.get(text)
        if run is None:
            run = self._encode(text)
            self._runs.put(text, run, run.held_bytes(text))
        return run

    def _encode(self, text: str) -> EncodedRun:
        try:
            encoding = self._body.encode(text, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError) as error:  # which of them depends on the release of tokenizers
            raise TokenizerError(
                f"text with half a surrogate pair has no tokens, because it is not Unicode: {text[:80]!r}. Decode it "
                "with errors='replace' where it enters."
            ) from error
        ids = encoding.ids
        if not self._token_of.keys().isdisjoint(ids):
            token = next(self._token_of[token_id] for token_id in ids if token_id in self._token_of)
            raise TokenizerError(
                f"the tokenizer of {self.model} makes the control token {token!r} out of plain text {text[:80]!r}; "
                "content could forge it. Remove the token from the base vocabulary or reject such content."
            )
        offsets = np.asarray(encoding.offsets, dtype=np.int32).reshape(-1, 2)
        return EncodedRun(ids, np.ascontiguousarray(offsets[:, 0]))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, control tokens spelled out.

        Bytes that are not UTF-8 become U+FFFD, and so does an id that the tokenizer has no token for: a model's
        embedding is often padded past its vocabulary, and a policy may sample such a row.
        """
        pieces: list[str] = []
        run_start = 0
        for index, token_id in enumerate(token_ids):
            token = self._token_of.get(token_id)
            if token is None and not 0 <= token_id < self.vocab_size:
                token = "\ufffd"
            if token is not None:
                pieces += [self._decode_run(token_ids[run_start:index]), token]
                run_start = index + 1
        pieces.append(self._decode_run(token_ids[run_start:]))
        return "".join(pieces)

    def _decode_run(self, token_ids: Sequence[int]) -> str:
        return self._body.decode(list(token_ids), skip_special_tokens=False) if token_ids else ""
