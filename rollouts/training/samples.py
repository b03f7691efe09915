"""Training samples, and how they are made from trajectories and rendered conversations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np

from renderers import MediaItem, PlaceholderRange, RenderedTokens, RenderedTrainingSample
from renderers.messages import Modality
from renderers.placement import item_placement_error
from renderers.vision.processor import MediaProcessor
from rollouts.engines.protocol import TopLogprobs, WeightSpan, weight_span_error
from rollouts.errors import ArgumentError, SampleError, TrajectoryError
from rollouts.scoring import TokenScores
from rollouts.trajectory.token_node import (
    ROUTED_EXPERTS,
    TEACHER_COLUMNS,
    TokenNode,
)
from rollouts.trajectory.tree import Trajectory
from rollouts.values import check_choice, finite_number
from transport import wire_type

SharedNodes = Literal["first_leaf", "weighted", "each"]

#: One number for an episode; or for each turn a number, or an array with one number for each token that it sampled.
Advantage = float | Sequence[float | np.ndarray] | np.ndarray


@wire_type("rollouts.TrainingSample")
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TrainingSample:
    """A row of n tokens.

    `token_ids` int32 (n,); `loss_mask` bool (n,), True where log p(token | earlier tokens) is trained; `logprobs`
    float32 (n,), the sampler's, 0 outside the mask; `advantages` float32 (n,); `media`, the items with the ranges
    of their placeholder tokens. `weight_spans` count trained tokens: 0 is the first token of the mask. `name`
    identifies the row in errors. `routed_experts`, integers (n, layers, experts a token), are those of the sampler's
    pass that predicted each token, the first row without meaning; None where the engine did not report them. They
    change no loss: `diagnose_mismatch` reads them. `top_logprobs` (n, k) are the likeliest tokens of the sampler in the
    place of each token, with -1 and NaN where none were recorded, as in prompts; None where none were at all.

    A teacher's columns (`rollouts.training.score`), each None where there was no teacher: `teacher_logprobs`
    float32 (n,), finite on trained tokens; `teacher_top_ids` int32 and `teacher_top_logprobs` float32 (n, k),
    the likeliest tokens in the place of each. `with_teacher` adds them.

    Raises `SampleError` for token ids that are no int32 from 0, and for dtypes, lengths, log-probabilities, advantages,
    spans, ranges, experts and likeliest tokens that contradict each other.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    media: tuple[tuple[MediaItem, PlaceholderRange], ...] = ()
    weight_spans: tuple[WeightSpan, ...] = ()
    name: str = ""
    routed_experts: np.ndarray | None = None
    teacher_logprobs: np.ndarray | None = None
    teacher_top_ids: np.ndarray | None = None
    teacher_top_logprobs: np.ndarray | None = None
    top_logprobs: TopLogprobs | None = None

    def __post_init__(self) -> None:
        for column, (kinds, dtype) in _COLUMNS.items():
            values = getattr(self, column)
            if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in kinds:
                raise SampleError(self.name, f"{column} is {_kind(values)}; pass one row of {dtype}")
        count = len(self.token_ids)
        for column in ("loss_mask", "logprobs", "advantages"):
            length = len(getattr(self, column))
            if length != count:
                raise SampleError(self.name, f"{column} has {length} values for {count} tokens")
        wrong_ids = np.flatnonzero((self.token_ids < 0) | (self.token_ids > _LARGEST_ID))
        if len(wrong_ids):
            raise SampleError(
                self.name,
                f"token {wrong_ids[0]} has id {self.token_ids[wrong_ids[0]]}; token ids are from 0 to {_LARGEST_ID}. "
                "Take the ids of the tokenizer; a value that marks ignored tokens, such as -100, belongs in no sample",
            )
        if count and self.loss_mask[0]:
            raise SampleError(self.name, "the first token is trained, but no token before it predicts it")
        for values, kind, cure in (
            (self.logprobs, "log-probability", "take the sampler's, or set loss_mask to False there"),
            (self.advantages, "advantage", "leave the episode out, or compute the advantages from finite rewards"),
        ):
            if len(wrong := np.flatnonzero(self.loss_mask & ~np.isfinite(values))):
                reason = f"token {wrong[0]} is trained and its {kind} {values[wrong[0]]} is not a finite number"
                raise SampleError(self.name, f"{reason}; {cure}")
        if (error := item_placement_error(self.media, count)) is not None:
            raise SampleError(self.name, error)
        trained = int(np.count_nonzero(self.loss_mask))
        if (error := weight_span_error(self.weight_spans, trained)) is not None:
            raise SampleError(self.name, f"{error}; spans count the {trained} trained tokens of the sample")
        experts = self.routed_experts
        is_array = isinstance(experts, np.ndarray) and experts.dtype.kind in "iu" and experts.ndim == 3
        if experts is not None and not (is_array and len(experts) == count):
            rule = f"pass integers ({count}, layers, experts a token), or None"
            raise SampleError(self.name, f"routed_experts is {_kind(experts)}; {rule}")
        if self.top_logprobs is not None and not _are_likeliest(self.top_logprobs, count):
            rule = f"pass a TopLogprobs of integers and floats, both ({count}, k), or None"
            raise SampleError(self.name, f"top_logprobs has other types or shapes; {rule}")
        if any(getattr(self, name) is not None for name in TEACHER_COLUMNS):
            self._check_teacher(count)

    def _check_teacher(self, count: int) -> None:
        logprobs, ids, top = self.teacher_logprobs, self.teacher_top_ids, self.teacher_top_logprobs
        if not isinstance(logprobs, np.ndarray) or logprobs.dtype.kind != "f" or logprobs.shape != (count,):
            raise SampleError(self.name, f"teacher_logprobs is {_kind(logprobs)}; pass float32 ({count},)")
        if len(wrong := np.flatnonzero(self.loss_mask & ~np.isfinite(logprobs))):
            reason = f"token {wrong[0]} is trained and its log-probability under the teacher is {logprobs[wrong[0]]}"
            raise SampleError(self.name, f"{reason}; score the sample again")
        if ids is None and top is None:
            return
        if ids is None or top is None or not _are_likeliest(TopLogprobs(ids, top), count):
            reason = f"teacher_top_ids is {_kind(ids)} and teacher_top_logprobs {_kind(top)}"
            raise SampleError(self.name, f"{reason}; pass int32 and float32, both ({count}, k)")
        trained = ids[self.loss_mask]
        if trained.size and (trained.min() < 0 or np.isnan(top[self.loss_mask]).any()):
            raise SampleError(self.name, "a trained token lacks the teacher's likeliest tokens; score the sample again")

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        tokens, trained, media = len(self.token_ids), np.count_nonzero(self.loss_mask), len(self.media)
        return f"<TrainingSample {self.name:.80}: {tokens} tokens, {trained} trained, {media} media>"


