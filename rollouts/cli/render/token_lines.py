"""Prints tokens on a terminal or in a pipe.

Each line belongs to one message and one kind; the margin names both, so a text cannot look like a text of
another kind. On a terminal colours separate tokens; elsewhere a `¦` does.

    0 user      · <|im_start|>¦user¦⏎
                ○ Hi
                · <|im_end|>¦⏎
    1 assistant · <|im_start|>¦assistant¦⏎
                ● Hello¦!¦<|im_end|>
                · ⏎
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from renderers import RenderedTokens
from rollouts.cli.render.token_cells import TokenCell
from rollouts.terminal.table import Column, print_table
from rollouts.terminal.text import printable

SAMPLED, CONTENT, SCAFFOLD = "●", "○", "·"

_MAX_LABEL_WIDTH = 28

# Neighbouring tokens alternate between the two shades of a colour. Dark text on a light background is readable on light
# and dark terminals.
_SHADES = {
    "system": ("black on color(229)", "black on color(222)"),
    "developer": ("black on color(224)", "black on color(217)"),
    "user": ("black on color(153)", "black on color(117)"),
    "assistant": ("black on color(157)", "black on color(114)"),
    "tool": ("black on color(189)", "black on color(147)"),
}
_UNMARKED = ("color(245)", "color(250)")


@dataclass(frozen=True, slots=True)
class View:
    """How to show tokens. `width` is that of the terminal; None: each line of text stays one line, however long."""

    ids: bool
    colours: bool
    width: int | None


def token_lines(rendered: RenderedTokens, cells: Iterable[TokenCell], view: View) -> Iterator[Text]:
    """The lines of all tokens, with their margins."""
    labels = message_labels(rendered)
    label_width = max((cell_len(labels[span.message_index]) for span in rendered.spans), default=0)
    previous_owner: int | None = None
    shade = 0
    for (owner, mark), run in groupby(cells, key=lambda cell: (cell.message_index, _mark(cell))):
        lines = [Text()]
        for cell in run:
            shade = 1 - shade
            _add_cell(lines, cell, _style(cell, rendered, shade) if view.colours else "", view)
        if len(lines) > 1 and not lines[-1]:
            lines.pop()
        for line in lines:
            label = "" if owner == previous_owner else labels[owner]
            previous_owner = owner
            yield from _with_margin(line, f"{label}{' ' * (label_width - cell_len(label))} {mark} ", view.width)


def legend(rendered: RenderedTokens, view: View) -> Text:
    """The meaning of the marks, with the number of tokens of each, and the meaning of the colours."""
    sampled = sum(span.end - span.start for span in rendered.spans if span.sampled)
    content = sum(span.end - span.start for span in rendered.spans if span.content and not span.sampled)
    scaffold = len(rendered) - sampled - content
    line = Text(f"{SAMPLED} sampled {sampled}   {CONTENT} content {content}   {SCAFFOLD} scaffold {scaffold}")
    if view.colours:
        line.append("      ")
        for role in dict.fromkeys(rendered.message_roles):
            line.append(f" {role} ", _SHADES[role][0]).append(" ")
        line.append(" no message ", _UNMARKED[0]).append(" ")
    return line


def print_tokens(
    title: str, rendered: RenderedTokens, cells: Iterable[TokenCell], console: Console, *, ids: bool = False
) -> None:
    """Print a title, the legend, the lines of all tokens and the table of counts."""
    colours = console.color_system is not None and not console.no_color
    view = View(ids, colours, width=console.width if console.is_terminal else None)
    console.print(Text(printable(title), style="bold" if view.colours else ""), soft_wrap=True)
    console.print(legend(rendered, view), "", sep="\n", soft_wrap=True)
    for line in token_lines(rendered, cells, view):
        console.print(line, soft_wrap=True)
    console.print()
    print_counts(rendered, console)


def print_counts(rendered: RenderedTokens, console: Console) -> None:
    """Print a table of tokens per message: all tokens, message body, sampled."""
    labels = message_labels(rendered)
    counts = {owner: [0, 0, 0] for owner in (*range(len(rendered.message_roles)), -1)}
    for span in rendered.spans:
        length = span.end - span.start
        for column, is_counted in enumerate((True, span.content, span.sampled)):
            counts[span.message_index][column] += length * is_counted
    totals = [f"{sum(row[column] for row in counts.values()):,}" for column in range(3)]
    headings = zip(("tokens", "content", "sampled"), totals, strict=True)
    columns = [
        Column("message", "total", wraps=True),
        *(Column(heading, total, align_right=True) for heading, total in headings),
    ]
    rows = [
        [labels[owner], *(f"{count:,}" for count in row)] for owner, row in counts.items() if owner >= 0 or any(row)
    ]
    print_table(columns, rows, console)


def message_labels(rendered: RenderedTokens) -> dict[int, str]:
    """The label of each message in the margin; -1 is for tokens that belong to no message."""
    labels = {-1: "- no message"}
    last = len(str(len(rendered.message_roles) - 1))
    names: Sequence[str | None] = rendered.message_tool_names or [None] * len(rendered.message_roles)
    for index, (role, name) in enumerate(zip(rendered.message_roles, names, strict=True)):
        label = f"{index:>{last}} {role}" + (f" {printable(name)}" if name else "")
        labels[index] = label if len(label) <= _MAX_LABEL_WIDTH else f"{label[: _MAX_LABEL_WIDTH - 1]}…"
    return labels


def _mark(cell: TokenCell) -> str:
    if cell.sampled:
        return SAMPLED
    return CONTENT if cell.content else SCAFFOLD


def _style(cell: TokenCell, rendered: RenderedTokens, shade: int) -> str:
    if cell.is_medium:
        return "black on color(215)"
    role = rendered.message_roles[cell.message_index] if cell.message_index >= 0 else ""
    return _SHADES.get(role, _UNMARKED)[shade]


def _add_cell(lines: list[Text], cell: TokenCell, style: str, view: View) -> None:
    """Append a cell to the last line, and a new line after each line break in it."""
    if lines[-1] and not view.colours and not view.ids:
        lines[-1].append("¦")
    text = f"[{cell.text}]" if cell.is_medium else cell.text
    *ended_lines, rest = printable(text).split("\n")
    for piece in ended_lines:
        lines[-1].append(piece + "⏎", style)
        lines.append(Text())
    if rest:
        lines[-1].append(rest, style)
    if view.ids:
        # The id of a token that ends in a line break stands on the line that the token ends.
        target = lines[-1] if rest or not ended_lines else lines[-2]
        ids = " ".join(map(str, cell.token_ids))
        if cell.is_medium:
            ids = f"{cell.token_ids[0]} x{len(cell.token_ids)}"
        target.append(f"⟨{ids}⟩", "dim" if view.colours else "")


def _with_margin(line: Text, margin: str, width: int | None) -> Iterator[Text]:
    """The line after its margin, folded to the width; the mark of the margin is repeated before each part."""
    parts = [line] if width is None else _folded(line, max(20, width - cell_len(margin)))
    for number, part in enumerate(parts):
        yield Text(margin if number == 0 else f"{' ' * (cell_len(margin) - 2)}{margin[-2:]}").append_text(part)


def _folded(line: Text, width: int) -> list[Text]:
    """The line, with every space, in parts of at most `width` columns, cut between tokens where possible."""
    between_tokens = {span.start for span in line.spans}
    cuts: list[int] = []
    used, last_boundary = 0, 0  # columns since the last cut, and the last boundary between tokens
    for position, character in enumerate(line.plain):
        columns = cell_len(character)
        if position in between_tokens:
            last_boundary = position
        if used + columns > width:
            cuts.append(last_boundary if last_boundary > (cuts[-1] if cuts else 0) else position)
            used = cell_len(line.plain[cuts[-1] : position])
        used += columns
    return list(line.divide(cuts))
