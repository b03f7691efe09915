"""Episodes on a terminal: the list, as a table and as JSON, and one episode as a tree.

A tree has a line for each node, indented only after a fork or below several roots.

0 system user   40 tokens   image 3f2a91c04b5d8e77 at 12+16   Be brief.   [image] What is this?
1 assistant   12 sampled   weights 0   stop, reward 0.5   A door.
├─ 2 user   9 tokens   Open it.
│  3 assistant   4 sampled   weights 1   stop, reward 1   Done.
└─ 4 prompt   21 tokens
"""

from __future__ import annotations

import base64
import codecs
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from PIL import Image
from rich.cells import cell_len
from rich.text import Text

from renderers import TemplateRenderer
from rollouts.errors import RolloutsError
from rollouts.terminal.table import Column, counted, print_line, print_table, printable, printable_line
from rollouts.trajectory.token_node import MediaReference, TokenNode, Turn, media_counts
from rollouts.trajectory.tree import Trajectory
from rollouts.trajectory_files import Episode
from rollouts.values import mean_and_spread
from rollouts.view.drift import ModelView, model_view
from rollouts.view.episode_data import (
    LIKELIEST,
    TRAINER_LOGPROBS,
    TokenKind,
    TrainerLogprobs,
    likeliest_rows,
    mismatch,
    token_texts,
)
from rollouts.view.media_frames import display_medium
from rollouts.view.sounds import waveform_line

_ROLES: Final = {
    "system": "#fbecb8",
    "developer": "#fbdcd6",
    "user": "#d3e6fb",
    "tool": "#e2dcf8",
    "assistant": "#d2f0d8",
}
_OTHER: Final = "#e7e7e3"
_COLD, _HOT = (0xFF, 0xFF, 0xFF), (0xF0, 0x70, 0x5C)
_STEPS: Final = 10
_UNMARKED: Final = "color(245)"


class By(StrEnum):
    """The meaning of the colours."""

    OWNER = "owner"
    SAMPLED = "sampled"
    LOGPROB = "logprob"
    MISMATCH = "mismatch"


@dataclass(frozen=True, slots=True)
class NodeColumns:
    """What is known of each token of a node: `sampled` bool (n,), `scaffold` bool (n,); `logprobs` and `mismatch`
    float64 (n,), NaN where they are not known; the `roles` of the messages that own the tokens, "" for none.
    """

    sampled: np.ndarray
    scaffold: np.ndarray
    logprobs: np.ndarray
    mismatch: np.ndarray
    roles: tuple[str, ...]

    def number(self, by: By, token: int) -> float:
        """The number of a token that `by` shows; NaN where there is none."""
        column = {By.LOGPROB: self.logprobs, By.MISMATCH: self.mismatch}.get(by)
        return math.nan if column is None else float(column[token])

    def style(self, by: By, token: int) -> str:
        """The style of a token for rich."""
        if by is By.SAMPLED:
            return f"black on {_ROLES['assistant']}" if self.sampled[token] else _UNMARKED
        if by is By.OWNER:
            if self.scaffold[token] and not self.sampled[token]:
                return _UNMARKED
            return f"black on {_ROLES.get(self.roles[token], _OTHER)}"
        share = _share(by, self.number(by, token))
        return _UNMARKED if math.isnan(share) else f"black on {_mixed(share)}"


def node_columns(node: TokenNode, roles: tuple[str, ...], trainer_logprobs: np.ndarray | None = None) -> NodeColumns:
    """The columns of a node whose tokens are owned by messages of these roles.

    Without `trainer_logprobs`, float32 (n,), those of the trainer are read from the extra of that name.
    """
    logprobs = np.full(len(node), np.nan)
    logprobs[node.sampled] = node.logprobs
    trainer = node.extras.get(TRAINER_LOGPROBS) if trainer_logprobs is None else trainer_logprobs
    mismatch = np.full(len(node), np.nan)
    if trainer is not None and trainer.ndim == 1 and trainer.dtype.kind in "biuf":
        mismatch = np.abs(trainer.astype(np.float64) - logprobs)
    scaffold = np.zeros(len(node), bool) if node.content is None else ~node.content
    return NodeColumns(node.sampled, scaffold, logprobs, mismatch, roles)


