"""What is shown below the line of a node: its tokens with images at their place, and its tool calls."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from rich.cells import cell_len
from rich.text import Text

from renderers import TemplateRenderer
from rollouts.cli.traj.half_blocks import image_lines
from rollouts.cli.traj.token_colours import By, NodeColumns, node_columns
from rollouts.errors import RolloutsError
from rollouts.terminal.text import printable, printable_line
from rollouts.trajectory.token_node import TokenNode
from rollouts.trajectory.tree import Trajectory
from rollouts.view.model_view import ModelView, model_view
from rollouts.view.token_texts import TokenKind, token_texts

_BOUNDARY: Final = "¦"
_SAMPLED: Final = "●"
_MAX_IMAGES: Final = 8
_MAX_ARGUMENTS: Final = 400
_MIN_WIDTH: Final = 20


@dataclass(frozen=True, slots=True)
class Shown:
    """What to show. `by` is None without tokens; `width` is that of the terminal, None elsewhere."""

    by: By | None = None
    images: bool = False
    colours: bool = False
    width: int | None = None


@dataclass(slots=True)
class NodeDetails:
    """The details of the nodes of one episode. With a `renderer`: texts and owners of tokens, status of tool calls.

    `trainer_logprobs` has float32 (tokens of the node,) by node, in place of the extras of that name.
    """

    trajectory: Trajectory
    shown: Shown
    renderer: TemplateRenderer | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    trainer_logprobs: Mapping[int, np.ndarray] = field(default_factory=dict)
    _view: ModelView | None = field(init=False, default=None)
    _roles: dict[int, list[str]] = field(init=False, default_factory=dict)  # node -> roles of its branch's messages
    _turn_of: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._turn_of = {turn.node: index for index, turn in enumerate(self.trajectory.turns)}
        if self.renderer is None:
            return
        self._view = model_view(self.trajectory, self.renderer, self.tools)
        for leaf in self.trajectory.leaves():
            try:
                roles = [str(message.get("role", "")) for message in self.trajectory.to_messages(leaf)]
            except RolloutsError:
                continue
            for node in self.trajectory.path(leaf):
                self._roles.setdefault(node, roles)

    def lines(self, index: int, indent: int) -> Iterator[Text]:
        """The lines below the line of node `index`, for a terminal whose first `indent` columns are used."""
        node = self.trajectory.nodes[index]
        width = None if self.shown.width is None else max(_MIN_WIDTH, self.shown.width - indent)
        pieces = self._pieces(index) if self.shown.by is not None else []
        start = images = 0
        for reference in node.media if self.shown.images else ():
            end = reference.placeholder.offset + reference.placeholder.length
            yield from _folded([piece for piece in pieces if start <= piece.token < end], width)
            start = end
            images += 1
            if images <= _MAX_IMAGES:
                yield from map(_printable, image_lines(reference, (width or 80)))
        if images > _MAX_IMAGES:
            yield Text(f"[{images - _MAX_IMAGES} more images are not shown]", "dim")
        yield from _folded([piece for piece in pieces if piece.token >= start], width)
        yield from self._calls(index)

    def _pieces(self, index: int) -> list[_Piece]:
        """The tokens of a node; the placeholder of an item is one piece."""
        node, by = self.trajectory.nodes[index], self.shown.by
        assert by is not None
        columns = node_columns(node, self._owners(index), self.trainer_logprobs.get(index))
        texts = self._texts(node)
        placeholders = {reference.placeholder.offset: reference for reference in node.media}
        pieces: list[_Piece] = []
        token = 0
        while token < len(node):
            reference = placeholders.get(token)
            if reference is not None and reference.placeholder.length:
                text = f"[{reference.modality} {reference.source.digest[:8]}: {reference.placeholder.length} tokens]"
                pieces.append(_Piece(token, text, "black on color(215)" if self.shown.colours else ""))
                token += reference.placeholder.length
                continue
            pieces.append(self._piece(token, texts[token], columns, by))
            token += 1
        return pieces

    def _piece(self, token: int, text: str, columns: NodeColumns, by: By) -> _Piece:
        text = text.replace("\n", "⏎\n")
        if self.shown.colours:
            return _Piece(token, text, columns.style(by, token))
        number = columns.number(by, token)
        marked = _SAMPLED if columns.sampled[token] else ""
        value = "" if math.isnan(number) else f"⟨{number:.3g}⟩"
        end = "\n" if text.endswith("\n") else ""
        return _Piece(token, f"{marked}{text.removesuffix(end)}{value}{_BOUNDARY}{end}", "")

    def _texts(self, node: TokenNode) -> list[str]:
        """The text of each token; its id without a renderer, and where no text belongs to it."""
        ids = node.token_ids.tolist()
        if self.renderer is None:
            return [f"{token_id} " if self.shown.colours else str(token_id) for token_id in ids]
        found = token_texts(self.renderer.tokenizer, ids)
        starts = [0, *found.ends.tolist()]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        texts = []
        for place, kind in enumerate(found.kinds.tolist()):
            data = found.data[starts[place] : starts[place + 1]]
            if kind == TokenKind.UNKNOWN:
                texts.append(f"[{ids[place]}]")
            else:
                texts.append(decoder.decode(data))  # a character of several tokens is at the last one
        return texts

    def _owners(self, index: int) -> tuple[str, ...]:
        """The role of the message that owns each token."""
        node = self.trajectory.nodes[index]
        owners = self._view.owners.get(index) if self._view is not None else None
        roles = self._roles.get(index, [])
        if owners is not None:
            return tuple(roles[owner] if 0 <= owner < len(roles) else "" for owner in owners.tolist())
        of_node = {str(message.get("role", "")) for message in node.messages}
        prompt = of_node.pop() if len(of_node) == 1 else ""
        return tuple("assistant" if sampled else prompt for sampled in np.asarray(node.sampled).tolist())

    def _calls(self, index: int) -> Iterator[Text]:
        """A line for each tool call of a completion, with its status where the model is known."""
        turn = self._turn_of.get(index)
        if turn is None:
            return
        if self._view is not None:
            for call in self._view.calls.get(turn, []):
                status = str(call["status"])
                style = ("bold green" if status in ("ok", "noncanonical") else "bold red") if self.shown.colours else ""
                named = call["name"] if call["name"] is not None else call["raw"]
                yield _call_line(named, call["arguments"]).append(f"  {printable_line(status)}", style)
            return
        recorded: object = self.trajectory.turns[turn].message.get("tool_calls")
        for one in recorded if isinstance(recorded, list | tuple) else ():
            function = one.get("function", one) if isinstance(one, dict) else {}
            if isinstance(function, dict):
                yield _call_line(function.get("name", "?"), function.get("arguments"))


@dataclass(frozen=True, slots=True)
class _Piece:
    """Text that is shown for the tokens from `token` on."""

    token: int
    text: str
    style: str


def _call_line(name: object, arguments: object) -> Text:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, default=str, ensure_ascii=False)
    shown = "" if arguments is None else text if len(text) <= _MAX_ARGUMENTS else f"{text[:_MAX_ARGUMENTS]}…"
    return Text(printable_line(f"calls {name}({shown})"))


def _folded(pieces: Sequence[_Piece], width: int | None) -> Iterator[Text]:
    """The pieces in lines of at most `width` columns; a line feed ends a line."""
    line, used = Text(), 0
    for piece in pieces:
        part = ""  # of the piece, on this line
        for character in printable(piece.text):
            columns = cell_len(character)
            if character == "\n" or (width is not None and used + columns > width):
                yield line.append(part, piece.style)
                line, used, part = Text(), 0, ""
            if character != "\n":
                part += character
                used += columns
        line.append(part, piece.style)
    if line:
        yield line


def _printable(line: Text) -> Text:
    return line if line.plain.isprintable() else Text(printable_line(line.plain))
