"""Tables for analysis: a row for each episode, turn or node of a trajectory file, as Parquet or JSON lines."""

import json
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from renderers.errors import MissingExtraError
from renderers.messages import Modality
from rollouts.cli.traj.media_files import FILE_COLUMNS, FileColumns
from rollouts.cli.traj.value_types import ValueType
from rollouts.episodes.chat_turns import COMPLETION_TOKENS, PROMPT_TOKENS
from rollouts.errors import RolloutsError
from rollouts.observability.group_metrics import GroupMetrics
from rollouts.report.run_files import RunFiles
from rollouts.rewards import episode_reward_parts
from rollouts.trajectory.plain_json import plain
from rollouts.trajectory.token_node import TokenNode
from rollouts.trajectory.tree import Trajectory
from rollouts.trajectory_files import Episode, open_reader, read_episodes


class Level(StrEnum):
    """What a row is."""

    EPISODE = "episode"
    TURN = "turn"
    NODE = "node"


#: The columns of each level whose values have no fixed form.
_FREE: Final[Mapping[Level, tuple[str, ...]]] = {
    Level.EPISODE: ("task_data", "reward_parts", "metrics"),
    Level.TURN: ("info",),
    Level.NODE: (),
}


class Found(NamedTuple):
    """An episode and the line of its group, None where no line is known."""

    episode: Episode
    group: GroupMetrics | None


def find_episodes(file: Path, problems: list[str], *, media: bool) -> Iterator[Found]:
    """The episodes of a file, or of a run's directory, whose `metrics.jsonl` is read beside them.

    `problems` gets a line for each record, episode and line that cannot be read. Without `media` none is
    read.
    """
    rows: defaultdict[str, deque[GroupMetrics]] = defaultdict(deque)
    for row in RunFiles(file, problems).groups() if file.is_dir() else ():
        rows[row.task_id].append(row)
    with open_reader(file) as reader:
        record = -1
        group: GroupMetrics | None = None
        for episode in read_episodes(reader, problems, media=media):
            if episode.record != record or (group and group.task_id != episode.trajectory.group_id):
                of_task = rows.get(episode.trajectory.group_id)
                group = of_task.popleft() if of_task else None
            record = episode.record
            yield Found(episode, group if group and episode.place < len(group.total_rewards) else None)


# The rows. Each function returns the rows of one episode, in the order of the columns of `_schema`.


def _names(episode: Episode) -> dict[str, Any]:
    trajectory = episode.trajectory
    return {"number": episode.number, "episode_id": trajectory.episode_id, "group_id": trajectory.group_id}


def _episode_rows(found: Found, files: FileColumns) -> Iterator[dict[str, Any]]:
    trajectory, group, place = found.episode.trajectory, found.group, found.episode.place
    nodes, turns = trajectory.nodes, trajectory.turns
    if group is None:
        parts: Mapping[str, float] = episode_reward_parts(trajectory)
    else:
        parts = {name: values[place] for name, values in group.reward_parts.items()}
    tokens, sampled_tokens = _token_counts(trajectory)
    provenance = trajectory.provenance
    yield {
        **_names(found.episode),
        "seed": trajectory.seed,
        "task_data": None if group is None else group.task_data,
        "environment_reward": trajectory.reward,
        "group_reward": None if group is None else group.group_rewards[place],
        "total_reward": None if group is None else group.total_rewards[place],
        "reward_parts": dict(parts),
        "metrics": plain(trajectory.metrics),
        "turns": len(turns),
        "length_stops": trajectory.length_stops,
        "tokens": tokens,
        "sampled_tokens": sampled_tokens,
        **trajectory.media_counts(),
        "done": trajectory.done,
        "truncated": trajectory.truncated,
        "truncation_reason": trajectory.truncation_reason or None,
        "error_kind": trajectory.error.partition(":")[0] or None,
        "error": trajectory.error or None,
        "started_at": _time(trajectory.started_at),
        "seconds": trajectory.seconds,
        "engine_seconds": sum(turn.seconds for turn in turns),
        "weight_versions": list(dict.fromkeys(str(span.version) for node in nodes for span in node.weight_spans)),
        "attempts": None if group is None else group.attempts[place],
        "model": None if provenance is None else provenance.model,
        "engine": None if provenance is None else provenance.engine,
        **files.of(nodes),
    }


