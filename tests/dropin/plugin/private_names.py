"""A pytest plugin that gives this project's `renderers` what the helpers of foreign tests need of PyPI's package.

renderers 0.1.12's tests look up configurations and models with private names; without, whole files would not be
collected. Their reference is transformers: they ask the tokenizer that `load_tokenizer` returned for
`apply_chat_template`, which here is that of transformers' tokenizer of the same files.
"""

import ast
import functools
import os
from pathlib import Path

import renderers
from renderers import base, configs

_TABLES = ("MULTIMODAL_MODELS", "TOKENIZER_SOURCE_OVERRIDES")


@functools.lru_cache(maxsize=2)
def _reference_tokenizer(directory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def _apply_chat_template(tokenizer, *arguments, **options):
    return _reference_tokenizer(tokenizer.files.directory).apply_chat_template(*arguments, **options)


def _token_type_ids(placeholders, length):
    media = renderers.MultiModalData(mm_placeholders=placeholders)
    return renderers.RenderedTokens(token_ids=[0] * length, multi_modal_data=media).mm_token_type_ids


if not hasattr(configs, "_config_class_for"):
    from renderers.model_tokenizer import ModelTokenizer

    ModelTokenizer.apply_chat_template = _apply_chat_template
    configs._config_class_for = configs.config_class
    base._build_mm_token_type_ids = _token_type_ids
    (_source,) = Path(os.environ["MMROLLOUTS_STOCK_RENDERERS"]).glob("base.py")
    for _node in ast.parse(_source.read_text(encoding="utf-8")).body:
        if isinstance(_node, ast.AnnAssign) and (_name := getattr(_node.target, "id", "")) in _TABLES:
            for _module in (base, renderers):
                setattr(_module, _name, ast.literal_eval(_node.value))
