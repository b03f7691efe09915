"""Samples that share prefixes, and what a model computes of them with and without prefix trees."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from audio_models import AUDIO_MODELS
from family_rows import LoadedFamily

from renderers.placement import PlacedItem
from rollouts.models import forward, forward_pass, prefix_tree
from rollouts.models.forward_pass import ForwardPass
from rollouts.models.placed_rows import PlacedRows
from rollouts.training import TrainingBatch, TrainingSample, token_logprobs_and_entropy


class Computed(NamedTuple):
    """`logprobs` and `entropy` (B, T), the gradients of a weighted sum of both, and the rows that were computed."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    gradients: dict[str, torch.Tensor]
    rows: list[PlacedRows]
    #: How many images and sounds passed their towers.
    items: int

    @property
    def tokens(self) -> int:
        """How many tokens the model computed, padding left out."""
        return sum(int(rows.attention_mask.sum()) for rows in self.rows)


@contextmanager
def computed_rows() -> Iterator[list[PlacedRows]]:
    """The rows that models compute inside."""
    hidden_states = ForwardPass.hidden_states
    rows: list[PlacedRows] = []

    def noted(self: ForwardPass, given: PlacedRows) -> torch.Tensor:
        rows.append(given)
        return hidden_states(self, given)

    with mock.patch.object(ForwardPass, "hidden_states", noted):
        yield rows


def computed(model: Any, samples: Sequence[TrainingSample], layout: Any = "padded", **options: Any) -> Computed:
    batch = TrainingBatch.from_samples(samples, pad_id=0, layout=layout)
    model.zero_grad()
    with computed_rows() as rows, mock.patch.object(forward, "media_inputs", wraps=forward.media_inputs) as inputs:
        scored = token_logprobs_and_entropy(model, batch, **options)
    # Another weight for every token, so that the gradient of a shared token is a sum of different ones.
    weights = torch.linspace(-1, 1, scored.logprobs.numel()).view_as(scored.logprobs)
    (weights * scored.logprobs + weights.flip(0) * scored.entropy).sum().backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    items = sum(len(call.args[1]) for call in inputs.call_args_list)
    return Computed(scored.logprobs.detach(), scored.entropy.detach(), gradients, rows, items)


@contextmanager
def of_a_wide_model() -> Iterator[None]:
    """Inside, attention in a long row costs as little as in a model with wide layers: all that is equal is shared."""

    def cost(tokens: np.ndarray, hidden_size: int) -> np.ndarray:
        return tokens * 1e6 + tokens * tokens

    with mock.patch.object(prefix_tree, "row_cost", cost), mock.patch.object(forward_pass, "row_cost", cost):
        yield


def difference(one: Computed, other: Computed) -> float:
    """The largest difference of log-probabilities and entropies, and of gradients relative to their norm."""
    assert one.gradients.keys() == other.gradients.keys()
    norm = torch.cat([gradient.flatten() for gradient in other.gradients.values()]).norm()
    values = [one.logprobs - other.logprobs, one.entropy - other.entropy]
    values += [(one.gradients[name] - gradient).norm() / norm for name, gradient in other.gradients.items()]
    return max(float(value.abs().max()) for value in values)


def sample(ids: Any, media: Sequence[PlacedItem] = (), trained: int = 1, name: str = "s") -> TrainingSample:
    """A sample whose tokens from number `trained` on are trained, those of items left out."""
    mask = np.arange(len(ids)) >= trained
    for _, placeholder in media:
        mask[placeholder.offset : placeholder.end] = False
    zeros = np.zeros(len(ids), np.float32)
    return TrainingSample(np.array(ids, np.int32), mask, zeros, zeros, tuple(media), name=name)


def text_group() -> list[TrainingSample]:
    """Forks after 40, 52 and 20 tokens, equal samples, one that begins others, one that shares nothing."""
    rng = np.random.default_rng(1)
    prompt, completion = rng.integers(3, 300, 40), rng.integers(3, 300, 12)
    begins = [prompt, prompt, np.append(prompt, completion), np.append(prompt, completion), prompt[:20]]
    samples = [sample(np.append(begin, rng.integers(3, 300, 5 + n)), trained=20) for n, begin in enumerate(begins)]
    return [*samples, samples[0], sample(prompt, trained=15), sample(rng.integers(3, 300, 17), trained=4)]


def media_group(family: LoadedFamily) -> list[TrainingSample]:
    """Prompts that differ in their second item, or in the order of the items, with completions; forks inside a turn,
    after an item and before one; a sampled placeholder token, which is text; a sample without media."""
    if family.name in AUDIO_MODELS:
        first, second, other = family.sound(0.5), family.sound(0.7), family.sound(0.7)
        prompts = [family.row("two", sounds=each).sample for each in ([first, second], [first, other], [second, first])]
    else:
        first, second, other = family.pixels(32, 48), family.pixels(40, 40), family.pixels(40, 40)
        prompts = [family.row("two", each).sample for each in ([first, second], [first, other], [second, first])]
    rng = np.random.default_rng(2)
    samples = [
        continued(prompt, len(prompt), rng.integers(65, 90, length)) for prompt in prompts[:2] for length in (5, 7, 0)
    ]
    (_, one), (_, two) = prompts[0].media
    literal = int(prompts[0].token_ids[one.runs[0][0]])
    return [
        *samples,
        continued(prompts[0], one.end, [66, 67, 68]),
        continued(prompts[0], two.offset, [66, 67, 68]),
        continued(prompts[0], len(prompts[0]) - 2, [literal, literal, 68]),
        continued(prompts[2], len(prompts[2]), [70, 71]),
        family.row("only text").sample,
    ]


def continued(given: TrainingSample, length: int, ids: Any) -> TrainingSample:
    """The first tokens of a sample, and others behind them."""
    begin = given.part(0, length)
    return sample(np.append(begin.token_ids, np.array(ids, np.int32)), begin.media, trained=length - 2)


def distinct_tokens(samples: Sequence[TrainingSample]) -> int:
    """The number of different beginnings of samples: the nodes of a trie of tokens and media."""
    return len(
        {
            (
                each.token_ids[:end].tobytes(),
                tuple((item.mm_hash, at.offset) for item, at in each.media if at.offset < end),
            )
            for each in samples
            for end in range(1, len(each) + 1)
        }
    )


def distinct_items(samples: Sequence[TrainingSample]) -> int:
    return len({item.mm_hash for each in samples for item, _ in each.media})
