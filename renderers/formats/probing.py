"""Choosing a format by asking the tokenizer and the template, not by the model's name."""

from __future__ import annotations

import re

from renderers.errors import LoadError, MissingTokenError, TemplateError
from renderers.formats.format import Format, HermesToolCalls, ReasoningMarkers
from renderers.template.chat_template import ChatTemplate, Printed
from renderers.tokens.tokenizer import TemplateTokenizer

_PROBE_USER = {"role": "user", "content": "probe question"}
_PROBE_ASSISTANT = {"role": "assistant", "content": "probe answer"}

_LOOKS_LIKE_CONTROL = re.compile(r"<\|[^|<>\s]{1,64}\|>")


def detect_format(template: ChatTemplate, tokenizer: TemplateTokenizer, *, eos_token: str | None) -> Format:
    """Probe what the template prints around an assistant turn.

    The turn ends at the first control token that the template prints after the assistant's words. Raises
    `MissingTokenError` if the template prints a control token that the tokenizer would spell out as text.
    """
    try:
        history = template.print([_PROBE_USER, _PROBE_ASSISTANT])
        prompt = template.print([_PROBE_USER], add_generation_prompt=True)
    except TemplateError as error:
        raise LoadError(f"the chat template refuses a plain question and answer: {error.template_message}") from error
    for printed in (history, prompt):
        _require_printed_tokens(printed, tokenizer)

    turn_end = _first_control_after_answer(history, tokenizer) or eos_token
    if turn_end is None:
        raise LoadError(
            f"the chat template of {tokenizer.model} closes an assistant turn with no control token and the tokenizer "
            "names no eos_token: generation would never stop. Add eos_token to tokenizer_config.json."
        )
    tokenizer.require_control_id(turn_end, "the end of an assistant turn")
    stops = [turn_end]
    if eos_token is not None and eos_token != turn_end and tokenizer.control_id(eos_token) is not None:
        stops.append(eos_token)

    has_reasoning = all(tokenizer.control_id(token) is not None for token in ("<think>", "</think>"))
    speaks_hermes = "<tool_call>" in template.source and all(
        tokenizer.control_id(token) is not None for token in ("<tool_call>", "</tool_call>")
    )
    return Format(
        name="chatml" if turn_end == "<|im_end|>" else "generic",
        turn_end=turn_end,
        stop_tokens=tuple(stops),
        reasoning=ReasoningMarkers(opened_by_prompt=prompt.text.rstrip().endswith("<think>"))
        if has_reasoning
        else None,
        tool_calls=HermesToolCalls() if speaks_hermes else None,
    )


def _first_control_after_answer(history: Printed, tokenizer: TemplateTokenizer) -> str | None:
    answers = [s for s in history.segments if s.origin is not None and s.origin.message_index == 1]
    if not answers:
        raise LoadError(f"the chat template of {tokenizer.model} does not print what the assistant says")
    found = tokenizer.find_control(history.text, answers[-1].end, len(history.text))
    return None if found is None else tokenizer.control_token(found.token_id)


def _require_printed_tokens(printed: Printed, tokenizer: TemplateTokenizer) -> None:
    """A `<|...|>` that the template itself prints must be a token."""
    for segment in printed.segments:
        if segment.origin is None:
            for match in _LOOKS_LIKE_CONTROL.finditer(printed.text, segment.start, segment.end):
                if tokenizer.control_id(match.group()) is None:
                    raise MissingTokenError(match.group(), tokenizer.model, "the chat template")
