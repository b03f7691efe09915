"""Episodes on a terminal: the list, as a table and as JSON, and one episode as a tree.

A tree has a line for each node, indented only after a fork or below several roots.

0 system user   40 tokens   image 3f2a91c04b5d8e77 at 12+16   Be brief.   [image] What is this?
1 assistant   12 sampled   weights 0   stop, reward 0.5   A door.
├─ 2 user   9 tokens   Open it.
│  3 assistant   4 sampled   weights 1   stop, reward 1   Done.
└─ 4 prompt   21 tokens
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rollouts.terminal.table import Column, print_table
from rollouts.terminal.text import counted, print_line, printable_line
from rollouts.trajectory.token_node import TokenNode
from rollouts.trajectory.tree import Trajectory
from rollouts.trajectory.turn import Turn
from rollouts.trajectory_files import Episode
from rollouts.values import mean_and_spread

_SNIPPET = 72

# The columns of counts, each with its place in the order in which a narrow table leaves columns out.
_COUNTS = {"turns": 4, "branches": 1, "tokens": 6, "sampled": 5, "images": 3, "sounds": 3}


def describe_episode(episode: Episode) -> dict[str, Any]:
    """Plain data. `tokens` counts each node once, however many branches share it, and so do images and sounds."""
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
        **trajectory.media_counts(),
        "environment_reward": trajectory.reward,
        "status": trajectory.status,
        "error": trajectory.error,
    }


def media_text(described: Mapping[str, Any]) -> str:
    """The counts of images, and of sounds where there are some: "3 images (2 distinct), 1 sound"."""
    texts = []
    for name in ("image", "sound"):
        shown, distinct = described[f"{name}s"], described[f"distinct_{name}s"]
        if shown or name == "image":
            texts.append(counted(shown, name) + (f" ({distinct:,} distinct)" if distinct < shown else ""))
    return ", ".join(texts)


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
        Column("status", f"{sum(one['status'] == 'done' for one in described):,} done"),
    ]
    rows = (
        [
            str(one["number"]),
            printable_line(one["episode"]),
            printable_line(one["group"]) or "-",
            *(f"{one[name]:,}" for name in totals),
            f"{one['environment_reward']:.4g}",
            one["status"],
        ]
        for one in described
    )
    print_table(columns, rows)
    if reward.not_finite:
        left_out = counted(reward.not_finite, "episode")
        print_line(f"not in the mean environment reward: {left_out} whose reward is not finite")


def tree_lines(trajectory: Trajectory, *, ids: bool = False, text: bool = False) -> Iterator[str]:
    """The lines of an episode; `ids` adds token ids (runs as `id x count`), `text` the whole messages."""
    children: dict[int, list[int]] = {}
    for index, node in enumerate(trajectory.nodes):
        children.setdefault(node.parent, []).append(index)
    turns = {turn.node: turn for turn in trajectory.turns}
    # (node, prefix of its first line, prefix of its other lines and of its descendants)
    stack = _siblings(children.get(-1, []), "")
    while stack:
        index, first, rest = stack.pop()
        node, turn = trajectory.nodes[index], turns.get(index)
        yield f"{first}{index} {_node_text(node, turn)}"
        if ids and len(node):
            yield f"{rest}   {_ids(node)}"
        for message in _messages(node, turn) if text else ():
            yield from (f"{rest}   {line}" for line in _text_of(message).split("\n"))
        stack += _siblings(children.get(index, []), rest)


def _siblings(nodes: list[int], prefix: str) -> list[tuple[int, str, str]]:
    """The entries of the children of one node (or of the roots), the last one first."""
    if len(nodes) == 1:
        return [(nodes[0], prefix, prefix)]
    entries = [(node, f"{prefix}├─ ", f"{prefix}│  ") for node in nodes[:-1]]
    entries += [(node, f"{prefix}└─ ", f"{prefix}   ") for node in nodes[-1:]]
    return entries[::-1]


def _messages(node: TokenNode, turn: Turn | None) -> list[Any]:
    return [*node.messages, *([turn.message] if turn is not None else [])]


def _node_text(node: TokenNode, turn: Turn | None) -> str:
    sampled = len(node.logprobs)
    messages = _messages(node, turn)
    parts = [" ".join(str(message.get("role", "?")) for message in messages) or "prompt"]
    parts.append(counted(len(node), "token") if sampled != len(node) or not sampled else f"{sampled:,} sampled")
    if 0 < sampled < len(node):
        parts.append(f"{sampled:,} sampled")
    if node.weight_spans:
        parts.append("weights " + ", ".join(dict.fromkeys(str(span.version) for span in node.weight_spans)))
    parts += [
        f"{reference.modality} {reference.source.digest[:16]} "
        f"at {reference.placeholder.offset}+{reference.placeholder.length}"
        for reference in node.media
    ]
    if turn is not None:
        agent = [f"agent {turn.agent}"] if turn.agent else []
        parts.append(", ".join([*agent, turn.finish_reason.value, f"reward {turn.reward:.4g}"]))
    texts = filter(None, map(_text_of, messages))
    parts += [text if len(text) <= _SNIPPET else f"{text[: _SNIPPET - 1]}…" for text in texts]
    if node.extras:
        parts.append("extras " + ", ".join(f"{name} {rows.shape}" for name, rows in node.extras.items()))
    return printable_line("   ".join(parts))


def _text_of(message: Any) -> str:
    """The text of a message, with its tool calls; other parts by their type."""
    content = message.get("content")
    pieces = content if isinstance(content, list) else [content]
    texts = [_piece(piece) for piece in pieces]
    calls = message.get("tool_calls")
    texts += [f"[calls {_call(call)}]" for call in (calls if isinstance(calls, (list, tuple)) else ())]
    return " ".join(text for text in texts if text)


def _call(call: object) -> str:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return "?"
    arguments = function.get("arguments", "")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, default=str, ensure_ascii=False)
    return f"{function.get('name', '?')}({text})"


def _piece(piece: object) -> str:
    if isinstance(piece, str):
        return piece
    if isinstance(piece, dict):
        return str(piece["text"]) if "text" in piece else f"[{piece.get('type', 'part')}]"
    return ""


def _ids(node: TokenNode) -> str:
    runs = [(token, sum(1 for _ in run)) for token, run in groupby(node.token_ids.tolist())]
    return " ".join(str(token) if count == 1 else f"{token} x{count}" for token, count in runs)