def _token_counts(trajectory: Trajectory) -> tuple[int | None, int | None]:
    """All tokens and the sampled ones; of a chat endpoint those that it counted, None where it did not."""
    if trajectory.has_tokens:
        return sum(map(len, trajectory.nodes)), sum(len(node.logprobs) for node in trajectory.nodes)
    prompt, completion = (trajectory.metrics.get(name) for name in (PROMPT_TOKENS, COMPLETION_TOKENS))
    if prompt is None or completion is None:
        return None, None
    return int(prompt + completion), int(completion)


def _turn_rows(found: Found, files: FileColumns) -> Iterator[dict[str, Any]]:
    trajectory = found.episode.trajectory
    nodes, ends = trajectory.nodes, _ends(trajectory)
    completions = {turn.node for turn in trajectory.turns}
    for number, turn in enumerate(trajectory.turns):
        prompt: list[TokenNode] = []  # since the completion before
        place = nodes[turn.node].parent
        while place >= 0 and place not in completions:
            prompt.insert(0, nodes[place])
            place = nodes[place].parent
        completion_tokens = len(nodes[turn.node])
        yield {
            **_names(found.episode),
            "turn": number,
            "agent": turn.agent,
            "node": turn.node,
            "reward": turn.reward,
            "info": plain(turn.info),
            "prompt": [_message(message) for node in prompt for message in node.messages],
            "message": _message(turn.message),
            "finish_reason": turn.finish_reason.value,
            "seconds": turn.seconds,
            "prompt_tokens": ends[turn.node] - completion_tokens if trajectory.has_tokens else None,
            "completion_tokens": completion_tokens if trajectory.has_tokens else None,
            **files.of(prompt),
        }


def _node_rows(found: Found, files: FileColumns) -> Iterator[dict[str, Any]]:
    trajectory = found.episode.trajectory
    turns = {turn.node: (number, turn.agent) for number, turn in enumerate(trajectory.turns)}
    for index, node in enumerate(trajectory.nodes):
        logprobs: list[Any] = [None] * len(node)
        for place, logprob in zip(np.flatnonzero(node.sampled).tolist(), node.logprobs, strict=True):
            logprobs[place] = logprob
        turn, agent = turns.get(index, (None, None))
        yield {
            **_names(found.episode),
            "node": index,
            "parent": node.parent,
            "turn": turn,
            "agent": agent,
            "token_ids": node.token_ids.astype(np.int32),  # an engine's may be of another size or byte order
            "sampled": node.sampled,
            "content": node.content,
            "logprobs": logprobs,
            "weight_spans": [
                {"version": str(span.version), "start": span.start, "end": span.end} for span in node.weight_spans
            ],
            "media": [
                {
                    "modality": reference.modality,
                    "mm_hash": reference.mm_hash,
                    "digest": reference.source.digest,
                    "offset": reference.placeholder.offset,
                    "length": reference.placeholder.length,
                }
                for reference in node.media
            ],
            **files.of([node]),
        }


_NO_FILES: Final = FileColumns((), [])
_ROWS: Final = {Level.EPISODE: _episode_rows, Level.TURN: _turn_rows, Level.NODE: _node_rows}


def _ends(trajectory: Trajectory) -> list[int]:
    """The number of tokens from the root to the end of each node."""
    ends: list[int] = []
    for node in trajectory.nodes:
        ends.append((ends[node.parent] if node.parent >= 0 else 0) + len(node))
    return ends