def legend(by: By) -> list[tuple[str, str]]:
    """Texts with their styles."""
    if by is By.OWNER:
        return [*((role, f"black on {colour}") for role, colour in _ROLES.items()), ("scaffold", _UNMARKED)]
    if by is By.SAMPLED:
        return [("sampled: trained", f"black on {_ROLES['assistant']}"), ("not sampled", _UNMARKED)]
    marks: Mapping[By, tuple[str, str, str]] = {
        By.LOGPROB: ("0 (p = 1)", "-3 (p = 0.05)", "-6 (p = 0.0025) or less"),
        By.MISMATCH: ("1e-6 or less", "1e-3", "1 or more"),
    }
    return [(text, f"black on {_mixed(index / 2)}") for index, text in enumerate(marks[by])]


def _share(by: By, number: float) -> float:
    """Where a number is between cold (0) and hot (1), as on the page of the viewer; NaN where it is not known."""
    if math.isnan(number):
        return number
    if by is By.LOGPROB:
        return -number / 6
    return (math.log10(max(number, 1e-6)) + 6) / 6 if math.isfinite(number) else 1.0


def _mixed(share: float) -> str:
    step = max(0, min(_STEPS - 1, math.floor(share * _STEPS))) / (_STEPS - 1)
    return "#" + "".join(f"{round(cold + (hot - cold) * step):02x}" for cold, hot in zip(_COLD, _HOT, strict=True))


class Colouring(NamedTuple):
    """`by` is what the tokens are coloured by; `note` says why it is not what was asked for, empty if it is."""

    by: By
    note: str


def trainer_logprobs_beside(file: Path, trajectory: Trajectory, problems: list[str]) -> Mapping[int, np.ndarray]:
    """The trainer's log-probabilities by node, from the `mismatch.mmr` of the directory of `file`; none without it."""
    from rollouts.report.run_files import RunFiles
    from rollouts.report.viewer_page import compared_tokens

    directory = RunFiles(file.parent, problems)
    for _ in directory.mismatches():  # names in `problems` what cannot be read
        pass
    compared = compared_tokens(directory, {trajectory.episode_id})
    return {} if compared is None else TrainerLogprobs(compared).of(trajectory)


def colouring_of(
    by: By, trajectory: Trajectory, trainer_logprobs: Mapping[int, np.ndarray], *, has_model: bool
) -> Colouring:
    """`by` where a token of the episode has what it shows; else a colouring that the episode has, and a line."""
    sampled = any(node.sampled.any() for node in trajectory.nodes)
    if by is By.MISMATCH and not any(
        len(mismatch(node, trainer_logprobs.get(index))) for index, node in enumerate(trajectory.nodes)
    ):
        reason = (
            "--by mismatch needs the trainer's log-probabilities, and this episode has none: a TrainingLog writes them "
            "into mismatch.mmr beside the file (docs/report.md), or they are the extra trainer_logprobs of its nodes"
        )
        return _instead(By.LOGPROB if sampled else By.OWNER, reason)
    if by in (By.LOGPROB, By.SAMPLED) and not sampled:
        return _instead(By.OWNER, f"--by {by.value} shows sampled tokens, and this episode has none")
    if by is By.OWNER and not has_model and not any(len(node.messages) == 1 for node in trajectory.nodes) and sampled:
        reason = "the owners of prompt tokens are not known: they need the model, so pass --model DIR"
        return _instead(By.SAMPLED, reason)
    return Colouring(by, "")


def _instead(by: By, reason: str) -> Colouring:
    return Colouring(by, f"{reason}; the tokens are coloured by {by.value}")


# Images as coloured half-blocks of a terminal, two pixels a character, and the waveforms of sounds.


