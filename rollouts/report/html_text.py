"""Texts of a run as HTML: every character is visible, none is markup, and none changes the order of others."""

from __future__ import annotations

import html
import re
from typing import Final

from rollouts.terminal.text import printable

# Characters that Python calls printable and that a browser draws as nothing.
_DRAWN_AS_NOTHING: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def escaped(text: str, longest: int = 2000) -> str:
    """`text` as HTML, cut after `longest` characters. Invisible characters are written as `<U+202E>`."""
    cut = text if len(text) <= longest else f"{text[:longest]}… ({len(text):,} characters)"
    labelled = _DRAWN_AS_NOTHING.sub(lambda found: f"<U+{ord(found[0]):04X}>", printable(cut))
    return html.escape(labelled)


def number_text(value: float) -> str:
    """A number with at most four digits that say something."""
    if value == int(value) if abs(value) < 1e15 else False:
        return f"{int(value):,}" if abs(value) < 1e9 else f"{value:.3g}"
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e6 else f"{value:.2e}"
