"""Where sampled sequences end: token ids that engines know, and texts that are looked for in what they sample."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from renderers.loading import load_tokenizer
from renderers.model_files import ModelFiles
from rollouts.errors import ArgumentError, is_unicode


@dataclass(frozen=True, slots=True)
class Endings:
    """What ends a sequence of one model. `end_ids`: its own end tokens; `decode` makes text of ids, control tokens
    included."""

    end_ids: tuple[int, ...]
    decode: Callable[[Sequence[int]], str]

    @classmethod
    def of_model(cls, directory: Path) -> Self:
        """The end tokens are `eos_token` of the tokenizer and `eos_token_id` of generation_config.json.

        Raises `renderers.errors.LoadError` for a directory without a tokenizer.json.
        """
        files = ModelFiles.of(directory)
        tokenizer = load_tokenizer(directory)
        path = directory / "generation_config.json"
        generation = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        listed = generation.get("eos_token_id")
        own = files.special_tokens.get("eos_token", "")
        eos = tokenizer.control_id(own)
        if eos is None:
            eos = tokenizer.body.token_to_id(own)
        ids = [eos, *(listed if isinstance(listed, list) else [listed])]
        return cls(tuple(dict.fromkeys(each for each in ids if isinstance(each, int))), tokenizer.decode)

    def of_request(self, stop: Sequence[str] | Sequence[int] | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The token ids and the texts that end the sequences of a request with `stop`.

        The model's own end tokens end a sequence beside those, as in Tinker, but for `()`, with which nothing does.
        Raises `ArgumentError` for an empty text, and for one that is no Unicode.
        """
        if stop is None:
            return self.end_ids, ()
        if not len(stop):
            return (), ()
        if "" in stop:
            raise ArgumentError("stop", stop, "leave out the empty text, which ends a sequence before its first token")
        ids = tuple(each for each in stop if isinstance(each, int))
        texts = tuple(each for each in stop if isinstance(each, str))
        if wrong := [each for each in texts if not is_unicode(each)]:
            raise ArgumentError("stop", wrong[0], "leave it out: it has half of a surrogate pair, and no text has one")
        return tuple(dict.fromkeys((*ids, *self.end_ids))), texts