#: The dtypes of the columns: what numpy calls their kinds, and the name for errors.
_COLUMNS: Mapping[str, tuple[str, str]] = {
    "token_ids": ("iu", "integers (int32)"),
    "loss_mask": ("b", "bool"),
    "logprobs": ("f", "floats (float32)"),
    "advantages": ("f", "floats (float32)"),
}

#: The columns that a sample may lack, arrays with one row for each token; `top_logprobs` is a pair of such arrays.
OPTIONAL_COLUMNS = (ROUTED_EXPERTS, *TEACHER_COLUMNS)

_LARGEST_ID = int(np.iinfo(np.int32).max)


def _kind(value: object) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


def _are_likeliest(top: TopLogprobs, count: int) -> bool:
    return (
        isinstance(top, TopLogprobs)
        and all(isinstance(each, np.ndarray) and each.ndim == 2 and len(each) == count for each in top)
        and top.token_ids.dtype.kind in "iu"
        and top.logprobs.dtype.kind == "f"
        and top.token_ids.shape == top.logprobs.shape
    )


def sample_from_rendered(
    rendered: RenderedTokens | RenderedTrainingSample,
    *,
    trained_messages: Collection[int] | None = None,
    name: str = "",
) -> TrainingSample:
    """A supervised sample of a rendered conversation, with advantages of 1.

    Of `RenderedTokens` it trains the tokens that the model would sample, of a `RenderedTrainingSample`
    (`build_training_samples`) those of its `loss_mask`; if given, only tokens of `trained_messages`.
    """
    if isinstance(rendered, RenderedTrainingSample):
        loss_mask = np.array(rendered.loss_mask, dtype=bool)
        rendered = rendered.rendered
    else:
        loss_mask = np.array(rendered.sampled_mask, dtype=bool)
    if trained_messages is not None:
        loss_mask &= np.isin(rendered.message_indices, list(trained_messages))
    media = rendered.multi_modal_data.items_with_ranges() if rendered.multi_modal_data is not None else []
    for _, placeholder in media:  # placeholder tokens are not predicted, even in an assistant turn
        loss_mask[placeholder.offset : placeholder.end] = False
    return TrainingSample(
        token_ids=np.array(rendered.token_ids, dtype=np.int32),
        loss_mask=loss_mask,
        logprobs=np.zeros(len(rendered), dtype=np.float32),
        advantages=np.ones(len(rendered), dtype=np.float32),
        media=tuple(media),
        name=name,
    )


