"""A format together with what tells that a model speaks it."""

from __future__ import annotations

from dataclasses import dataclass

from renderers.parsing.format import Format


@dataclass(frozen=True, slots=True)
class Family:
    """`control` lists tokens that the tokenizer must have, `source` texts that the template must hold.

    Where the format has tool calls, the template must also print one that the format reads back.
    """

    format: Format
    required_tokens: tuple[str, ...] = ()
    required_source: tuple[str, ...] = ()
