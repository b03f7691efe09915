"""Training samples of the branches of a trajectory, with the advantages of its turns."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np

from renderers.messages import Modality
from renderers.vision.processor import MediaProcessor
from rollouts.engines.protocol import NO_TOKEN, WeightSpan
from rollouts.errors import ArgumentError, TrajectoryError
from rollouts.training.samples import OPTIONAL_COLUMNS, TrainingSample
from rollouts.trajectory.token_node import SAMPLING_MASK, TOP_IDS, TOP_LOGPROBS, TokenNode
from rollouts.trajectory.tree import Trajectory
from rollouts.values import check_choice, finite_number

SharedNodes = Literal["first_leaf", "weighted", "each"]
UnknownKept = Literal["refuse", "keep"]
#: One number for an episode; or for each turn a number, or an array with one number for each token that it sampled.
Advantage = float | Sequence[float | np.ndarray] | np.ndarray


def samples_from_trajectory(
    trajectory: Trajectory,
    *,
    advantage: Advantage,
    processors: Mapping[Modality, MediaProcessor],
    shared: SharedNodes = "first_leaf",
    agents: Collection[str] | None = None,
    unknown_kept: UnknownKept = "refuse",
) -> list[TrainingSample]:
    """One sample per leaf of the tree.

    `advantage` is one finite number for all trained tokens; or a list with one entry for each turn: a finite
    number, or an array (n,) with one for each of the n tokens that the turn sampled.

    `shared` says how a node that k leaves share is trained: "first_leaf", in the first of their samples only;
    "weighted", in each of them with its advantage divided by k, so that the policy gradients sum to the
    gradient of the node once; "each", in each of them, so that it counts k times.

    With `agents`, only turns of these agents are trained ("" is the one that plays the environment), and
    leaves without such a turn have no sample. For other advantages for each agent, pass a list made from the
    `agent` of each turn.

    Where top_p, top_k and other options left ids out, the log-probability of a token becomes that among the
    ids that were kept (`TrainingSample.sampling_mask`), and `token_logprobs` computes the same. `unknown_kept`
    says what becomes of a trained token whose kept ids are not known: "refuse" raises `TrajectoryError`;
    "keep" takes its log-probability as that among all ids, and -1 in `sampling_mask` marks it.

    `processors` (a renderer's, by modality) compute the pixels again from the sources; raises
    `PixelMismatchError` if they differ from the pixels that the sampler saw. Raises `ArgumentError` for
    another advantage, `shared` or `agents`, and `TrajectoryError` for routed experts whose numbers of layers
    or dtypes differ along a path, and for an episode of a chat endpoint, of which no tokens are known.
    """
    if not trajectory.has_tokens:
        raise TrajectoryError(
            f"episode {trajectory.episode_id}: its engine gave messages without tokens, and nothing can be "
            "trained on them; sample with an engine of tokens, such as VLLMEngine or LocalEngine"
        )
    if isinstance(agents, str) or (agents is not None and not isinstance(agents, Collection)):
        raise ArgumentError("agents", agents, "pass a collection of names, or None for all agents")
    others = {turn.node for turn in trajectory.turns if agents is not None and turn.agent not in agents}
    check_choice("shared", shared, SharedNodes)
    check_choice("unknown_kept", unknown_kept, UnknownKept)
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
        shares = {index: advantages[index] * share[index] for index in trained}
        columns = _columns(trajectory, path, shares, unknown_kept)
        samples.append(
            TrainingSample(
                **columns,
                media=media,
                weight_spans=_trained_spans([trajectory.nodes[index] for index in trained]),
                name=f"{trajectory.episode_id}/{leaf}",
                **_reported_columns(trajectory, leaf, path),
                top_logprobs=trajectory.top_logprobs(leaf),
            )
        )
        trained_nodes.update(path)
    return samples


def _columns(
    trajectory: Trajectory,
    path: Sequence[int],
    advantages: Mapping[int, float | np.ndarray],
    unknown_kept: UnknownKept,
) -> dict[str, np.ndarray]:
    """The columns of the sample of a path, of which the nodes in `advantages` are trained."""
    nodes = [(trajectory.nodes[index], index in advantages) for index in path]
    token_ids = trajectory.token_ids(path[-1])
    loss_mask = np.concatenate([node.sampled & is_trained for node, is_trained in nodes])
    columns = {"logprobs": np.zeros(len(token_ids), np.float32), "advantages": np.zeros(len(token_ids), np.float32)}
    if advantages:
        logprobs, masks = zip(*(_among_kept(trajectory, index, unknown_kept) for index in advantages), strict=True)
        columns["logprobs"][loss_mask] = np.concatenate(logprobs)
        if any(SAMPLING_MASK in trajectory.nodes[index].extras for index in advantages):
            width = max(mask.shape[1] for mask in masks)
            columns[SAMPLING_MASK] = np.full((len(token_ids), width), NO_TOKEN, np.int32)
            columns[SAMPLING_MASK][loss_mask] = np.concatenate(
                [np.pad(mask, ((0, 0), (0, width - mask.shape[1])), constant_values=NO_TOKEN) for mask in masks]
            )
        columns["advantages"][loss_mask] = np.concatenate(
            [np.broadcast_to(value, len(trajectory.nodes[index].logprobs)) for index, value in advantages.items()]
        )
    return {"token_ids": token_ids, "loss_mask": loss_mask, **columns}


def _among_kept(trajectory: Trajectory, index: int, unknown: UnknownKept) -> tuple[np.ndarray, np.ndarray]:
    """The log-probabilities of the sampled tokens of a node, and the ids that each was sampled from, then -1."""
    node = trajectory.nodes[index]
    mask = node.extras.get(SAMPLING_MASK)
    if mask is None:
        return node.logprobs, np.empty((len(node.logprobs), 0), np.int32)
    is_known = (mask >= 0).any(axis=1)
    if unknown == "refuse" and not is_known.all():
        raise TrajectoryError(
            f"episode {trajectory.episode_id}: token {int(is_known.argmin())} of node {index} was sampled with top_p, "
            "top_k or another option that leaves ids out, and which ids were kept is not known, so that a trainer "
            "cannot compute the same log-probability. Sample at temperature 1 with top_logprobs of at least top_k, or "
            "so many that one is left out; or pass unknown_kept='keep'"
        )
    if TOP_IDS not in node.extras:
        return node.logprobs, mask
    # Raw log-probabilities have a sum below 1 over the ids that were kept; in others this changes nothing.
    ids = np.column_stack([node.extras[TOP_IDS], node.token_ids[node.sampled]])
    ids[:, -1] = np.where((ids[:, :-1] == ids[:, -1:]).any(axis=1), NO_TOKEN, ids[:, -1])  # it counts once
    logprobs = np.column_stack([node.extras[TOP_LOGPROBS], node.logprobs])
    rows = np.arange(len(ids))[:, None] << 32  # so that ids of different rows are different
    is_kept = (ids >= 0) & np.isin(ids + rows, mask + rows)
    total = np.logaddexp.reduce(np.where(is_kept, logprobs, -np.inf), axis=1)
    is_complete = is_known & (is_kept.sum(axis=1) == (mask >= 0).sum(axis=1))
    return node.logprobs - np.where(is_complete, total, 0), mask


def _reported_columns(trajectory: Trajectory, leaf: int, path: Sequence[int]) -> dict[str, np.ndarray]:
    """The routed experts and the columns of a teacher, as far as every node of a path has them."""
    return {
        name: trajectory.extra(leaf, name)  # noqa: S610 - the rule is about Django's querysets
        for name in OPTIONAL_COLUMNS
        if name != SAMPLING_MASK and all(name in trajectory.nodes[index].extras for index in path)
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
            f"pass one finite number for episode {trajectory.episode_id:.80}, or a list with one entry for "
            f"each of its {len(turns)} turns: a finite number, or an array with one for each token that the "
            "turn sampled",
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