def samples_from_trajectory(
    trajectory: Trajectory,
    *,
    advantage: Advantage,
    processors: Mapping[Modality, MediaProcessor],
    shared: SharedNodes = "first_leaf",
    agents: Collection[str] | None = None,
) -> list[TrainingSample]:
    """One sample per leaf of the tree.

    `advantage` is one finite number for all trained tokens; or a list with one entry for each turn: a finite
    number, or an array (n,) with one for each of the n tokens that the turn sampled.

    `shared` says how a node that k leaves share is trained: "first_leaf", in the first of their samples only;
    "weighted", in each of them with its advantage divided by k, so that the policy gradients sum to the
    gradient of the node once; "each", in each of them, so that it counts k times.

    With `agents`, only turns of these agents are trained ("" is the one that plays the environment), and leaves without
    such a turn have no sample. For other advantages for each agent, pass a list made from the `agent` of each turn.

    `processors` (a renderer's, by modality) compute the pixels again from the sources; raises `PixelMismatchError` if
    they differ from the pixels that the sampler saw. Raises `ArgumentError` for another advantage, `shared` or
    `agents`, and `TrajectoryError` for routed experts whose numbers of layers or dtypes differ along a path, and for an
    episode of a chat endpoint, of which no tokens are known.
    """
    if not trajectory.has_tokens:
        raise TrajectoryError(
            f"episode {trajectory.episode_id}: its engine gave messages without tokens, and nothing can be trained on "
            "them; sample with an engine of tokens, such as VLLMEngine or LocalEngine"
        )
    if isinstance(agents, str) or (agents is not None and not isinstance(agents, Collection)):
        raise ArgumentError("agents", agents, "pass a collection of names, or None for all agents")
    others = {turn.node for turn in trajectory.turns if agents is not None and turn.agent not in agents}
    check_choice("shared", shared, SharedNodes)
    advantages = _node_advantages(trajectory, advantage)
    paths = {leaf: trajectory.path(leaf) for leaf in trajectory.leaves()}
    num_leaves = Counter(node for path in paths.values() for node in path)
    trained_nodes: set[int] = set()
    samples = []
    for leaf, path in paths.items():
        trained = [
            index for index in path if index not in others and (shared != "first_leaf" or index not in trained_nodes)
        ]
        if others and not any(len(trajectory.nodes[index].logprobs) for index in trained):
            continue
        share = {index: 1 / num_leaves[index] if shared == "weighted" else 1.0 for index in trained}
        media = tuple((reference.derive(processors), reference.placeholder) for reference in trajectory.media(leaf))
        columns = _columns(trajectory, path, {index: advantages[index] * share[index] for index in trained})
        samples.append(
            TrainingSample(
                **columns,
                media=media,
                weight_spans=_trained_spans([trajectory.nodes[index] for index in trained]),
                name=f"{trajectory.episode_id}/{leaf}",
                routed_experts=_routed_experts(trajectory, leaf, path),
                **_teacher_columns(trajectory, leaf, path),
                top_logprobs=trajectory.top_logprobs(leaf),
            )
        )
        trained_nodes.update(path)
    return samples


def _columns(
    trajectory: Trajectory, path: Sequence[int], advantages: Mapping[int, float | np.ndarray]
) -> dict[str, np.ndarray]:
    """The columns of the sample of a path, of which the nodes in `advantages` are trained."""
    nodes = [(trajectory.nodes[index], index in advantages) for index in path]
    token_ids = trajectory.token_ids(path[-1])
    loss_mask = np.concatenate([node.sampled & is_trained for node, is_trained in nodes])
    columns = {"logprobs": np.zeros(len(token_ids), np.float32), "advantages": np.zeros(len(token_ids), np.float32)}
    if advantages:
        columns["logprobs"][loss_mask] = np.concatenate([trajectory.nodes[index].logprobs for index in advantages])
        columns["advantages"][loss_mask] = np.concatenate(
            [np.broadcast_to(value, len(trajectory.nodes[index].logprobs)) for index, value in advantages.items()]
        )
    return {"token_ids": token_ids, "loss_mask": loss_mask, **columns}


def _routed_experts(trajectory: Trajectory, leaf: int, path: Sequence[int]) -> np.ndarray | None:
    """The experts of the tokens of a path; None unless those of every token were reported."""
    if any(ROUTED_EXPERTS not in trajectory.nodes[index].extras for index in path):
        return None
    return trajectory.extra(leaf, ROUTED_EXPERTS)  # noqa: S610 - the rule is about Django's querysets


