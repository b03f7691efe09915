"""Renderers of the corpus's templates, one each for all the tests of a process."""

import functools
from datetime import datetime
from pathlib import Path

import corpus
from grafted import grafted_tokenizer_dir

from renderers import TemplateRenderer, load_renderer
from renderers.tokens.tokenizer import TemplateTokenizer

#: What templates that print the date take for today.
TODAY = datetime(2031, 2, 3, 4, 5)


def directory_of(template: str) -> Path:
    """A model directory with the template's own tokenizer, or one that has at least its control tokens."""
    tokenizer = corpus.tokenizer_of(template)
    return grafted_tokenizer_dir(template) if tokenizer is None else corpus.model_dir(tokenizer)


@functools.cache
def tokenizer_named(name: str) -> TemplateTokenizer:
    """The tokenizer of a model of the corpus."""
    return TemplateTokenizer.from_file(corpus.model_dir(name) / "tokenizer.json", model=name)


@functools.cache
def renderer_of(template: str) -> TemplateRenderer:
    return load_renderer(directory_of(template), chat_template=corpus.templates()[template], now=lambda: TODAY)
