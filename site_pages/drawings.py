"""Puts each drawing of a page into a region that scrolls: its texts are too small when it is reduced."""

import re
from typing import Final

_DRAWING: Final = re.compile(r'<p>(<img alt="([^"]*)" src="[^"]*\.svg" ?/?>)</p>')
_REGION: Final = (
    r'<div class="drawing" role="region" tabindex="0" aria-label="drawing: \2">\1</div>'
    '<p class="drawing-note">The drawing is wider than the screen: scroll it sideways.</p>'
)


def scrolling_drawings(page: str) -> str:
    """The HTML of a page with its SVG images in regions."""
    return _DRAWING.sub(_REGION, page)