def _teacher_columns(trajectory: Trajectory, leaf: int, path: Sequence[int]) -> dict[str, np.ndarray]:
    """The columns of a teacher that every node of a path has."""
    return {
        name: trajectory.extra(leaf, name)  # noqa: S610 - the rule is about Django's querysets
        for name in TEACHER_COLUMNS
        if all(name in trajectory.nodes[index].extras for index in path)
    }


def _trained_spans(nodes: Sequence[TokenNode]) -> tuple[WeightSpan, ...]:
    """The spans of the trained nodes of a path; they count the trained tokens of the path."""
    spans: list[WeightSpan] = []
    offset = 0
    for node in nodes:
        spans += [WeightSpan(span.version, span.start + offset, span.end + offset) for span in node.weight_spans]
        offset += len(node.logprobs)
    return tuple(spans)


def _node_advantages(trajectory: Trajectory, advantage: Advantage) -> Mapping[int, float | np.ndarray]:
    """The advantage of the sampled tokens of each node: one number, or an array with one number for each."""
    if (number := finite_number(advantage)) is not None:
        return dict.fromkeys(range(len(trajectory.nodes)), number)
    turns = trajectory.turns
    is_list = isinstance(advantage, list | tuple) or (isinstance(advantage, np.ndarray) and advantage.ndim > 0)
    entries: list[Any] | None = list(cast(Sequence[Any], advantage)) if is_list else None
    if entries is None or len(entries) != len(turns):
        raise ArgumentError(
            "advantage",
            advantage,
            f"pass one finite number for episode {trajectory.episode_id:.80}, or a list with one entry for each of its "
            f"{len(turns)} turns: a finite number, or an array with one for each token that the turn sampled",
        )
    by_node: dict[int, float | np.ndarray] = dict.fromkeys(range(len(trajectory.nodes)), 0.0)
    for index, (turn, entry) in enumerate(zip(turns, entries, strict=True)):
        by_node[turn.node] = _turn_advantage(f"advantage[{index}]", entry, len(trajectory.nodes[turn.node].logprobs))
    rewarded = {turn.node for turn in turns}
    for index, node in enumerate(trajectory.nodes):
        if len(node.logprobs) and index not in rewarded:
            rule = (
                f"node {index} of episode {trajectory.episode_id:.80} has sampled tokens and no turn: pass one number"
            )
            raise ArgumentError("advantage", advantage, rule)
    return by_node


def _turn_advantage(name: str, entry: float | np.ndarray, sampled: int) -> float | np.ndarray:
    if (number := finite_number(entry)) is not None:
        return number
    array = np.asarray(entry) if isinstance(entry, np.ndarray | list | tuple) else None
    if array is None or array.shape != (sampled,) or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
        rule = f"pass a finite number, or an array with one for each of the {sampled} tokens that the turn sampled"
        raise ArgumentError(name, entry, rule)
    return array


def with_teacher(samples: Sequence[TrainingSample], scores: Sequence[TokenScores]) -> list[TrainingSample]:
    """Samples with the columns of a teacher, from what `score(samples, teacher)` returned.

    Raises `ValueError` for another number of scores, `SampleError` for scores of other lengths.
    """
    return [
        replace(
            sample,
            teacher_logprobs=scored.logprobs,
            teacher_top_ids=None if scored.top is None else scored.top.token_ids,
            teacher_top_logprobs=None if scored.top is None else scored.top.logprobs,
        )
        for sample, scored in zip(samples, scores, strict=True)
    ]


# Samples that train nothing: they fill a batch up to the number of samples that all ranks need.


_PADDING = "padding"


def neutral_sample(token_id: int) -> TrainingSample:
    """A sample of one token `token_id` without loss and without media."""
    return TrainingSample(
        token_ids=np.array([token_id], dtype=np.int32),
        loss_mask=np.zeros(1, dtype=bool),
        logprobs=np.zeros(1, dtype=np.float32),
        advantages=np.zeros(1, dtype=np.float32),
        name=_PADDING,
    )


def without_training(sample: TrainingSample) -> TrainingSample:
    """`sample` with the same tokens and the same media objects, but no trained token."""
    count = len(sample)
    return replace(
        sample,
        loss_mask=np.zeros(count, dtype=bool),
        logprobs=np.zeros(count, dtype=np.float32),
        advantages=np.zeros(count, dtype=np.float32),
        weight_spans=(),
        name=_PADDING,
        routed_experts=None,
        top_logprobs=None,
    )
