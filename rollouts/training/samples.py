"""Training samples, and how they are made from trajectories and rendered conversations."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from renderers import MediaItem, PlaceholderRange, RenderedTokens
from renderers.media.item import Modality
from renderers.placement import item_placement_error
from renderers.vision.processor import MediaProcessor
from rollouts.engines.protocol import WeightSpan
from rollouts.errors import ArgumentError, SampleError
from rollouts.numbers import finite_number
from rollouts.trajectory.token_node import TokenNode
from rollouts.trajectory.tree import Trajectory
from transport import wire_type


@wire_type("rollouts.TrainingSample")
@dataclass(frozen=True, slots=True, eq=False)
class TrainingSample:
    """A row of n tokens.

    `token_ids` int32 (n,); `loss_mask` bool (n,), True where log p(token | earlier tokens) is trained; `logprobs`
    float32 (n,), the sampler's, 0 outside the mask; `advantages` float32 (n,); `media`, the images with the ranges
    of their placeholder tokens. `weight_spans` count sampled tokens. `name` identifies the row in errors. Raises
    `SampleError` for lengths, log-probabilities, advantages and ranges that contradict each other.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    media: tuple[tuple[MediaItem, PlaceholderRange], ...] = ()
    weight_spans: tuple[WeightSpan, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        for column in ("loss_mask", "logprobs", "advantages"):
            length = len(getattr(self, column))
            if length != count:
                raise SampleError(self.name, f"{column} has {length} values for {count} tokens")
        if count and self.loss_mask[0]:
            raise SampleError(self.name, "the first token is trained, but no token before it predicts it")
        if not np.all(np.isfinite(self.logprobs[self.loss_mask])):
            index = self._first_not_finite(self.logprobs)
            raise SampleError(
                self.name,
                f"token {index} is trained and its log-probability {self.logprobs[index]} is not a finite "
                "number; take the sampler's, or set loss_mask to False there",
            )
        if not np.all(np.isfinite(self.advantages[self.loss_mask])):
            index = self._first_not_finite(self.advantages)
            raise SampleError(
                self.name,
                f"token {index} is trained and its advantage {self.advantages[index]} is not a finite "
                "number; leave the episode out, or compute the advantages from finite rewards",
            )
        if (error := item_placement_error(self.media, count)) is not None:
            raise SampleError(self.name, error)

    def __len__(self) -> int:
        return len(self.token_ids)

    def _first_not_finite(self, column: np.ndarray) -> int:
        return int(np.flatnonzero(self.loss_mask & ~np.isfinite(column))[0])


def sample_from_rendered(
    rendered: RenderedTokens, *, trained_messages: Collection[int] | None = None, name: str = ""
) -> TrainingSample:
    """A supervised sample: it trains the tokens that the model would sample, if given only of `trained_messages`."""
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
    trajectory: Trajectory, *, advantage: float, processors: Mapping[Modality, MediaProcessor]
) -> list[TrainingSample]:
    """One sample per leaf of the tree; a node that several leaves share is trained in the first of their samples.

    `processors` (a renderer's, by modality) compute the pixels again from the sources; raises `PixelMismatchError` if
    they differ from the pixels that the sampler saw. Every trained token has the same `advantage`; raises
    `ArgumentError` unless it is one finite number.
    """
    if (number := finite_number(advantage)) is None:
        raise ArgumentError(
            "advantage",
            advantage,
            f"pass one finite number for episode {trajectory.episode_id:.80}; "
            "for one advantage per token, replace `advantages` of the samples",
        )
    trained_nodes: set[int] = set()
    samples = []
    for leaf in trajectory.leaves():
        path = trajectory.path(leaf)
        nodes = [trajectory.nodes[index] for index in path]
        token_ids = np.concatenate([node.token_ids for node in nodes])
        sampled = np.concatenate([node.sampled for node in nodes])
        is_new = np.concatenate(
            [np.full(len(node), index not in trained_nodes) for index, node in zip(path, nodes, strict=True)]
        )
        logprobs = np.zeros(len(token_ids), dtype=np.float32)
        logprobs[sampled] = np.concatenate([node.logprobs for node in nodes])
        loss_mask = sampled & is_new
        samples.append(
            TrainingSample(
                token_ids=token_ids,
                loss_mask=loss_mask,
                logprobs=np.where(loss_mask, logprobs, np.float32(0)),
                advantages=np.where(loss_mask, np.float32(number), np.float32(0)),
                media=tuple(
                    (reference.derive(processors), reference.placeholder) for reference in trajectory.media(leaf)
                ),
                weight_spans=_path_weight_spans(nodes),
                name=f"{trajectory.episode_id}/{leaf}",
            )
        )
        trained_nodes.update(path)
    return samples


def _path_weight_spans(nodes: Sequence[TokenNode]) -> tuple[WeightSpan, ...]:
    """The spans of all nodes of a path; they count the sampled tokens of the whole path."""
    spans: list[WeightSpan] = []
    offset = 0
    for node in nodes:
        spans += [WeightSpan(span.version, span.start + offset, span.end + offset) for span in node.weight_spans]
        offset += len(node.logprobs)
    return tuple(spans)
