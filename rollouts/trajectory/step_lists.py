"""Conversion of step lists of other libraries, in which each step holds its whole prompt, to a trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, get_args

import numpy as np

from renderers import (
    MediaItem,
    MediaSource,
    Message,
    MultiModalData,
    PlaceholderRange,
    ProcessorOutput,
    RenderedTokens,
)
from renderers.messages import Modality
from renderers.vision.processor import MediaProcessor
from rollouts.engines.protocol import Completion, FinishReason
from rollouts.errors import InvalidStepError, InvalidTurnError, TrajectoryError, short_repr
from rollouts.trajectory.packed_episodes import PackedItem, Processors
from rollouts.trajectory.token_node import processor_for, token_array
from rollouts.trajectory.tree import Trajectory
from rollouts.values import finite_number
from transport import DecodeError, EncodeError, StepMediaError, decode, encode, restore_multi_modal_data

_FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}
# A log-probability is at most 0; rounding in half precision may exceed that by this much.
_LOGPROB_ROUNDING = 1e-2


def trajectory_from_steps(
    steps: Sequence[Any],
    *,
    episode_id: str,
    seed: int = 0,
    group_id: str = "",
    reward: float | None = None,
) -> Trajectory:
    """The episode that a list of steps describes, not finished yet.

    A step is a dict, or an object with attributes, of the form that verifiers and prime-rl use:

        tokens           prompt_ids and completion_ids, ints; completion_logprobs, one a completion token;
                         prompt_mask and completion_mask, 0 or 1 a token, if they are there; multi_modal_data, all that
                         the prompt shows; routed_experts, (prompt + completion - 1, layers, experts), or None
        completion       messages, of which the first of role "assistant" is kept; else that of response.message
        reward           a number or None
        is_truncated     bool; with response.message.finish_reason it says how the completion ended
        advantage, trajectory_id, extras       kept in the turn's `info`

    A step whose prompt extends an earlier step, token by token and image by image, follows it in the tree; others fork,
    so steps of several agents may be interleaved. Media that `drop_intermediate_multi_modal_data` removed are restored.
    `multi_modal_data` are `MultiModalData`, or a dict of the three columns whose items are dicts of arrays as the model
    takes them (no uint8 pixels); these arrays become the source of the image, which `step_processors` reads. The
    messages of a prompt are not kept: steps do not say which tokens belong to which message. `reward` is the reward of
    the whole episode, for steps without rewards; it is recorded on the last turn.

    Raises `InvalidStepError`, which names the step and the field, and `TrajectoryError` if `steps` are not a list.
    """
    if not isinstance(steps, list | tuple):
        raise TrajectoryError(f"steps are a {type(steps).__name__}; pass a list of steps")
    for number, step in enumerate(steps):
        _checked_tokens(number, step)
    trajectory = Trajectory(episode_id, seed, group_id)
    try:
        restored = restore_multi_modal_data(steps)
    except StepMediaError as error:
        raise InvalidStepError(error.step, "tokens.multi_modal_data", str(error)) from error
    for number, step in enumerate(restored):
        _add_step(trajectory, number, step)
    if reward is not None:
        own = [number for number, step in enumerate(steps) if _get(step, "reward") is not None]
        if own:
            raise InvalidStepError(own[0], "reward", "the episode's reward is given, too; pass one of them")
        if not steps:
            raise TrajectoryError(
                f"episode {episode_id} has no steps and a reward of {short_repr(reward)}; rewards belong to turns"
            )
        trajectory.record_reward(_number(len(steps) - 1, "reward", reward), trajectory.turns[-1].info)
    return trajectory


def step_processors(own: Processors | None = None) -> Processors:
    """Processors for `samples_from_trajectory` that return the pixels and features which steps held as arrays.

    These are not checked: the file that they were made from is unknown. `own`, a renderer's processors, process
    the media of other sources.
    """
    return {modality: cast("MediaProcessor", _StepProcessor(modality, own)) for modality in get_args(Modality)}


@dataclass(frozen=True, slots=True)
class _StepProcessor:
    """The two methods of a processor that samples use."""

    modality: Modality
    own: Processors | None
    items: dict[str, MediaItem] = field(default_factory=dict)

    def mm_hash(self, source: MediaSource) -> str:
        return self.process(source).mm_hash

    def process(self, source: MediaSource) -> MediaItem:
        if source.digest not in self.items:
            packed = _packed_item(source)
            if packed is None:
                return processor_for(self.own, self.modality).process(source)
            self.items[source.digest] = _item(packed, source)
        return self.items[source.digest]


def is_step_source(source: MediaSource) -> bool:
    """Whether the source holds the arrays of a step, not a medium as a file."""
    return _packed_item(source) is not None


def _packed_item(source: MediaSource) -> PackedItem | None:
    """The item in a source made from a step's arrays; None for any other source."""
    try:
        packed = decode(source.data)
    except DecodeError:  # the file of a medium
        return None
    return packed if isinstance(packed, PackedItem) else None


