"""Shared by all tests: each tokenizer of the corpus, read once, a hostile HTTP server, and host names."""

from __future__ import annotations

import functools
import hashlib
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import corpus
import grafted
import pytest
from hostile_server import HostileServer, serving

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


@pytest.fixture
def server() -> Iterator[HostileServer]:
    with serving() as running:
        yield running


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Set what a name resolves to, answer after answer; returns the list of names asked for so far."""
    real, table, asked = socket.getaddrinfo, dict[str, list[list[str]]](), list[str]()

    def getaddrinfo(host: str, port: Any, *args: Any, **options: Any) -> Any:
        if host not in table:
            return real(host, port, *args, **options)
        asked.append(host)
        answers = table[host]
        addresses = answers.pop(0) if len(answers) > 1 else answers[0]
        return [found for address in addresses for found in real(address, port, type=socket.SOCK_STREAM)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    def resolve(name: str, *answers: list[str]) -> list[str]:
        table[name] = list(answers)
        return asked

    return resolve
