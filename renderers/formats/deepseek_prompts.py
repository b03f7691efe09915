"""Which prompt function a model without a chat template has: that of DeepSeek V3.2, or of V4."""

from collections.abc import Callable, Mapping
from typing import Any

from renderers.formats.deepseek_dsml import BOS, CONTROL_TOKENS, EOS
from renderers.formats.deepseek_v4 import REQUIRED_TOKENS, V4_SOURCE, deepseek_v4_prompt
from renderers.formats.deepseek_v32 import V32_SOURCE, deepseek_v32_prompt
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
    for key, expected in (("bos_token", BOS), ("eos_token", EOS)):
        named = settings.get(key)
        if (named.get("content") if isinstance(named, Mapping) else named) not in (None, expected):
            return None
    # A tokenizer with only some tokens of V4 belongs to neither release.
    tokens = {token for token in REQUIRED_TOKENS if tokenizer.control_id(token) is not None}
    prompt: Callable[..., str]
    if tokens == set(REQUIRED_TOKENS):
        prompt, source = deepseek_v4_prompt, V4_SOURCE
    elif tokens == set(CONTROL_TOKENS):
        prompt, source = deepseek_v32_prompt, V32_SOURCE
    else:
        return None
    options = dict(variables or {})
    enabled = options.pop("enable_thinking", None)
    if enabled is not None:
        options.setdefault("thinking_mode", "thinking" if enabled else "chat")
    return PythonTemplate(prompt, source=source, model=tokenizer.model, variables=options)
