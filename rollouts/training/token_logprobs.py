"""Log-probabilities and entropy of the trained tokens of a batch under a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rollouts.errors import ArgumentError
from rollouts.models.forward_pass import ForwardPass
from rollouts.models.packing_support import packing_of
from rollouts.models.placed_rows import TokenRow, placed_rows
from rollouts.models.sounds_by_range import length_heard_otherwise
from rollouts.training.batch import TrainingBatch, check_trained
from rollouts.training.model_inputs import batch_rows, batch_sequences
from rollouts.training.sequence_logprobs import SequenceLogprobs, sequence_logprobs


def token_logprobs(model: Any, batch: TrainingBatch) -> torch.Tensor:
    """log p(token t | tokens before t) float32 (B, T) where `loss_mask` is True, 0 elsewhere. Differentiable.

    Any model of transformers with an output layer of its own, through its own forward. Media are placed by
    range, so that a sampled placeholder token is text. The log-probabilities are computed in chunks, on
    trained positions only. Equal samples of a padded batch share one forward pass (episodes of a group often
    sample the same completion), and for Qwen3-VL an image that is in many rows passes the vision tower once.
    A packed batch of a model that cannot keep the sequences of a row apart (layers with a recurrent state) is
    computed in padded rows, with the same result. Phi-4-multimodal projects the sounds of a prompt with
    images in another way: what it sampled before the first image of a row is computed without that image, as
    it was sampled, in a row of its own.

    Raises `SampleError`, which names the row, for media and token ids that the model cannot take,
    `SampleError` for a `loss_mask` that was changed to train padding or the first token of a sample, and
    `UnsupportedModelError`, which says what was tried, for a model whose hidden states or output layer are
    not accessible.
    """
    return token_logprobs_and_entropy(model, batch).logprobs


def candidate_logprobs(model: Any, batch: TrainingBatch, candidates: torch.Tensor) -> torch.Tensor:
    """`token_logprobs` of K other tokens in the place of each: float32 (B, T, K), 0 outside of `loss_mask`.

        ids = torch.cat([batch.input_ids[..., None], batch.column("teacher_top_ids")], -1)
        logprobs = candidate_logprobs(model, batch, ids)  # [..., 0] are those of the sampled tokens

    `candidates` integers (B, T, K), of the batch's rows and columns. One forward pass, as for
    `token_logprobs`, with the same errors, and `ArgumentError` for candidates of another shape or outside of
    the vocabulary.
    """
    shape = tuple(batch.loss_mask.shape)
    if not isinstance(candidates, torch.Tensor) or candidates.dim() != 3 or tuple(candidates.shape[:2]) != shape:
        given = tuple(candidates.shape) if isinstance(candidates, torch.Tensor) else candidates
        raise ArgumentError("candidates", given, f"pass integers {(*shape, 'K')}, such as a teacher's likeliest tokens")
    return _scored(model, batch, candidates, 1.0).logprobs


def token_logprobs_and_entropy(model: Any, batch: TrainingBatch, *, temperature: float = 1.0) -> SequenceLogprobs:
    """`token_logprobs`, and the entropy of the distribution that each token is drawn from: both float32 (B,
    T), in nats, 0 outside of `loss_mask`. The logits are divided by `temperature`. Differentiable, with the
    same errors.
    """
    return _scored(model, batch, batch.input_ids, temperature)


def _scored(model: Any, batch: TrainingBatch, targets: torch.Tensor, temperature: float) -> SequenceLogprobs:
    """For targets (B, T) or (B, T, K): their log-probabilities, in the same shape, and the entropy (B, T)."""
    trained = batch.loss_mask.cpu()
    check_trained(trained, batch.position_ids.cpu(), batch.sequence_ids, batch.samples)
    forward = ForwardPass(model)
    if not batch.lengths.any():
        empty = torch.zeros(targets.shape, dtype=torch.float32, device=forward.model.device)
        return SequenceLogprobs(empty, empty.new_zeros(batch.loss_mask.shape))
    sequences = batch_sequences(batch)
    number, position = batch.sequence_ids.cpu()[trained].long(), batch.position_ids.cpu()[trained]
    parts: list[TokenRow] = []
    for index, sequence in enumerate(sequences):
        in_part = (number == index) & (position < length_heard_otherwise(forward.architecture.search, sequence.media))
        if bool(in_part.any()):
            number[in_part] = len(sequences) + len(parts)
            parts.append(sequence.part(0, int(position[in_part].max()) + 1))
    with_media = any(sample.media for sample in batch.samples)
    if batch.layout == "packed" and not parts and packing_of(forward.architecture, with_media=with_media):
        hidden = forward.hidden_states(batch_rows(batch))
        row, column = trained.nonzero(as_tuple=True)
    else:
        distinct, row_of = _distinct([*sequences, *parts])
        hidden = forward.hidden_states(placed_rows(distinct, pad_id=batch.pad_id))
        row, column = torch.tensor(row_of)[number], position
    # A token is predicted at the position before it; the first token of a sample is never trained.
    states = hidden[row.to(hidden.device), column.to(hidden.device) - 1]
    mask = batch.loss_mask.to(hidden.device)
    head = forward.head
    scored = sequence_logprobs(
        states,
        head.weight,
        targets.to(hidden.device)[mask],
        bias=head.bias,
        low_rank=head.low_rank,
        softcap=head.softcap,
        scale=head.scale,
        temperature=temperature,
    )
    logprobs = torch.zeros(targets.shape, dtype=torch.float32, device=hidden.device)
    where = mask if targets.dim() == 2 else mask[..., None].expand_as(logprobs)
    nothing = torch.zeros(mask.shape, dtype=torch.float32, device=hidden.device)
    return SequenceLogprobs(
        logprobs.masked_scatter(where, scored.logprobs), nothing.masked_scatter(mask, scored.entropy)
    )


def _distinct(sequences: Sequence[TokenRow]) -> tuple[list[TokenRow], list[int]]:
    """The sequences that differ in ids or images, and for every sequence the index of the one that it equals."""
    index_of: dict[tuple[bytes, tuple[str, ...]], int] = {}
    distinct: list[TokenRow] = []
    row_of = []
    for sequence in sequences:
        # The key includes offsets: with a sampled placeholder token beside an image, equal ids have two
        # placements.
        images = tuple(f"{item.mm_hash}@{placeholder.offset}" for item, placeholder in sequence.media)
        index = index_of.setdefault((sequence.token_ids.tobytes(), images), len(distinct))
        if index == len(distinct):
            distinct.append(sequence)
        row_of.append(index)
    return distinct, row_of