def _item(packed: PackedItem, source: MediaSource) -> MediaItem:
    return MediaItem(packed.modality, packed.mm_hash, source, packed.item().tensors, packed.num_tokens, packed.scale)


def _add_step(trajectory: Trajectory, number: int, step: Any) -> None:
    tokens, prompt_ids, completion_ids = _checked_tokens(number, step)
    _check_mask(number, tokens, "completion_mask", len(completion_ids))
    completion = Completion(
        index=0,
        token_ids=completion_ids,
        logprobs=_logprobs(number, tokens, len(completion_ids)),
        finish_reason=_finish_reason(number, step),
        routed_experts=_experts(number, tokens),
    )
    prompt = RenderedTokens(prompt_ids.tolist(), multi_modal_data=_media(number, _get(tokens, "multi_modal_data")))
    try:
        leaf = trajectory.add_turn(prompt, completion, _message(number, step))
    except InvalidTurnError as error:
        raise InvalidStepError(number, "tokens", str(error)) from error
    _check_prompt_mask(number, tokens, trajectory, leaf, len(prompt_ids))
    reward = _get(step, "reward")
    trajectory.record_reward(0.0 if reward is None else _number(number, "reward", reward), _info(number, step))


def _checked_tokens(number: int, step: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    """The `tokens` of a step, its prompt ids and its completion ids."""
    tokens = _get(step, "tokens")
    if tokens is None:
        raise InvalidStepError(
            number, "tokens", "the step has none, as where its prompt was too long or its call failed; leave it out"
        )
    return tokens, _ids(number, tokens, "prompt_ids"), _ids(number, tokens, "completion_ids")


def _check_prompt_mask(number: int, tokens: Any, trajectory: Trajectory, leaf: int, count: int) -> None:
    """A prompt mask may be 1 only on tokens that earlier completions sampled."""
    mask = _check_mask(number, tokens, "prompt_mask", count, ones=False)
    if mask is None or not mask.any():
        return
    sampled = np.concatenate([trajectory.nodes[index].sampled for index in trajectory.path(leaf)])[:count]
    wrong = np.flatnonzero(mask & ~sampled)
    if len(wrong):
        raise InvalidStepError(
            number,
            f"tokens.prompt_mask[{wrong[0]}]",
            "is 1, and no step before sampled that token where this prompt has it: its log-probability is not known",
        )


def _ids(number: int, tokens: Any, name: str) -> np.ndarray:
    place = f"tokens.{name}"
    values = _get(tokens, name)
    if values is None or isinstance(values, str | bytes | Mapping):
        raise InvalidStepError(number, place, f"{type(values).__name__} where token ids belong; pass a list of ints")
    try:
        ids = token_array(values, place)
    except (InvalidTurnError, TypeError, ValueError, OverflowError) as error:
        raise InvalidStepError(number, place, str(error)) from error
    if not len(ids):
        raise InvalidStepError(number, place, "no tokens; leave a step without a prompt or a completion out")
    return ids


def _check_mask(number: int, tokens: Any, name: str, count: int, *, ones: bool = True) -> np.ndarray | None:
    """A mask as bool (count,), None if there is none. With `ones` nothing in it may be 0."""
    values = _get(tokens, name)
    if values is None:
        return None
    place = f"tokens.{name}"
    mask = _array(number, place, values)
    if mask.shape != (count,) or not np.isin(mask, (0, 1)).all():
        raise InvalidStepError(number, place, f"{mask.shape} values where {count} of 0 and 1 belong, one a token")
    if ones and not mask.all():
        at = int(np.flatnonzero(mask == 0)[0])
        raise InvalidStepError(
            number,
            f"{place}[{at}]",
            "is 0: a completion holds what was sampled and nothing else; put the rest into the next step's prompt_ids",
        )
    return mask.astype(bool)


def _logprobs(number: int, tokens: Any, count: int) -> np.ndarray:
    place = "tokens.completion_logprobs"
    values = _get(tokens, "completion_logprobs")
    if values is None:
        raise InvalidStepError(number, place, "missing; have the engine return one for every sampled token")
    logprobs = _array(number, place, values)
    if logprobs.shape != (count,) or logprobs.dtype.kind not in "fiu":
        raise InvalidStepError(
            number, place, f"{logprobs.dtype} {logprobs.shape} for {count} completion tokens; pass one number for each"
        )
    wrong = np.flatnonzero(~np.isfinite(logprobs) | (logprobs > _LOGPROB_ROUNDING))
    if len(wrong):
        value = logprobs[wrong[0]]
        raise InvalidStepError(number, f"{place}[{wrong[0]}]", f"{value} is not the log of a probability")
    return logprobs.astype(np.float32)


def _experts(number: int, tokens: Any) -> np.ndarray | None:
    values = _get(tokens, "routed_experts")
    if values is None:
        return None
    experts = _array(number, "tokens.routed_experts", values)
    if experts.dtype.kind not in "iu":
        raise InvalidStepError(
            number, "tokens.routed_experts", f"{experts.dtype} where expert numbers belong; decode them to an array"
        )
    return experts


def _array(number: int, place: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except (TypeError, ValueError) as error:  # rows of different lengths
        raise InvalidStepError(number, place, f"no array of numbers: {error}") from error


def _number(number: int, place: str, value: Any) -> float:
    if (finite := finite_number(value)) is None:
        raise InvalidStepError(number, place, f"{short_repr(value)} is not a finite number")
    return finite


def _finish_reason(number: int, step: Any) -> FinishReason:
    reason = _get(_get(_get(step, "response"), "message"), "finish_reason")
    if reason is None:
        truncated = _get(step, "is_truncated") or _get(_get(step, "tokens"), "is_truncated")
        return FinishReason.LENGTH if truncated else FinishReason.STOP
    if reason not in _FINISH_REASONS:
        known = ", ".join(_FINISH_REASONS)
        raise InvalidStepError(number, "response.message.finish_reason", f"{short_repr(reason)} is none of {known}")
    return _FINISH_REASONS[reason]


def _message(number: int, step: Any) -> Message:
    completion = _get(step, "completion")
    if isinstance(completion, str):
        return {"role": "assistant", "content": completion}
    messages = completion if isinstance(completion, list | tuple) else []
    response = _get(_get(step, "response"), "message")
    message = next((each for each in messages if _get(each, "role") == "assistant"), response)
    if hasattr(message, "model_dump"):
        message = message.model_dump(exclude_none=True)
    if not isinstance(message, Mapping):
        return {"role": "assistant", "content": _get(message, "content") or ""}
    fields = {key: value for key, value in message.items() if key != "tokens"}
    return cast("Message", {"role": "assistant", "content": "", **fields})


def _info(number: int, step: Any) -> dict[str, Any]:
    """The values of a step for which a turn has no field."""
    extras = _get(step, "extras")
    if extras is not None and not isinstance(extras, Mapping):
        raise InvalidStepError(number, "extras", f"{type(extras).__name__} where a dict belongs")
    info = dict(extras or {})
    for name in ("advantage", "trajectory_id"):
        if (value := _get(step, name)) is not None:
            info[name] = value
    try:
        encode(info)
    except EncodeError as error:
        raise InvalidStepError(number, "extras", f"cannot be stored: {error}") from error
    return info


def _media(number: int, data: Any) -> MultiModalData | None:
    """The media of a prompt; `restore_multi_modal_data` has checked that the columns are parallel."""
    if data is None:
        return None
    placed = []
    for modality, ranges in (_get(data, "mm_placeholders") or {}).items():
        names, items = (_column(number, data, column, modality) for column in ("mm_hashes", "mm_items"))
        for row, (name, where, item) in enumerate(zip(names, ranges, items, strict=True)):
            placed.append(_placed(number, modality, row, name, where, item))
    return MultiModalData.from_items(placed)


def _column(number: int, data: Any, column: str, modality: str) -> Sequence[Any]:
    found = (_get(data, column) or {}).get(modality)
    if found is None:
        raise InvalidStepError(number, f"tokens.multi_modal_data.{column}", f"no {modality}s, which have placeholders")
    return cast("Sequence[Any]", found)


def _placed(
    number: int, modality: str, row: int, name: Any, where: Any, item: Any
) -> tuple[MediaItem, PlaceholderRange]:
    place = f"tokens.multi_modal_data.mm_items[{modality!r}][{row}]"
    if isinstance(item, ProcessorOutput):
        item = item.item
    if modality not in get_args(Modality):
        raise InvalidStepError(number, place, f"of a modality that is none of {', '.join(get_args(Modality))}")
    if not isinstance(name, str) or not name:
        raise InvalidStepError(number, place, f"named {short_repr(name)} in mm_hashes; pass the digest of its pixels")
    if isinstance(item, MediaItem) and item.mm_hash != name:
        raise InvalidStepError(number, place, f"is {item.mm_hash} and mm_hashes calls it {name}")
    span = where if isinstance(where, PlaceholderRange) else _range(number, place, where)
    if isinstance(item, MediaItem):
        return item, span
    if not isinstance(item, Mapping) or not item:
        raise InvalidStepError(
            number, place, f"{type(item).__name__} where a dict of arrays belongs; steps must carry the pixels"
        )
    tensors: dict[str, Any] = {key: _tensor(number, f"{place}[{key!r}]", value) for key, value in item.items()}
    packed = PackedItem(cast("Modality", modality), name, "", tensors, span.num_embeds, None, {}, None)
    return _item(packed, MediaSource.of(encode(packed))), span


def _range(number: int, place: str, where: Any) -> PlaceholderRange:
    offset, length = _get(where, "offset"), _get(where, "length")
    for key in ("is_embed", "embed_runs"):
        if _get(where, key) is not None:
            raise InvalidStepError(number, place, f"its placeholder has {key}; pass a PlaceholderRange with embed_runs")
    return PlaceholderRange(int(offset), int(length))


def _tensor(number: int, place: str, value: Any) -> np.ndarray:
    # A torch tensor says by itself what numpy has no form for.
    try:
        array = value if isinstance(value, np.ndarray) else value.detach().cpu().numpy()
    except (AttributeError, TypeError) as error:
        raise InvalidStepError(
            number, place, f"{type(value).__name__} where an array belongs: {error}; walk_decode_tensors reads payloads"
        ) from error
    if array.dtype == np.uint8:
        raise InvalidStepError(
            number,
            place,
            "uint8 pixels without what normalises them; pass floats as the model takes them, or MediaItems",
        )
    return np.ascontiguousarray(array)


def _get(container: Any, name: str) -> Any:
    """A value of a dict or an object; None where it is not there."""
    return container.get(name) if isinstance(container, Mapping) else getattr(container, name, None)