def _time(seconds: float) -> datetime | None:
    """None for 0, which is not known, and for times outside of the calendar."""
    try:
        return datetime.fromtimestamp(seconds, UTC) if seconds else None
    except (ValueError, OverflowError, OSError):
        return None


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Role, texts and tool calls of a message; `arguments` are text, as in the OpenAI format."""
    calls = message.get("tool_calls")
    return {
        "role": _text(message.get("role")),
        "content": _text(message.get("content")),
        "reasoning": _text(message.get("reasoning_content")),
        "tool_calls": [_call(call) for call in calls] if isinstance(calls, list | tuple) else [],
    }


def _text(content: Any) -> str | None:
    """A text, or the texts of parts, on lines of their own; None for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        return None
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in content)
    return "\n".join(text for text in texts if isinstance(text, str))


def _call(call: Any) -> dict[str, Any]:
    call = call if isinstance(call, Mapping) else {}
    function = call.get("function", call)
    function = function if isinstance(function, Mapping) else {}
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str):
        arguments = json.dumps(plain(arguments))
    return {"id": _text(call.get("id")), "name": _text(function.get("name")), "arguments": arguments}


# Files.


def write_jsonl(file: Path, level: Level, out: Path, problems: list[str]) -> int:
    """Write the rows of a level to the new file `out`; returns the number of rows. Raises `OSError`.

    Numbers that are not finite are null.
    """
    written = 0
    with out.open("w", encoding="ascii") as lines:
        for found in find_episodes(file, problems, media=False):
            for row in _rows(found, level, _NO_FILES, problems):
                values = {name: one.tolist() if isinstance(one, np.ndarray) else one for name, one in row.items()}
                lines.write(json.dumps(plain(values), allow_nan=False, separators=(",", ":")) + "\n")
                written += 1
    return written


def write_parquet(
    file: Path, level: Level, out: Path, problems: list[str], notes: list[str], *, modalities: Collection[Modality]
) -> int:
    """Write the rows of a level to the new file `out`; returns the number of rows.

    The media of `modalities` are in columns of their own. The file is read twice where the level has
    columns without a fixed form: for their types, and for their values. `notes` gets a line for each place
    whose values are text of JSON. Raises `MissingExtraError`, `OSError`.
    """
    pyarrow = _imported_pyarrow()
    types = {name: ValueType() for name in _FREE[level]}
    for found in find_episodes(file, [], media=False) if types else ():
        for row in _rows(found, level, _NO_FILES, []):
            for name, value_type in types.items():
                value_type.add(row[name])
    notes += [line for name, value_type in types.items() for line in value_type.conflicts(name)]
    schema = _schema(pyarrow, level, types, modalities)
    files = FileColumns(modalities, problems)
    rows = (
        {**row, **{name: each.fitted(row[name]) for name, each in types.items()}}
        for found in find_episodes(file, problems, media=bool(modalities))
        for row in _rows(found, level, files, problems)
    )
    return _write_table(pyarrow, out, schema, rows)


