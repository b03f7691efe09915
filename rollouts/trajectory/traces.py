"""Conversion of the traces that verifiers records, graphs of messages with their tokens, to trajectories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from renderers import MediaItem, Message, PlaceholderRange, RenderedTokens
from renderers.media.reference import load_source
from renderers.messages import Modality, media_parts, part_kind
from renderers.rendered import MultiModalData
from rollouts.engines.protocol import Completion, FinishReason
from rollouts.errors import InvalidTurnError, TrajectoryError, short_repr
from rollouts.trajectory.packed_episodes import Processors
from rollouts.trajectory.token_node import processor_for
from rollouts.trajectory.tree import Trajectory
from rollouts.values import finite_number, whole_number

_LIMITS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed")
# Of a trace in memory only this is converted to plain values, besides its nodes.
_OUTCOME = {
    "task": {"key": True, "data": {"idx"}},
    "agent": {"name", "trainable"},
    **dict.fromkeys(("rewards", "metrics", "ok", "errors", "stop_condition", "calls", "timing"), True),
}


def trajectory_from_trace(trace: Any, *, processors: Processors | None = None, group_id: str = "") -> Trajectory:
    """The trajectory of a rollout that verifiers 0.4 recorded with token ids; not finished yet.

    `trace` is a `Trace` or `WireTrace`, or a dict: the result of `to_record`, or what `msgpack.unpackb` returns for a
    trace that an environment server sent. `to_record` rounds log-probabilities to four decimals and leaves out routed
    experts and sampling masks. verifiers need not be installed.

    Each sampled message becomes a turn. Traces have media in their messages and only token ids for their placeholders:
    where a prompt has media, pass `processors=renderer.processors` of the renderer's model, which compute their hashes
    and number of tokens again. Rewards, metrics and errors are read as `EngineClient.pop_trajectory` does. The versions
    of weights are not part of a trace.

    Raises `TrajectoryError`, which names the node and the field, `RolloutsError`, and the `MediaError` of an
    medium that cannot be read.
    """
    record = trace if isinstance(trace, Mapping) else trace.model_dump(mode="python")
    nodes = record.get("nodes")
    if not isinstance(nodes, list | tuple) or not isinstance(record.get("id"), str):
        raise TrajectoryError("this is not a trace of verifiers, which has an id and a list of nodes")
    for index, node in enumerate(nodes):
        if not isinstance(node, Mapping) or not isinstance(node.get("message"), Mapping):
            raise TrajectoryError(f"trace {record['id']:.80}: nodes[{index}]: not a node with a message")
    trajectory = Trajectory(record["id"], _task_index(record), group_id)
    reader = _TraceReader(record, processors)
    calls = {call["node"]: call for call in record.get("calls") or () if call.get("node") is not None}
    for index, node in enumerate(nodes):
        if node.get("sampled") and any(node.get("mask") or ()):
            reader.add_turn(trajectory, index, calls.get(index, {}))
    if not trajectory.turns and any(node.get("sampled") for node in nodes):
        raise TrajectoryError(
            f"trace {record['id']:.80}: nodes: no sampled token; a client that returns token ids must record the trace"
        )
    record_outcome(trajectory, record)
    return trajectory


def record_outcome(trajectory: Trajectory, trace: Any) -> None:
    """Record what verifiers' scoring and stages said of a rollout: a trace, or its dict.

    The sum of the weighted rewards is recorded on the last turn, whose info has `rewards` (each with score and weight),
    `stop_condition`, `agent` and `task`.
    """
    record = trace if isinstance(trace, Mapping) else trace.model_dump(mode="json", include=_OUTCOME)
    rewards = {name: reward for name, reward in (record.get("rewards") or {}).items() if reward is not None}
    agent, task = record.get("agent") or {}, record.get("task") or {}
    info = {
        "rewards": {name: {"score": each["score"], "weight": each["weight"]} for name, each in rewards.items()},
        "stop_condition": record.get("stop_condition"),
        "agent": {"name": agent.get("name"), "trainable": agent.get("trainable", True)},
        "task": {"index": (task.get("data") or {}).get("idx"), "key": task.get("key")},
    }
    if trajectory.turns:
        trajectory.record_reward(sum(each["score"] * each["weight"] for each in rewards.values()), info)
    values = {name: finite_number(value) for name, value in (record.get("metrics") or {}).items()}
    trajectory.metrics |= {name: value for name, value in values.items() if value is not None}
    errors = record.get("errors") or ()
    if not record.get("ok"):
        trajectory.error = f"{errors[-1]['type']}: {errors[-1]['message']}" if errors else "the rollout did not end"
    answered = [call for call in record.get("calls") or () if not call.get("error")]
    cut_off = bool(answered) and answered[-1].get("finish_reason") == "length"
    trajectory.truncated = record.get("stop_condition") in _LIMITS or cut_off
    trajectory.done = bool(record.get("ok")) and not trajectory.truncated
    timing = record.get("timing") or {}
    trajectory.started_at = finite_number(timing.get("start")) or 0.0
    ends = [finite_number((timing.get(stage) or {}).get("end")) or 0.0 for stage in ("agent", "finalize", "scoring")]
    trajectory.seconds = max(max(ends) - trajectory.started_at, 0.0)


def _task_index(record: Mapping[str, Any]) -> int:
    return whole_number(((record.get("task") or {}).get("data") or {}).get("idx")) or 0


class _TraceReader:
    """Reads the turns of one trace."""

    def __init__(self, record: Mapping[str, Any], processors: Processors | None) -> None:
        self._trace: str = record["id"]
        self._nodes: Sequence[Mapping[str, Any]] = record["nodes"]
        self._processors = processors
        token_types = {int(token): kind for token, kind in (record.get("mm_token_type_id_map") or {}).items()}
        self._placeholder_ids = np.array(list(token_types), np.int64)
        self._media: dict[int, list[tuple[MediaItem, PlaceholderRange]]] = {}

    def add_turn(self, trajectory: Trajectory, index: int, call: Mapping[str, Any]) -> None:
        path = self._path(index)
        ids = [self._row(each, "token_ids", np.int64) for each in path]
        mask = self._row(index, "mask", np.bool_)
        if mask.shape != ids[-1].shape or not mask[int(mask.argmax()) :].all():
            raise self._error(index, "mask", "the sampled tokens are not the last of the node")
        first_sampled = int(mask.argmax())
        completion = Completion(
            index=0,
            token_ids=ids[-1][first_sampled:],
            logprobs=self._row(index, "logprobs", np.float32),
            finish_reason=FinishReason.LENGTH if call.get("finish_reason") == "length" else FinishReason.STOP,
            routed_experts=self._routed_experts(path),
            sampling_masks=self._sampling_masks(index),
        )
        has_advantages = self._nodes[index].get("advantages") is not None
        extras = {"advantages": self._row(index, "advantages", np.float32)} if has_advantages else {}
        ids[-1] = ids[-1][:first_sampled]
        prompt, messages = self._prompt(path, ids)
        time = call.get("time") or {}
        try:
            trajectory.add_turn(
                prompt,
                completion,
                _wire_message(self._nodes[index]["message"]),
                messages=messages,
                extras=extras,
                seconds=max((time.get("end") or 0.0) - (time.get("start") or 0.0), 0.0),
            )
        except InvalidTurnError as error:
            raise self._error(index, "tokens", str(error)) from error

    def _path(self, index: int) -> list[int]:
        path = [index]
        while (parent := self._nodes[path[-1]].get("parent")) is not None:
            if whole_number(parent) is None or not 0 <= parent < path[-1]:
                raise self._error(path[-1], "parent", f"{short_repr(parent)} is no node before it")
            path.append(parent)
        return path[::-1]

    def _row(self, index: int, field: str, dtype: npt.DTypeLike) -> np.ndarray:
        """A list of numbers of a node, empty where it has none."""
        try:
            row = np.asarray(self._nodes[index].get(field) or (), dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise self._error(index, field, str(error)) from error
        if row.ndim != 1:
            raise self._error(index, field, "not a list of numbers")
        return row

    def _prompt(self, path: Sequence[int], ids: Sequence[np.ndarray]) -> tuple[RenderedTokens, list[Message]]:
        """The prompt whose last piece is the generation prompt of node `path[-1]`, and its messages."""
        starts = np.cumsum([0, *map(len, ids)]).tolist()
        token_ids = np.concatenate(ids).tolist()
        media = MultiModalData.from_items(
            (item, placeholder.shifted(start))
            for start, each in zip(starts, path[:-1], strict=False)
            for item, placeholder in self._node_media(each)
        )
        content = [self._nodes[each].get("is_content") or () for each in path[:-1]]
        if any(len(mask) != len(each) for mask, each in zip(content, ids, strict=False)):
            return RenderedTokens(token_ids, multi_modal_data=media), []  # recorded without attribution
        messages = [_wire_message(self._nodes[each]["message"]) for each in path[:-1]]
        owners = [index for index, each in enumerate(ids[:-1]) for _ in each] + [-1] * len(ids[-1])
        is_content = [bool(value) for mask in content for value in mask] + [False] * len(ids[-1])
        roles = [str(message["role"]) for message in messages]
        prompt = RenderedTokens(token_ids, (), roles, media, message_indices=owners, is_content=is_content)
        return prompt, messages

    def _node_media(self, index: int) -> list[tuple[MediaItem, PlaceholderRange]]:
        """The media of a message with their placeholders, counted from the first token of its node."""
        if index not in self._media:
            self._media[index] = list(self._find_media(index))
        return self._media[index]

    def _find_media(self, index: int) -> Iterator[tuple[MediaItem, PlaceholderRange]]:
        is_placeholder = np.isin(self._row(index, "token_ids", np.int64), self._placeholder_ids)
        position = 0
        for number, part in media_parts(self._nodes[index]["message"]):
            modality = cast("Modality", part_kind(part))
            processor = processor_for(self._processors, modality)
            item = processor.process(load_source(part, processor.policy, processor.store))
            found = np.flatnonzero(is_placeholder[position:])
            start = position + int(found[0]) if len(found) else len(is_placeholder)
            position = start + item.num_tokens
            if item.expansion is not None or is_placeholder[start:position].sum() != item.num_tokens:
                raise self._error(
                    index,
                    f"message.content[{number}]",
                    f"the {modality} has {item.num_tokens} placeholder tokens with these processors, which the node "
                    "does not have in a row; pass the processors of the model that the trace was sampled from",
                )
            yield item, PlaceholderRange(start, item.num_tokens)

    def _routed_experts(self, path: Sequence[int]) -> np.ndarray | None:
        rows = [_array(self._nodes[each].get("routed_experts")) for each in path if self._nodes[each].get("token_ids")]
        if any(each is None for each in rows):
            return None
        # The last row is that of no forward pass.
        return np.concatenate(cast("list[np.ndarray]", rows))[:-1]

    def _sampling_masks(self, index: int) -> tuple[np.ndarray, ...] | None:
        mask = self._nodes[index].get("sampling_mask")
        if mask is None:
            return None
        ids, counts = _array(mask["ids"]), _array(mask["counts"])
        if ids is None or counts is None:
            return None
        return tuple(np.split(ids, np.cumsum(counts)[:-1]))

    def _error(self, index: int, field: str, reason: str) -> TrajectoryError:
        return TrajectoryError(f"trace {self._trace:.80}: nodes[{index}].{field}: {reason}")


def _array(value: Any) -> np.ndarray | None:
    """An array, also as verifiers writes it: a dict of dtype, shape and the bytes."""
    if isinstance(value, Mapping):
        return np.frombuffer(value["data"], np.dtype(value["dtype"])).reshape(value["shape"])
    return cast("np.ndarray | None", value)


def _wire_message(message: Mapping[str, Any]) -> Message:
    """A message of a trace in the form of OpenAI's API."""
    wire = {name: value for name, value in message.items() if value is not None and name != "tool_calls"}
    wire.setdefault("content", "")
    if calls := message.get("tool_calls"):
        wire["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in calls
        ]
    return cast("Message", wire)
