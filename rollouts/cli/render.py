"""`rollouts render`: what a conversation becomes as tokens, with the owner of each."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from renderers import RenderedTokens, TemplateRenderer, load_renderer
from renderers.process.files import open_readable
from renderers.rendered import TokenSpan
from rollouts.errors import CommandFileError
from rollouts.terminal.table import Column, counted, print_json, print_table, printable

_JSONL_SUFFIXES = (".jsonl", ".ndjson")


class Conversation(NamedTuple):
    """Messages and, if the file has any, tools."""

    messages: list[Any]
    tools: list[Any] | None


def read_conversation(path: Path, *, row: int | None = None) -> Conversation:
    """Read a JSON list of messages, or an object with `messages` and optionally `tools`.

    In a .jsonl file, and in any file if `row` is given, each line is a conversation, and `row` (from 0; 0 if None)
    selects one. Messages are not checked. Raises `CommandFileError`.
    """
    whole_file = row is None and path.suffix.lower() not in _JSONL_SUFFIXES
    line = None if whole_file else (row or 0) + 1
    found = _parse(path, _read(path, line), line or 1)
    messages = found.get("messages") if isinstance(found, dict) else found
    tools = found.get("tools") if isinstance(found, dict) else None
    if not isinstance(messages, list):
        raise CommandFileError(
            path, 'holds no conversation; write a list of messages, or {"messages": [...], "tools": [...]}', line=line
        )
    if not messages:
        raise CommandFileError(path, "the conversation has no messages", line=line)
    return Conversation(messages, _tool_list(path, tools))


def read_tools(path: Path) -> list[Any] | None:
    """Read a JSON list of tools, or an object with `tools`. Raises `CommandFileError`."""
    found = _parse(path, _read(path))
    return _tool_list(path, found.get("tools") if isinstance(found, dict) else found)


def _tool_list(path: Path, tools: Any) -> list[Any] | None:
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise CommandFileError(path, 'tools must be a list of {"type": "function", "function": {...}}')
    return tools


def _read(path: Path, line: int | None = None) -> str:
    """The whole file, or its line `line` (from 1)."""
    try:
        with io.TextIOWrapper(open_readable(path), encoding="utf-8-sig") as file:
            text = file.read() if line is None else next(islice(file, line - 1, None), None)
    except UnicodeDecodeError as error:
        place = f", at byte {error.start}" if line is None else ""
        raise CommandFileError(path, f"is not UTF-8 text{place}") from error
    if text is None:
        raise CommandFileError(path, f"has no row {(line or 0) - 1}; rows count from 0")
    return text if line is None else text.rstrip()


def _parse(path: Path, text: str, first_line: int = 1) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        cure = ". For one conversation a line, name it .jsonl or pass --row" if error.msg == "Extra data" else ""
        raise CommandFileError(path, f"not JSON: {error.msg}, column {error.colno}{cure}", line=line) from error
    except (RecursionError, ValueError) as error:  # ValueError: an integer of more than 4,300 digits
        reason = f"not readable as JSON: {error}; nest less deep, and write long numbers as text"
        raise CommandFileError(path, reason) from error


# One character is at most four bytes, and so at most four tokens.
_MAX_TOKENS_PER_CHARACTER = 4
_REPLACEMENT_CHARACTER = "\ufffd"


@dataclass(frozen=True, slots=True)
class TokenCell:
    """Tokens `start:start + len(token_ids)` that are shown as one `text`.

    Usually a single token; several if only together they decode to a character, or if they are the placeholder of a
    medium.
    """

    start: int
    token_ids: tuple[int, ...]
    text: str
    message_index: int
    sampled: bool
    content: bool
    is_medium: bool = False


def token_cells(renderer: TemplateRenderer, rendered: RenderedTokens) -> Iterator[TokenCell]:
    """All tokens, in order. The joined texts are the decoded tokens, except for the placeholders of media."""
    media = rendered.multi_modal_data
    numbers: Counter[str] = Counter()
    placeholders: dict[int, tuple[str, int]] = {}  # offset -> the medium with its number, from 1, and its tokens
    for item, where in () if media is None else media.items_with_ranges():
        numbers[item.modality] += 1
        placeholders[where.offset] = f"{item.modality} {numbers[item.modality]}", where.length
    for span in rendered.spans:
        before: Sequence[int] = ()
        start = span.start
        while start < span.end:
            if start in placeholders:
                name, length = placeholders[start]
                ids: Sequence[int] = rendered.token_ids[start : start + length]
                yield _cell(span, start, ids, f"{name}: {len(ids)} tokens", is_medium=True)
                before = ()
            else:
                ids, text = _decodable_tokens(renderer, rendered.token_ids[start : span.end], before)
                yield _cell(span, start, ids, text)
                before = ids
            start += len(ids)


def _cell(span: TokenSpan, start: int, ids: Sequence[int], text: str, *, is_medium: bool = False) -> TokenCell:
    return TokenCell(start, tuple(ids), text, span.message_index, span.sampled, span.content, is_medium)


def _decodable_tokens(
    renderer: TemplateRenderer, ids: Sequence[int], before: Sequence[int]
) -> tuple[Sequence[int], str]:
    """The smallest number of first tokens that decode to whole characters, and their text after the tokens `before`.

    The text of a token may depend on the token before it: some tokenizers drop the space at the beginning of a text.
    """
    decode = renderer.tokenizer.decode
    text_before = decode(before)
    for count in range(1, min(_MAX_TOKENS_PER_CHARACTER, len(ids)) + 1):
        text = decode([*before, *ids[:count]])
        if text.startswith(text_before) and not text.endswith(_REPLACEMENT_CHARACTER):
            return ids[:count], text[len(text_before) :]
    return ids[:1], decode(ids[:1])


def tokens_as_json(rendered: RenderedTokens, cells: Iterable[TokenCell]) -> dict[str, Any]:
    """Plain data: `token_ids` with their columns, `pieces` with their text, `messages` with their token counts.

    A piece covers tokens `start:end`: usually one token, several if only together they decode to a character, or if
    they are the placeholder of a medium.
    """
    counts = zip(
        rendered.message_roles,
        rendered.message_tool_names or [None] * len(rendered.message_roles),
        rendered.tokens_per_message(),
        rendered.tokens_per_message(sampled_only=True),
        strict=True,
    )
    media = [] if rendered.multi_modal_data is None else rendered.multi_modal_data.items_with_ranges()
    return {
        "token_ids": rendered.token_ids,
        "message_indices": rendered.message_indices,
        "sampled_mask": rendered.sampled_mask,
        "is_content": rendered.is_content,
        "pieces": [{"start": cell.start, "end": cell.start + len(cell.token_ids), "text": cell.text} for cell in cells],
        "messages": [
            {"role": role, "tool_name": name, "tokens": tokens, "sampled": sampled}
            for role, name, tokens, sampled in counts
        ],
        "media": [
            {"modality": item.modality, "mm_hash": item.mm_hash, "offset": where.offset, "length": where.length}
            for item, where in media
        ],
    }


# Prints tokens on a terminal or in a pipe.
#
# Each line belongs to one message and one kind; the margin names both, so a text cannot look like a text of another
# kind. On a terminal colours separate tokens; elsewhere a `¦` does.
#
#     0 user      · <|im_start|>¦user¦⏎
#                 ○ Hi
#                 · <|im_end|>¦⏎
#     1 assistant · <|im_start|>¦assistant¦⏎
#                 ● Hello¦!¦<|im_end|>
#                 · ⏎


SAMPLED, CONTENT, SCAFFOLD = "●", "○", "·"

_BOUNDARY = "¦"
_LINE_BREAK = "⏎"
_MAX_LABEL_WIDTH = 28
_MIN_TEXT_WIDTH = 20

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
_MEDIUM = "black on color(215)"


class By(StrEnum):
    """The meaning of the colours."""

    OWNER = "owner"
    SAMPLED = "sampled"
    CONTENT = "content"


@dataclass(frozen=True, slots=True)
class View:
    """How to show tokens. `width` is that of the terminal; None: each line of text stays one line, however long."""

    by: By
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
            _add_cell(lines, cell, _style(cell, rendered, view.by, shade) if view.colours else "", view)
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
        for name, style in _colour_names(rendered, view.by):
            line.append(f" {name} ", style).append(" ")
    return line


def print_tokens(
    title: str, rendered: RenderedTokens, cells: Iterable[TokenCell], view: View, console: Console
) -> None:
    """Print a title, the legend, the lines of all tokens and the table of counts."""
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


def _style(cell: TokenCell, rendered: RenderedTokens, by: By, shade: int) -> str:
    if cell.is_medium:
        return _MEDIUM
    if by is By.OWNER:
        role = rendered.message_roles[cell.message_index] if cell.message_index >= 0 else ""
        return _SHADES.get(role, _UNMARKED)[shade]
    marked = cell.sampled if by is By.SAMPLED else cell.content
    return (_SHADES["assistant" if by is By.SAMPLED else "user"] if marked else _UNMARKED)[shade]


def _colour_names(rendered: RenderedTokens, by: By) -> list[tuple[str, str]]:
    if by is By.SAMPLED:
        return [("sampled", _SHADES["assistant"][0]), ("not sampled", _UNMARKED[0])]
    if by is By.CONTENT:
        return [("content", _SHADES["user"][0]), ("not content", _UNMARKED[0])]
    roles = dict.fromkeys(rendered.message_roles)
    return [*((role, _SHADES[role][0]) for role in roles), ("no message", _UNMARKED[0])]


def _add_cell(lines: list[Text], cell: TokenCell, style: str, view: View) -> None:
    """Append a cell to the last line, and a new line after each line break in it."""
    if lines[-1] and not view.colours and not view.ids:
        lines[-1].append(_BOUNDARY)
    text = f"[{cell.text}]" if cell.is_medium else cell.text
    *ended_lines, rest = printable(text).split("\n")
    for piece in ended_lines:
        lines[-1].append(piece + _LINE_BREAK, style)
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
    parts = [line] if width is None else _folded(line, max(_MIN_TEXT_WIDTH, width - cell_len(margin)))
    for number, part in enumerate(parts):
        yield Text(margin if number == 0 else f"{' ' * (cell_len(margin) - 2)}{margin[-2:]}").append_text(part)


def _folded(line: Text, width: int) -> list[Text]:
    """The line in parts of at most `width` columns, cut between tokens where possible.

    Every space is kept, because it is part of a token.
    """
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


# `rollouts render CONVERSATION --model MODEL`: a conversation as tokens, with the owner of each.


def render(
    conversation: Annotated[
        Path,
        typer.Argument(metavar="CONVERSATION", help="A JSON list of messages, {messages, tools}, or a .jsonl file."),
    ],
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="A model directory, or the name of a Hugging Face repository.")
    ],
    chat_template: Annotated[
        Path | None,
        typer.Option(metavar="TEMPLATE", help="A Jinja file, or the name of one of the model's templates."),
    ] = None,
    tools: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A JSON list of tools; replaces the conversation's.")
    ] = None,
    row: Annotated[int | None, typer.Option(min=0, metavar="N", help="Which line of a .jsonl file, from 0.")] = None,
    generation_prompt: Annotated[
        bool,
        typer.Option(
            "--generation-prompt", help="Append the generation prompt, where the model would start to sample."
        ),
    ] = False,
    by: Annotated[By, typer.Option(help="The meaning of the colours.")] = By.OWNER,
    ids: Annotated[bool, typer.Option("--ids", help="Show each token's id.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: ids, masks, pieces, counts.")] = False,
) -> None:
    """Show a conversation as a model's tokens: who owns each, which are message body, which the model would sample."""
    read = read_conversation(conversation, row=row)
    offered_tools = read.tools if tools is None else read_tools(tools)
    renderer = load_renderer(model, chat_template=chat_template)
    rendered = renderer.render(read.messages, tools=offered_tools, add_generation_prompt=generation_prompt)
    cells = token_cells(renderer, rendered)
    if as_json:
        print_json(tokens_as_json(rendered, cells))
        return
    console = Console()
    colours = console.color_system is not None and not console.no_color
    view = View(by, ids, colours, width=console.width if console.is_terminal else None)
    counts = f"{counted(len(rendered.message_roles), 'message')}, {counted(len(rendered), 'token')}"
    print_tokens(f"{conversation} as {model}: {counts}", rendered, cells, view, console)
