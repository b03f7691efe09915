"""Tokens on a terminal, and in a pipe.

Each line belongs to one message and one kind; the margin says which, so nothing that a text holds can pretend to be of
another kind. Colours tell tokens apart on a terminal; elsewhere a `¦` does.

    0 user      · <|im_start|>¦user¦⏎
                ○ Hi
                · <|im_end|>¦⏎
    1 assistant · <|im_start|>¦assistant¦⏎
                ● Hello¦!¦<|im_end|>
                · ⏎
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from renderers import RenderedTokens
from rollouts.cli.render.token_cells import TokenCell
from rollouts.terminal.table import Column, print_table
from rollouts.terminal.text import printable

SAMPLED, CONTENT, SCAFFOLD = "●", "○", "·"

_BOUNDARY = "¦"
_LINE_BREAK = "⏎"
_LONGEST_LABEL = 28
_NARROWEST_TEXT = 20

# Neighbouring tokens take turns between the two shades of a colour. Dark text on a light ground reads the same on
# light and dark terminals.
_SHADES = {
    "system": ("black on color(229)", "black on color(222)"),
    "developer": ("black on color(224)", "black on color(217)"),
    "user": ("black on color(153)", "black on color(117)"),
    "assistant": ("black on color(157)", "black on color(114)"),
    "tool": ("black on color(189)", "black on color(147)"),
}
_QUIET = ("color(245)", "color(250)")
_IMAGE = "black on color(215)"


class By(StrEnum):
    """What colours mean."""

    OWNER = "owner"
    SAMPLED = "sampled"
    CONTENT = "content"


@dataclass(frozen=True, slots=True)
class View:
    """How to show tokens. `width` is the terminal's; None shows each line of text on one line, however long."""

    by: By
    ids: bool
    colours: bool
    width: int | None


def token_lines(rendered: RenderedTokens, cells: Iterable[TokenCell], view: View) -> Iterator[Text]:
    """The lines that show all tokens, margin included."""
    labels = message_labels(rendered)
    label_width = max((cell_len(labels[span.message_index]) for span in rendered.spans), default=0)
    shown_owner: int | None = None
    shade = 0
    for (owner, mark), run in groupby(cells, key=lambda cell: (cell.message_index, _mark(cell))):
        lines = [Text()]
        for cell in run:
            shade = 1 - shade
            _add_cell(lines, cell, _style(cell, rendered, view.by, shade) if view.colours else "", view)
        if len(lines) > 1 and not lines[-1]:
            lines.pop()
        for line in lines:
            label = "" if owner == shown_owner else labels[owner]
            shown_owner = owner
            yield from _with_margin(line, f"{label}{' ' * (label_width - cell_len(label))} {mark} ", view.width)


def legend(rendered: RenderedTokens, view: View) -> Text:
    """What the marks mean, with how many tokens bear each, and what the colours mean."""
    sampled = sum(span.end - span.start for span in rendered.spans if span.sampled)
    content = sum(span.end - span.start for span in rendered.spans if span.content and not span.sampled)
    scaffold = len(rendered) - sampled - content
    line = Text(f"{SAMPLED} sampled {sampled}   {CONTENT} content {content}   {SCAFFOLD} scaffold {scaffold}")
    if view.colours:
        line.append("      ")
        for name, style in _colour_names(rendered, view.by):
            line.append(f" {name} ", style).append(" ")
    return line


def print_counts(rendered: RenderedTokens, console: Console) -> None:
    """Print a table of tokens per message: all tokens, message body, sampled."""
    labels = message_labels(rendered)
    counts = {owner: [0, 0, 0] for owner in (*range(len(rendered.message_roles)), -1)}
    for span in rendered.spans:
        length = span.end - span.start
        for column, counted in enumerate((True, span.content, span.sampled)):
            counts[span.message_index][column] += length * counted
    totals = [f"{sum(row[column] for row in counts.values()):,}" for column in range(3)]
    headings = zip(("tokens", "content", "sampled"), totals, strict=True)
    columns = [
        Column("message", "total", min_width=10),
        *(Column(heading, total, align_right=True) for heading, total in headings),
    ]
    rows = [
        [labels[owner], *(f"{count:,}" for count in row)] for owner, row in counts.items() if owner >= 0 or any(row)
    ]
    print_table(columns, rows, console)


