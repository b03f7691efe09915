"""A template's renderer and the trained text of a sample, for the tests of training samples."""

import functools
from typing import Any

import corpus
from corpus import user

from renderers import TemplateRenderer, load_renderer
from renderers.training_sample import (
    RenderedTrainingSample,
)

QUESTION = user("a")


@functools.cache
def renderer_of(template: str, **options: Any) -> TemplateRenderer:
    tokenizer = corpus.tokenizer_of(template)
    assert tokenizer is not None
    return load_renderer(corpus.model_dir(tokenizer), chat_template=corpus.templates()[template], **options)


def trained_text(renderer: TemplateRenderer, sample: RenderedTrainingSample) -> list[str]:
    return [renderer.tokenizer.decode(sample.token_ids[start:end]) for start, end in sample.loss_ranges]
