"""The one check that placeholder ranges lie where they can: inside the tokens, in order, without overlap."""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from renderers.errors import short_repr
from renderers.media.item import MediaItem
from renderers.rendered import PlaceholderRange

PlacedItem = tuple[MediaItem, PlaceholderRange]


class Misplacement(NamedTuple):
    """The first wrong range: its index in the list, and the predicate of a sentence about its item."""

    position: int
    reason: str


def placement_error(placeholders: Iterable[PlaceholderRange], num_tokens: int) -> Misplacement | None:
    """Check ranges, listed in prompt order, against a row of `num_tokens` tokens; None if all are right.

    Each range must have at least one token, lie inside the row and begin where the range before it ends, or
    later; its `embed_runs` must be ascending and lie inside it.
    """
    previous_end = 0
    for index, placeholder in enumerate(placeholders):
        start, end = placeholder.offset, placeholder.end
        if placeholder.length < 1:
            return Misplacement(
                index, f"has a placeholder of {short_repr(placeholder.length)} tokens at {short_repr(start)}"
            )
        if start < 0 or end > num_tokens:
            at = f"{short_repr(start)}:{short_repr(end)}"
            return Misplacement(index, f"has a placeholder at {at}, outside of the {num_tokens} tokens")
        if start < previous_end:
            return Misplacement(
                index, f"has a placeholder at {start}:{end}, before the end of the previous one at {previous_end}"
            )
        edges = [start, *itertools.chain.from_iterable(placeholder.runs), end]
        if edges != sorted(edges):
            return Misplacement(
                index,
                f"has embed_runs {short_repr(placeholder.embed_runs)}, not ascending runs inside its "
                f"placeholder of {placeholder.length} tokens",
            )
        previous_end = end
    return None


def item_placement_error(placed: Sequence[PlacedItem], num_tokens: int) -> str | None:
    """Check items and ranges as `placement_error` does, and that each range has as many feature tokens as its item.

    Returns a sentence that names the first wrong item; None if all are right.
    """
    error = placement_error((placeholder for _, placeholder in placed), num_tokens)
    if error is None:
        error = next(
            (
                Misplacement(
                    index,
                    f"has {item.num_tokens} tokens, but {placeholder.num_embeds} feature tokens at "
                    f"{placeholder.offset}:{placeholder.end}",
                )
                for index, (item, placeholder) in enumerate(placed)
                if placeholder.num_embeds != item.num_tokens
            ),
            None,
        )
    if error is None:
        return None
    item = placed[error.position][0]
    return f"{item.modality} {item.mm_hash[:12]} {error.reason}"
