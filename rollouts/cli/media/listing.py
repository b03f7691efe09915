"""The list of media, as a table and as JSON."""

from __future__ import annotations

from typing import Any

from rollouts.cli.media.description import Description, describe
from rollouts.cli.media.inventory import Inventory, Medium
from rollouts.terminal.table import Column, print_table
from rollouts.terminal.text import printable_line

_DIGITS = 16
_EPISODES = 3


def print_media(inventory: Inventory) -> None:
    """Print a table of media, for trajectories with the number of uses and the episodes that use each."""
    columns = [
        Column("digest", f"{len(inventory.media):,} media"),
        Column("type", drop_order=2),
        Column("size", align_right=True),
        Column("bytes", f"{inventory.nbytes:,}", align_right=True),
    ]
    if inventory.references is not None:
        columns += [
            Column("uses", f"{inventory.references:,}", align_right=True, drop_order=3),
            Column("episodes", min_width=16, drop_order=1),
        ]
    rows = []
    for medium in inventory.media:
        described = _described(medium)
        row = [medium.digest[:_DIGITS], _type(described), described.size, f"{medium.nbytes:,}"]
        if inventory.references is not None:
            row += [f"{medium.uses:,}", _episodes(medium)]
        rows.append(row)
    print_table(columns, rows)


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
    names = [printable_line(name) for name in list(medium.episodes)[:_EPISODES]]
    more = len(medium.episodes) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")
