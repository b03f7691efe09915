"""Selects the prompt function of a model directory without a Jinja template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from renderers.formats.prompts import deepseek_v4, deepseek_v32, dsml
from renderers.template.python_template import PythonTemplate
from renderers.tokens.tokenizer import TemplateTokenizer


def prompt_for(
    settings: Mapping[str, Any], tokenizer: TemplateTokenizer, *, variables: Mapping[str, Any] | None = None
) -> PythonTemplate | None:
    """The prompt of a model without a chat template, recognised by its control tokens, or None.

    `settings` is the parsed tokenizer_config.json; `variables` are options of the prompt function (`thinking_mode`...).
    A model is recognised only if its tokenizer has every control token that the prompt may print and the settings name
    the same first and last token. Settings with a chat template need no prompt function: None.
    """
    if settings.get("chat_template") is not None or not _has_deepseek_bos_and_eos(settings):
        return None
    if _has_all(tokenizer, deepseek_v4.REQUIRED_TOKENS):
        return PythonTemplate(
            deepseek_v4.deepseek_v4_prompt, source=deepseek_v4.SOURCE, model=tokenizer.model, variables=variables
        )
    # A tokenizer with only some tokens of V4 belongs to neither release.
    if _has_all(tokenizer, deepseek_v32.REQUIRED_TOKENS) and not _has_any(tokenizer, deepseek_v4.V4_TOKENS):
        return PythonTemplate(
            deepseek_v32.deepseek_v32_prompt, source=deepseek_v32.SOURCE, model=tokenizer.model, variables=variables
        )
    return None


def _has_all(tokenizer: TemplateTokenizer, tokens: Iterable[str]) -> bool:
    return all(tokenizer.control_id(token) is not None for token in tokens)


def _has_any(tokenizer: TemplateTokenizer, tokens: Iterable[str]) -> bool:
    return any(tokenizer.control_id(token) is not None for token in tokens)


def _has_deepseek_bos_and_eos(settings: Mapping[str, Any]) -> bool:
    """Whether bos and eos, where the settings name them, are DeepSeek's."""
    for key, expected in (("bos_token", dsml.BOS), ("eos_token", dsml.EOS)):
        named = settings.get(key)
        text = named.get("content") if isinstance(named, Mapping) else named
        if text is not None and text != expected:
            return False
    return True
