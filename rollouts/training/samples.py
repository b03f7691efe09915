"""One row to learn from: ids, which of them are trained, and what the sampler thought of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from renderers import MediaItem, PlaceholderRange, RenderedTokens
from renderers.media.item import Modality
from renderers.placement import item_placement_error
from renderers.vision.processor import MediaProcessor
from rollouts.engines.protocol import WeightSpan
from rollouts.errors import SampleError
from rollouts.trajectory.tree import Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSample:
    """A row of n tokens.

    `token_ids` int32 (n,); `loss_mask` bool (n,), True where log p(token | earlier tokens) is trained; `logprobs`
    float32 (n,), the sampler's, 0 outside the mask; `advantages` float32 (n,); `media`, the images with the ranges
    that their placeholder tokens take. `weight_spans` count trained tokens. `name` is what errors call this row.
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
            raise SampleError(self.name, "the first token is trained, but nothing comes before it to predict it from")
        trained = self.logprobs[self.loss_mask]
        if not np.all(np.isfinite(trained)):
            raise SampleError(self.name, "a trained token has no finite log-probability")
        if not np.all(np.isfinite(self.advantages[self.loss_mask])):
            raise SampleError(self.name, "a trained token has no finite advantage")
        if (error := item_placement_error(self.media, count)) is not None:
            raise SampleError(self.name, error)

    def __len__(self) -> int:
        return len(self.token_ids)


def sample_from_rendered(
    rendered: RenderedTokens, *, trained_messages: Collection[int] | None = None, name: str = ""
) -> TrainingSample:
    """A supervised row: the loss is on what the model would have sampled, in `trained_messages` only if given."""
    loss_mask = np.array(rendered.sampled_mask, dtype=bool)
    if trained_messages is not None:
        loss_mask &= np.isin(rendered.message_indices, list(trained_messages))
    media = rendered.multi_modal_data.items_with_ranges() if rendered.multi_modal_data is not None else []
    for _, where in media:  # an image in an assistant's turn is not predicted
        loss_mask[where.offset : where.end] = False
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
    """One row per leaf of the tree; a node shared by several leaves is trained in the first of them only.

    Pixels are derived again from the sources by `processors` (a renderer's, by modality) and must carry the names that
    the sampler used: raises `PixelMismatchError` otherwise. Every trained token gets the same `advantage`.
    """
    trained: set[int] = set()
    samples = []
    for leaf in trajectory.leaves():
        path = trajectory.path(leaf)
        nodes = [trajectory.nodes[index] for index in path]
        token_ids = np.concatenate([node.token_ids for node in nodes])
        sampled = np.concatenate([node.sampled for node in nodes])
        fresh = np.concatenate(
            [np.full(len(node), index not in trained) for index, node in zip(path, nodes, strict=True)]
        )
        logprobs = np.zeros(len(token_ids), dtype=np.float32)
        logprobs[sampled] = np.concatenate([node.logprobs for node in nodes])
        loss_mask = sampled & fresh
        samples.append(
            TrainingSample(
                token_ids=token_ids,
                loss_mask=loss_mask,
                logprobs=np.where(loss_mask, logprobs, np.float32(0)),
                advantages=np.where(loss_mask, np.float32(advantage), np.float32(0)),
                media=tuple(
                    (reference.derive(processors), reference.placeholder) for reference in trajectory.media(leaf)
                ),
                weight_spans=_joined_spans([node.weight_spans for node in nodes]),
                name=f"{trajectory.episode_id}/{leaf}",
            )
        )
        trained.update(path)
    return samples


def _joined_spans(spans_of_nodes: list[tuple[WeightSpan, ...]]) -> tuple[WeightSpan, ...]:
    joined: list[WeightSpan] = []
    offset = 0
    for spans in spans_of_nodes:
        joined += [WeightSpan(span.version, span.start + offset, span.end + offset) for span in spans]
        offset += max((span.end for span in spans), default=0)
    return tuple(joined)
