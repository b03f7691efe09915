"""What all the tests of a process share: each tokenizer of the corpus, read once."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import corpus
import grafted

from renderers.tokens.tokenizer import TemplateTokenizer

_from_file = TemplateTokenizer.from_file
_SHARED: dict[tuple[str, ...], TemplateTokenizer] = {}


def _read_once(path: Path, *, model: str, **options: Any) -> TemplateTokenizer:
    """Reading one of the corpus takes seconds, and some two hundred directories and templates share a few dozen."""
    if path.parent.parent not in (corpus.UNPACKED, grafted.GRAFTED):
        return _from_file(path, model=model, **options)
    key = (_digest(path), json.dumps(options, sort_keys=True))
    if key not in _SHARED:
        _SHARED[key] = _from_file(path, model=model, **options)
    return _SHARED[key]


@functools.cache
def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


TemplateTokenizer.from_file = _read_once  # type: ignore[method-assign,assignment]
