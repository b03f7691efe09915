"""Media as a table and as data."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from rollouts.cli.media.description import Description, describe
from rollouts.cli.media.inventory import Inventory, Medium
from rollouts.cli.render.token_view import visible

_DIGITS = 16
_EPISODES = 3


def media_table(inventory: Inventory) -> Table:
    """One line a medium; for trajectories also how often and in which episodes it was shown."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="", footer_style="", show_footer=True)
    table.add_column("digest", f"{len(inventory.media):,} media")
    table.add_column("type")
    table.add_column("size", justify="right")
    table.add_column("bytes", f"{inventory.nbytes:,}", justify="right")
    if inventory.references is not None:
        table.add_column("uses", f"{inventory.references:,}", justify="right")
        table.add_column("episodes")
    for medium in inventory.media:
        described = _described(medium)
        row = [medium.digest[:_DIGITS], _type(described), described.size, f"{medium.nbytes:,}"]
        if inventory.references is not None:
            row += [f"{medium.uses:,}", _episodes(medium)]
        # Names of episodes come from the file: nothing in them is markup.
        table.add_row(*map(Text, row))
    return table


def media_as_json(inventory: Inventory) -> list[dict[str, Any]]:
    """Plain data, one object a medium; `uses` and `episodes` only for trajectories."""
    listed = []
    for medium in inventory.media:
        described = _described(medium)
        entry = {
            "digest": medium.digest,
            "type": described.format,
            "video": described.is_video,
            "width": described.width,
            "height": described.height,
            "bytes": medium.nbytes,
        }
        if inventory.references is not None:
            entry |= {"uses": medium.uses, "episodes": list(medium.episodes)}
        listed.append(entry)
    return listed


def _described(medium: Medium) -> Description:
    try:
        return describe(medium)
    except OSError:
        return Description("unreadable", None, None, is_video=False)


def _type(described: Description) -> str:
    named = not described.is_video or described.format.endswith("video")
    return described.format if named else f"{described.format} video"


def _episodes(medium: Medium) -> str:
    names = [visible(name) for name in list(medium.episodes)[:_EPISODES]]
    more = len(medium.episodes) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")