MAX_COLUMNS: Final = 48
MAX_ROWS: Final = 16
_FRAMES: Final = 4
_GAP: Final = "  "


def medium_lines(reference: MediaReference, columns: int) -> list[Text]:
    """An image, or the first 4 of the shown frames of a video, in at most `columns` columns and 16 rows; a waveform.

    One line with the reason where the medium cannot be decoded.
    """
    medium = display_medium(reference.source, reference.modality, 2 * MAX_COLUMNS)
    if sound := medium.get("sound"):
        parts = np.array_split(sound["peaks"], min(columns, MAX_COLUMNS))
        waveform = waveform_line([max(part) for part in parts])
        return [Text.assemble((waveform, "cyan"), f" {sound['seconds']:.4g} s, {sound['rate']:,} Hz")]
    frames = medium["frames"][:_FRAMES]
    if not frames:
        return [Text(f"[{reference.modality} not shown: {medium.get('error', 'it has no frames')}]", "dim")]
    each = max(4, (min(columns, MAX_COLUMNS * len(frames)) - len(_GAP) * (len(frames) - 1)) // len(frames))
    drawn = [_half_blocks(base64.b64decode(frame["data"]), min(each, MAX_COLUMNS)) for frame in frames]
    rows = max(map(len, drawn))
    lines = []
    for row in range(rows):
        line = Text()
        for number, picture in enumerate(drawn):
            line.append(_GAP if number else "")
            line.append_text(picture[row] if row < len(picture) else Text(" " * len(picture[0])))
        lines.append(line)
    return lines


def _half_blocks(file: bytes, columns: int) -> list[Text]:
    image = Image.open(io.BytesIO(file)).convert("RGB")
    scale = min(columns / image.width, 2 * MAX_ROWS / image.height, 1.0)
    width, height = max(1, round(image.width * scale)), max(2, round(image.height * scale))
    pixels = image.resize((width, height + height % 2)).load()
    assert pixels is not None
    return [
        Text.assemble(*(("▀", f"{_hex(pixels[x, y])} on {_hex(pixels[x, y + 1])}") for x in range(width)))
        for y in range(0, height, 2)
    ]


def _hex(pixel: object) -> str:
    assert isinstance(pixel, tuple)
    return "#{:02x}{:02x}{:02x}".format(*pixel)


# What is shown below the line of a node: its tokens with media at their place, and its tool calls.


_BOUNDARY: Final = "¦"
_SAMPLED: Final = "●"
_MAX_MEDIA: Final = 8
_MAX_ARGUMENTS: Final = 400
_MIN_WIDTH: Final = 20


@dataclass(frozen=True, slots=True)
class Shown:
    """What to show. `by` is None without tokens; `width` is that of the terminal, None elsewhere; `top` is how many of
    the likeliest tokens in the place of each sampled one."""

    by: By | None = None
    media: bool = False
    colours: bool = False
    width: int | None = None
    top: int = 0


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
        start = media = 0
        for reference in node.media if self.shown.media else ():
            end = reference.placeholder.offset + reference.placeholder.length
            yield from _folded([piece for piece in pieces if start <= piece.token < end], width)
            start = end
            media += 1
            if media <= _MAX_MEDIA:
                yield from map(_printable, medium_lines(reference, (width or 80)))
        if media > _MAX_MEDIA:
            yield Text(f"[{media - _MAX_MEDIA} more media are not shown]", "dim")
        yield from _folded([piece for piece in pieces if piece.token >= start], width)
        if self.shown.top:
            yield from self._likeliest(node)
        yield from self._calls(index)

    def _pieces(self, index: int) -> list[_Piece]:
        """The tokens of a node; the placeholder of an item is one piece."""
        node, by = self.trajectory.nodes[index], self.shown.by
        assert by is not None
        columns = node_columns(node, self._owners(index), self.trainer_logprobs.get(index))
        texts = self._texts(node.token_ids.tolist())
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

    def _likeliest(self, node: TokenNode) -> Iterator[Text]:
        """A line for each sampled token: the likeliest tokens in its place, the sampler's and the teacher's."""
        found = {of: likeliest_rows(*map(node.extras.get, names)) for of, names in LIKELIEST.items()}
        known = {of: rows for of, rows in found.items() if rows[0].shape[1]}
        for token in np.flatnonzero(node.sampled).tolist() if known else ():
            parts = [self._named(int(node.token_ids[token]))]
            for of, (ids, logprobs) in known.items():
                pairs = zip(ids[token, : self.shown.top].tolist(), logprobs[token].tolist(), strict=False)
                parts.append(f"{of}: " + ", ".join(f"{self._named(one)} {logprob:.3g}" for one, logprob in pairs))
            yield Text(printable_line("   ".join(parts)))

    def _named(self, token_id: int) -> str:
        """The text of one token in quotes; its id without a renderer, and for a token that is part of a character."""
        if self.renderer is None:
            return str(token_id)
        data = token_texts(self.renderer.tokenizer, [token_id]).data
        try:
            text = data.decode() or f"[{token_id}]"
        except UnicodeDecodeError:
            text = f"[{token_id}]"
        return json.dumps(text, ensure_ascii=False)

    def _texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token; its id without a renderer, and where no text belongs to it."""
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


_SNIPPET = 72
_DIGITS = 16
_INDENT = 3

# The columns of counts, each with its place in the order in which a narrow table leaves columns out.
_COUNTS = {"turns": 4, "branches": 1, "tokens": 6, "sampled": 5, "images": 3, "sounds": 3}


def describe_episode(episode: Episode) -> dict[str, Any]:
    """Plain data. `tokens` counts each node once, however many branches share it; `images` (videos too) and
    `sounds` are distinct sources.
    """
    trajectory = episode.trajectory
    return {
        "number": episode.number,
        "episode": trajectory.episode_id,
        "group": trajectory.group_id,
        "turns": len(trajectory.turns),
        "length_stops": trajectory.length_stops,
        "branches": len(trajectory.leaves()),
        "tokens": sum(map(len, trajectory.nodes)),
        "sampled": sum(len(node.logprobs) for node in trajectory.nodes),
        **media_counts(
            modality for modality, _ in {(each.modality, each.source.digest) for each in trajectory.all_media()}
        ),
        "environment_reward": trajectory.reward,
        "done": trajectory.done,
        "truncated": trajectory.truncated,
        "error": trajectory.error,
    }


def ending(described: dict[str, Any]) -> str:
    """How the episode ended: "error", "truncated", "done", or "-" if it has not ended."""
    if described["error"]:
        return "error"
    if described["truncated"]:
        return "truncated"
    return "done" if described["done"] else "-"


def print_episodes(described: Sequence[dict[str, Any]]) -> None:
    """Print a table of episodes, with totals below it; of the reward the mean."""
    sums = {name: sum(one[name] for one in described) for name in _COUNTS}
    totals = {name: f"{total:,}" for name, total in sums.items() if total or name != "sounds"}
    groups = len({one["group"] for one in described})
    reward = mean_and_spread(one["environment_reward"] for one in described)
    columns = [
        Column("#", align_right=True),
        Column("episode", counted(len(described), "episode"), wraps=True),
        Column("group", counted(groups, "group"), wraps=True, drop_order=2),
        *(Column(name, total, align_right=True, drop_order=_COUNTS[name]) for name, total in totals.items()),
        Column("environment reward", f"{reward.mean:.4g}" if reward.used else "-", align_right=True, wraps=True),
        Column("done", f"{sum(one['done'] for one in described):,}"),
    ]
    rows = (
        [
            str(one["number"]),
            printable_line(one["episode"]),
            printable_line(one["group"]) or "-",
            *(f"{one[name]:,}" for name in totals),
            f"{one['environment_reward']:.4g}",
            ending(one),
        ]
        for one in described
    )
    print_table(columns, rows)
    if reward.not_finite:
        left_out = counted(reward.not_finite, "episode")
        print_line(f"not in the mean environment reward: {left_out} whose reward is not finite")


def tree_lines(trajectory: Trajectory, details: NodeDetails, *, ids: bool = False) -> Iterator[Text]:
    """The lines of a valid episode, with the `details` of each node below its line.

    `ids` adds each node's token ids, runs of one id as `id x count`.
    """
    children: dict[int, list[int]] = {}
    for index, node in enumerate(trajectory.nodes):
        children.setdefault(node.parent, []).append(index)
    turns = {turn.node: turn for turn in trajectory.turns}
    # (node, prefix of its first line, prefix of its other lines and of its descendants)
    stack = _siblings(children.get(-1, []), "")
    while stack:
        index, first, rest = stack.pop()
        node = trajectory.nodes[index]
        yield Text(f"{first}{index} {_node_text(node, turns.get(index))}")
        if ids and len(node):
            yield Text(f"{rest}   {_ids(node)}")
        for line in details.lines(index, len(rest) + _INDENT):
            yield Text(f"{rest}{' ' * _INDENT}").append_text(line)
        stack += _siblings(children.get(index, []), rest)


def _siblings(nodes: list[int], prefix: str) -> list[tuple[int, str, str]]:
    """The entries of the children of one node (or of the roots), the last one first."""
    if len(nodes) == 1:
        return [(nodes[0], prefix, prefix)]
    entries = [(node, f"{prefix}├─ ", f"{prefix}│  ") for node in nodes[:-1]]
    entries += [(node, f"{prefix}└─ ", f"{prefix}   ") for node in nodes[-1:]]
    return entries[::-1]


def _node_text(node: TokenNode, turn: Turn | None) -> str:
    sampled = len(node.logprobs)
    messages: list[Any] = [*node.messages, *([turn.message] if turn is not None else [])]
    parts = [" ".join(str(message.get("role", "?")) for message in messages) or "prompt"]
    parts.append(counted(len(node), "token") if sampled != len(node) or not sampled else f"{sampled:,} sampled")
    if 0 < sampled < len(node):
        parts.append(f"{sampled:,} sampled")
    if node.weight_spans:
        parts.append("weights " + ", ".join(dict.fromkeys(str(span.version) for span in node.weight_spans)))
    parts += [
        f"{reference.modality} {reference.source.digest[:_DIGITS]} "
        f"at {reference.placeholder.offset}+{reference.placeholder.length}"
        for reference in node.media
    ]
    if turn is not None:
        agent = [f"agent {turn.agent}"] if turn.agent else []
        parts.append(", ".join([*agent, turn.finish_reason.value, f"reward {turn.reward:.4g}"]))
    parts += [text for message in messages if (text := _text_of(message))]
    if node.extras:
        parts.append("extras " + ", ".join(f"{name} {rows.shape}" for name, rows in node.extras.items()))
    return printable_line("   ".join(parts))


def _text_of(message: Any) -> str:
    """The beginning of the text of a message; tool calls by their name, other parts by their type."""
    content = message.get("content")
    pieces = content if isinstance(content, list) else [content]
    texts = [_piece(piece) for piece in pieces]
    calls = message.get("tool_calls")
    texts += [f"[calls {_name(call)}]" for call in (calls if isinstance(calls, (list, tuple)) else ())]
    text = " ".join(text for text in texts if text)
    return text if len(text) <= _SNIPPET else f"{text[: _SNIPPET - 1]}…"


def _name(call: object) -> str:
    function = call.get("function", call) if isinstance(call, dict) else None
    return str(function.get("name", "?")) if isinstance(function, dict) else "?"


def _piece(piece: object) -> str:
    if isinstance(piece, str):
        return piece
    if isinstance(piece, dict):
        return str(piece["text"]) if "text" in piece else f"[{piece.get('type', 'part')}]"
    return ""


def _ids(node: TokenNode) -> str:
    runs = [(token, sum(1 for _ in run)) for token, run in groupby(node.token_ids.tolist())]
    return " ".join(str(token) if count == 1 else f"{token} x{count}" for token, count in runs)
