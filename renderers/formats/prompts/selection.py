"""Selects the prompt function of a model directory without a Jinja template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from renderers.formats.prompts import deepseek_v4, deepseek_v32, dsml
from renderers.template.python_template import PythonTemplate
from renderers.tokens.tokenizer import TemplateTokenizer


def prompt_for(
    settings: Mapping[str, Any], tokenizer: TemplateTokenizer, *, variables: Mapping[str, Any] | None = None
) -> PythonTemplate | None:
    """The prompt of a model without a chat template, recognised by its control tokens, or None.

    `settings` is the parsed tokenizer_config.json; `variables` are options of the prompt function (`thinking_mode`...);
    `enable_thinking`, the name that other templates have for it, sets `thinking_mode`.
    A model is recognised only if its tokenizer has every control token that the prompt may print and the settings name
    the same first and last token. Settings with a chat template need no prompt function: None.
    """
    if settings.get("chat_template") is not None:
        return None
    for key, expected in (("bos_token", dsml.BOS), ("eos_token", dsml.EOS)):
        named = settings.get(key)
        if (named.get("content") if isinstance(named, Mapping) else named) not in (None, expected):
            return None
    # A tokenizer with only some tokens of V4 belongs to neither release.
    tokens = {token for token in deepseek_v4.REQUIRED_TOKENS if tokenizer.control_id(token) is not None}
    prompt: Callable[..., str]
    if tokens == set(deepseek_v4.REQUIRED_TOKENS):
        prompt, source = deepseek_v4.deepseek_v4_prompt, deepseek_v4.SOURCE
    elif tokens == set(dsml.CONTROL_TOKENS):
        prompt, source = deepseek_v32.deepseek_v32_prompt, deepseek_v32.SOURCE
    else:
        return None
    options = dict(variables or {})
    enabled = options.pop("enable_thinking", None)
    if enabled is not None:
        options.setdefault("thinking_mode", "thinking" if enabled else "chat")
    return PythonTemplate(prompt, source=source, model=tokenizer.model, variables=options)
