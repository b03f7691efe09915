"""Fixtures of several test files: tokenizers read once, a hostile HTTP server, host names, Hugging Face processors."""

import functools
import hashlib
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import corpus
import grafted
import pytest
from hostile_server import HostileServer, serving

from renderers.tokens.tokenizer import TemplateTokenizer
from renderers.vision.hf_processor import HFProcessor

_from_file = TemplateTokenizer.from_file
_SHARED: dict[tuple[str, ...], TemplateTokenizer] = {}


def _read_once(path: Path, *, model: str, **options: Any) -> TemplateTokenizer:
    """Reading one of the corpus takes seconds, and some two hundred directories and templates share a few dozen."""
    if path.parent.parent not in (corpus.UNPACKED, corpus.CUT, grafted.GRAFTED):
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


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Test processes that share the cores take several times as long when each has torch use all of them."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def processor_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By the name of a model family: a directory with its processor."""
    from hf_families import FAMILIES

    families = {family.name: family for family in FAMILIES}
    return functools.cache(lambda name: families[name].save(tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def reference_processor(processor_directory: Callable[[str], Path]) -> Callable[[str], Any]:
    """By the name of a model family: the processor that transformers loads from its directory."""
    from transformers import AutoProcessor

    return functools.cache(lambda name: AutoProcessor.from_pretrained(processor_directory(name)))


@pytest.fixture(scope="session")
def hf_processors(processor_directory: Callable[[str], Path]) -> Callable[[str], Mapping[str, HFProcessor]]:
    """By the name of a model family: its HFProcessor for each modality."""
    from processor_outputs import load_processors

    return functools.cache(lambda name: load_processors(processor_directory(name)))
