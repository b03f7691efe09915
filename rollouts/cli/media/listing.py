"""The list of media, as a table and as JSON."""

from __future__ import annotations

from typing import Any

from rollouts.cli.media.description import Description, describe
from rollouts.cli.media.inventory import Inventory
from rollouts.terminal.table import Column, print_table
from rollouts.terminal.text import printable_line

_DIGITS = 16
_EPISODES = 3


def media_as_json(inventory: Inventory) -> list[dict[str, Any]]:
    """Plain data, one object a medium; `uses` and `episodes` only for trajectories."""
    listed = []
    for medium in inventory.media:
        try:
            described = describe(medium)
        except OSError:
            described = Description("unreadable", None, None, is_video=False)
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
    for entry in media_as_json(inventory):
        kind = f"{entry['type']} video" if entry["video"] and not entry["type"].endswith("video") else entry["type"]
        size = "-" if entry["width"] is None else f"{entry['width']}x{entry['height']}"
        row = [entry["digest"][:_DIGITS], kind, size, f"{entry['bytes']:,}"]
        if inventory.references is not None:
            names = ", ".join(map(printable_line, entry["episodes"][:_EPISODES]))
            more = len(entry["episodes"]) - _EPISODES
            row += [f"{entry['uses']:,}", f"{names} and {more} more" if more > 0 else names]
        rows.append(row)
    print_table(columns, rows)
