"""A format and the conditions by which a model that uses it is recognised."""

from __future__ import annotations

from dataclasses import dataclass

from renderers.parsing.format import Format


@dataclass(frozen=True, slots=True)
class Family:
    """`required_tokens` are tokens that the tokenizer must have, `required_source` texts of the template.

    If the format has tool calls, the template must also print a call that the format parses.
    """

    format: Format
    required_tokens: tuple[str, ...] = ()
    required_source: tuple[str, ...] = ()