def message_labels(rendered: RenderedTokens) -> dict[int, str]:
    """What the margin calls each message; -1 is what belongs to none."""
    labels = {-1: "- no message"}
    last = len(str(len(rendered.message_roles) - 1))
    names: Sequence[str | None] = rendered.message_tool_names or [None] * len(rendered.message_roles)
    for index, (role, name) in enumerate(zip(rendered.message_roles, names, strict=True)):
        label = f"{index:>{last}} {role}" + (f" {printable(name)}" if name else "")
        labels[index] = label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 1]}…"
    return labels


def _mark(cell: TokenCell) -> str:
    if cell.sampled:
        return SAMPLED
    return CONTENT if cell.content else SCAFFOLD


def _style(cell: TokenCell, rendered: RenderedTokens, by: By, shade: int) -> str:
    if cell.image is not None:
        return _IMAGE
    if by is By.OWNER:
        role = rendered.message_roles[cell.message_index] if cell.message_index >= 0 else ""
        return _SHADES.get(role, _QUIET)[shade]
    chosen = cell.sampled if by is By.SAMPLED else cell.content
    return (_SHADES["assistant" if by is By.SAMPLED else "user"] if chosen else _QUIET)[shade]


def _colour_names(rendered: RenderedTokens, by: By) -> list[tuple[str, str]]:
    if by is By.SAMPLED:
        return [("sampled", _SHADES["assistant"][0]), ("not sampled", _QUIET[0])]
    if by is By.CONTENT:
        return [("content", _SHADES["user"][0]), ("not content", _QUIET[0])]
    roles = dict.fromkeys(rendered.message_roles)
    return [*((role, _SHADES[role][0]) for role in roles), ("no message", _QUIET[0])]


def _add_cell(lines: list[Text], cell: TokenCell, style: str, view: View) -> None:
    """Append a cell to the last line, and as many lines more as it has line breaks."""
    if lines[-1] and not view.colours and not view.ids:
        lines[-1].append(_BOUNDARY)
    text = f"[{cell.text}]" if cell.image is not None else cell.text
    *broken, rest = printable(text).split("\n")
    for piece in broken:
        lines[-1].append(piece + _LINE_BREAK, style)
        lines.append(Text())
    if rest:
        lines[-1].append(rest, style)
    if view.ids:
        # Behind a token that ends in a line break the id still belongs to the line that it ends.
        target = lines[-1] if rest or not broken else lines[-2]
        target.append(f"⟨{_ids_of(cell)}⟩", "dim" if view.colours else "")


def _ids_of(cell: TokenCell) -> str:
    if cell.image is not None:
        return f"{cell.token_ids[0]} x{len(cell.token_ids)}"
    return " ".join(map(str, cell.token_ids))


def _with_margin(line: Text, margin: str, width: int | None) -> Iterator[Text]:
    """The line behind its margin, folded to the width; the margin's mark stands before every part."""
    parts = [line] if width is None else _folded(line, max(_NARROWEST_TEXT, width - cell_len(margin)))
    for number, part in enumerate(parts):
        yield Text(margin if number == 0 else f"{' ' * (cell_len(margin) - 2)}{margin[-2:]}").append_text(part)


def _folded(line: Text, width: int) -> list[Text]:
    """The line in parts of at most `width` columns, cut between tokens if it can be.

    Every space is kept: it is part of a token.
    """
    between_tokens = {span.start for span in line.spans}
    cuts: list[int] = []
    used, fitting = 0, 0  # columns since the last cut, the last place to cut since then
    for position, character in enumerate(line.plain):
        wide = cell_len(character)
        if position in between_tokens:
            fitting = position
        if used + wide > width:
            cuts.append(fitting if fitting > (cuts[-1] if cuts else 0) else position)
            used = cell_len(line.plain[cuts[-1] : position])
        used += wide
    return list(line.divide(cuts))