def _imported_pyarrow() -> Any:
    """The module `pyarrow`. Raises `MissingExtraError`."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("export to Parquet", "parquet", "pyarrow") from error
    return pyarrow


def _write_table(pyarrow: Any, path: Path, schema: Any, rows: Iterable[dict[str, Any]]) -> int:
    """Write rows to the new file `path`; returns their number. Memory holds 1,024 of them, or 32 MiB by `_size`."""
    written, size = 0, 0
    waiting: list[dict[str, Any]] = []
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for row in rows:
            waiting.append(row)
            size += _size(row)
            if len(waiting) == 1024 or size > 32 << 20:
                writer.write_table(pyarrow.Table.from_pylist(waiting, schema))
                written, size, waiting = written + len(waiting), 0, []
        writer.write_table(pyarrow.Table.from_pylist(waiting, schema))
    return written + len(waiting)


def _rows(found: Found, level: Level, files: FileColumns, problems: list[str]) -> list[dict[str, Any]]:
    """The rows of an episode; none, and a line in `problems`, for one that has a value without a JSON form."""
    try:
        return list(_ROWS[level](found, files))
    except RolloutsError as error:
        problems.append(f"{found.episode.name}: {error}")
        return []


def _size(row: Mapping[str, Any]) -> int:
    """About the bytes of a row: those of its media and messages, and 8 for each token, in several columns."""
    messages = [*row.get("prompt", ()), *([row["message"]] if "message" in row else ())]
    texts = sum(len(message["content"] or "") for message in messages)
    media = sum(len(each["bytes"]) for column in FILE_COLUMNS.values() for each in row.get(column, ()))
    return media + 8 * len(row.get("token_ids", ())) + texts


def _schema(pyarrow: Any, level: Level, types: Mapping[str, ValueType], modalities: Collection[Modality]) -> Any:
    text, int32, int64, double = pyarrow.string(), pyarrow.int32(), pyarrow.int64(), pyarrow.float64()
    columns = {"number": int64, "episode_id": text, "group_id": text}
    free = {name: value_type.arrow(pyarrow) for name, value_type in types.items()}
    if level is Level.EPISODE:
        columns |= {
            "seed": int64,
            "task_data": free["task_data"],
            **dict.fromkeys(("environment_reward", "group_reward", "total_reward"), double),
            "reward_parts": free["reward_parts"],
            "metrics": free["metrics"],
            **dict.fromkeys(("turns", "length_stops"), int32),
            **dict.fromkeys(("tokens", "sampled_tokens"), int64),
            **dict.fromkeys(("images", "sounds", "distinct_images", "distinct_sounds"), int32),
            **dict.fromkeys(("done", "truncated"), pyarrow.bool_()),
            **dict.fromkeys(("truncation_reason", "error_kind", "error"), text),
            "started_at": pyarrow.timestamp("us", tz="UTC"),
            **dict.fromkeys(("seconds", "engine_seconds"), double),
            "weight_versions": pyarrow.list_(text),
            "attempts": int32,
            **dict.fromkeys(("model", "engine"), text),
        }
    elif level is Level.TURN:
        call = pyarrow.struct(dict.fromkeys(("id", "name", "arguments"), text))
        message = pyarrow.struct(
            {**dict.fromkeys(("role", "content", "reasoning"), text), "tool_calls": pyarrow.list_(call)}
        )
        columns |= {
            "turn": int32,
            "agent": text,
            "node": int32,
            "reward": double,
            "info": free["info"],
            "prompt": pyarrow.list_(message),
            "message": message,
            "finish_reason": text,
            "seconds": double,
            **dict.fromkeys(("prompt_tokens", "completion_tokens"), int32),
        }
    else:
        flags = pyarrow.list_(pyarrow.bool_())
        columns |= {
            **dict.fromkeys(("node", "parent", "turn"), int32),
            "agent": text,
            "token_ids": pyarrow.list_(int32),
            "sampled": flags,
            "content": flags,
            "logprobs": pyarrow.list_(pyarrow.float32()),
            "weight_spans": pyarrow.list_(pyarrow.struct({"version": text, "start": int32, "end": int32})),
            "media": pyarrow.list_(
                pyarrow.struct(
                    {**dict.fromkeys(("modality", "mm_hash", "digest"), text), "offset": int32, "length": int32}
                )
            ),
        }
    if not modalities:
        return pyarrow.schema(columns)
    medium = pyarrow.struct({"bytes": pyarrow.binary(), "path": text})
    columns |= {FILE_COLUMNS[each]: pyarrow.list_(medium) for each in modalities}
    features = {
        FILE_COLUMNS[each]: {"feature": {"_type": {"image": "Image", "audio": "Audio"}[each]}, "_type": "List"}
        for each in modalities
    }
    return pyarrow.schema(columns, metadata={"huggingface": json.dumps({"info": {"features": features}})})
