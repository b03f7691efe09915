"""The trainer's log-probabilities of the trained tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rollouts.models.forward_pass import ForwardPass
from rollouts.models.placed_rows import TokenSequence, padded_rows
from rollouts.training.batch.checks import check_trained
from rollouts.training.batch.training_batch import TrainingBatch
from rollouts.training.model_inputs import batch_rows, batch_sequences
from rollouts.training.sequence_logprobs import SequenceLogprobs, sequence_logprobs


def token_logprobs(model: Any, batch: TrainingBatch) -> torch.Tensor:
    """log p(token t | tokens before t) float32 (B, T) where `loss_mask` is True, 0 elsewhere. Differentiable.

    Any model of transformers with an output layer of its own, through its own forward. Images are placed by range, so
    that a sampled placeholder token is text. The log-probabilities are computed in chunks, on trained positions only.
    Equal samples of a padded batch share one forward pass (episodes of a group often sample the same completion), and
    for Qwen3-VL an image that is in many rows passes the vision tower once. A packed batch of a model that cannot keep
    the sequences of a row apart (layers with a recurrent state) is computed in padded rows, with the same result.

    Raises `SampleError`, which names the row, for media and token ids that the model cannot take, `BatchError` for a
    `loss_mask` that was changed to train padding or the first token of a sample, and `UnsupportedModelError`, which
    says what was tried, for a model whose hidden states or output layer are not accessible.
    """
    return token_logprobs_and_entropy(model, batch).logprobs


def token_logprobs_and_entropy(model: Any, batch: TrainingBatch, *, temperature: float = 1.0) -> SequenceLogprobs:
    """`token_logprobs`, and the entropy of the distribution that each token is drawn from: both float32 (B, T), in
    nats, 0 outside of `loss_mask`. The logits are divided by `temperature`. Differentiable, with the same errors.
    """
    trained = batch.loss_mask.cpu()
    check_trained(trained, batch.position_ids.cpu(), batch.sequence_ids, batch.samples)
    forward = ForwardPass(model)
    if not batch.lengths.any():
        empty = torch.zeros(batch.loss_mask.shape, dtype=torch.float32, device=forward.model.device)
        return SequenceLogprobs(empty, empty.clone())
    if batch.layout == "packed" and forward.packs(with_media=any(sample.media for sample in batch.samples)):
        hidden = forward.hidden_states(batch_rows(batch))
        row, column = trained.nonzero(as_tuple=True)
    else:
        distinct, row_of = _distinct(batch_sequences(batch))
        hidden = forward.hidden_states(padded_rows(distinct, pad_id=batch.pad_id))
        row = torch.tensor(row_of)[batch.sequence_ids.cpu()[trained].long()]
        column = batch.position_ids.cpu()[trained]
    # A token is predicted at the position before it; the first token of a sample is never trained.
    states = hidden[row.to(hidden.device), column.to(hidden.device) - 1]
    mask = batch.loss_mask.to(hidden.device)
    targets = batch.input_ids.to(hidden.device)[mask]
    head = forward.head
    scored = sequence_logprobs(
        states,
        head.weight,
        targets,
        bias=head.bias,
        softcap=head.softcap,
        scale=head.scale,
        temperature=temperature,
    )
    nothing = torch.zeros(mask.shape, dtype=torch.float32, device=hidden.device)
    return SequenceLogprobs(*(nothing.masked_scatter(mask, values) for values in scored))


def _distinct(sequences: Sequence[TokenSequence]) -> tuple[list[TokenSequence], list[int]]:
    """The sequences that differ in ids or images, and for every sequence the index of the one that it equals."""
    index_of: dict[tuple[bytes, tuple[str, ...]], int] = {}
    distinct: list[TokenSequence] = []
    row_of = []
    for sequence in sequences:
        # The key includes offsets: with a sampled placeholder token beside an image, equal ids have two placements.
        images = tuple(f"{item.mm_hash}@{placeholder.offset}" for item, placeholder in sequence.media)
        index = index_of.setdefault((sequence.ids.tobytes(), images), len(distinct))
        if index == len(distinct):
            distinct.append(sequence)
        row_of.append(index)
    return distinct, row_of
