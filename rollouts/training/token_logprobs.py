"""Log-probabilities and entropy of the trained tokens of a batch under a model."""

from functools import partial
from typing import Any

import numpy as np
import torch

from rollouts.errors import ArgumentError
from rollouts.models.expert_routing import check_replay
from rollouts.models.forward_pass import ForwardPass
from rollouts.models.packing_support import packing_of
from rollouts.models.prefix_tree import MAX_ROW_TOKENS
from rollouts.training.batch import TrainingBatch, check_trained
from rollouts.training.kept_tokens import padded_ids, scored_among
from rollouts.training.model_inputs import batch_rows, batch_sequences
from rollouts.training.position_logprobs import position_logprobs
from rollouts.training.sequence_logprobs import SequenceLogprobs
from rollouts.values import check_integer


def token_logprobs(
    model: Any,
    batch: TrainingBatch,
    *,
    routed_experts: bool = False,
    share_prefixes: bool = True,
    max_row_tokens: int = MAX_ROW_TOKENS,
) -> torch.Tensor:
    """log p(token t | tokens before t) float32 (B, T) where `loss_mask` is True, 0 elsewhere. Differentiable.

    Any model of transformers with an output layer of its own, through its own forward. Media are placed by
    range, so that a sampled placeholder token is text. The log-probabilities are computed in chunks, on
    trained positions only, and among the ids that a token was sampled from where its sample names them
    (`sampling_mask`). A packed batch of a model that cannot keep the sequences of a row apart (layers
    with a recurrent state) is computed in padded rows, with the same result. Phi-4-multimodal projects the
    sounds of a prompt with images in another way: what it sampled before the first image of a row is computed
    without that image, as it was sampled, in a row of its own.

    Samples that begin with the same tokens and media share these in one pass, where that costs less: they
    are computed in rows of prefix trees, with masks, of at most `max_row_tokens` tokens or one sample. The
    results are those of separate rows, up to rounding. `share_prefixes=False` turns it off. Where such rows
    fail, the usual ones are computed, and a `RuntimeWarning` says why.

    With `routed_experts`, a mixture of experts computes each token with the experts that the sampler took
    (`TrainingSample.routed_experts`), weighted by its own routers' scores of these, through which the
    gradient goes (arXiv:2510.11370). Samples share tokens as far as their experts are the same.

    Raises `SampleError`, which names the row, for media and token ids that the model cannot take,
    `SampleError` for a `loss_mask` that was changed to train padding or the first token of a sample, and
    `UnsupportedModelError`, which says what was tried, for a model whose hidden states or output layer are
    not accessible. With `routed_experts` also `SampleError` for a trained sample that has none, and the
    errors of `replayed_experts`.
    """
    return _scored(model, batch, batch.input_ids, routed_experts, share_prefixes, max_row_tokens).logprobs


def candidate_logprobs(
    model: Any,
    batch: TrainingBatch,
    candidates: torch.Tensor,
    *,
    routed_experts: bool = False,
    share_prefixes: bool = True,
    max_row_tokens: int = MAX_ROW_TOKENS,
) -> torch.Tensor:
    """`token_logprobs` of K other tokens in the place of each: float32 (B, T, K), 0 outside of `loss_mask`.

        ids = torch.cat([batch.input_ids[..., None], batch.column("teacher_top_ids")], -1)
        logprobs = candidate_logprobs(model, batch, ids)  # [..., 0] are those of the sampled tokens

    `candidates` integers (B, T, K), of the batch's rows and columns. One forward pass, as for
    `token_logprobs`, with the same options and errors, and `ArgumentError` for candidates of another shape or
    outside of the vocabulary.
    """
    shape = tuple(batch.loss_mask.shape)
    if not isinstance(candidates, torch.Tensor) or candidates.dim() != 3 or tuple(candidates.shape[:2]) != shape:
        given = tuple(candidates.shape) if isinstance(candidates, torch.Tensor) else candidates
        raise ArgumentError("candidates", given, f"pass integers {(*shape, 'K')}, such as a teacher's likeliest tokens")
    return _scored(model, batch, candidates, routed_experts, share_prefixes, max_row_tokens).logprobs


def token_logprobs_and_entropy(
    model: Any,
    batch: TrainingBatch,
    *,
    temperature: float = 1.0,
    routed_experts: bool = False,
    share_prefixes: bool = True,
    max_row_tokens: int = MAX_ROW_TOKENS,
) -> SequenceLogprobs:
    """`token_logprobs`, and the entropy of the distribution that each token is drawn from: both float32 (B,
    T), in nats, 0 outside of `loss_mask`. The logits are divided by `temperature`. Differentiable, with the
    same options and errors.
    """
    return _scored(model, batch, batch.input_ids, routed_experts, share_prefixes, max_row_tokens, temperature)


def _scored(
    model: Any,
    batch: TrainingBatch,
    targets: torch.Tensor,
    routed_experts: bool,
    share_prefixes: bool,
    max_row_tokens: int,
    temperature: float = 1.0,
) -> SequenceLogprobs:
    """For targets (B, T) or (B, T, K): their log-probabilities, in the same shape, and the entropy (B, T)."""
    check_integer("max_row_tokens", max_row_tokens)
    trained = batch.loss_mask.cpu()
    check_trained(trained, batch.position_ids.cpu(), batch.sequence_ids, batch.samples)
    forward = ForwardPass(model)
    if routed_experts:
        # Whatever the samples are: processes that divide a model (FSDP) run its probe together.
        check_replay(forward.architecture)
    if not batch.lengths.any():
        empty = torch.zeros(targets.shape, dtype=torch.float32, device=forward.model.device)
        return SequenceLogprobs(empty, empty.new_zeros(batch.loss_mask.shape))
    sample = batch.sequence_ids.cpu()[trained].numpy().astype(np.int64)
    # A token is predicted at the position before it; the first token of a sample is never trained.
    position = batch.position_ids.cpu()[trained].numpy() - 1
    with_media = any(each.media for each in batch.samples)
    columns = batch.input_ids.shape[1]
    is_packed = batch.layout == "packed" and packing_of(forward.architecture, with_media=with_media, columns=columns)
    # Other candidates than the tokens themselves keep their probabilities among all ids.
    kept = padded_ids([each.sampling_mask for each in batch.samples], batch.lengths.tolist())
    if kept is not None:
        kept = (
            kept[np.cumsum([0, *batch.lengths.tolist()])[sample] + position + 1] if targets is batch.input_ids else None
        )
    score = partial(
        position_logprobs,
        forward,
        batch_sequences(batch, routed_experts=routed_experts),
        (sample, position),
        pad_id=batch.pad_id,
        packed=(lambda: batch_rows(batch, routed_experts=routed_experts)) if is_packed else None,
        temperature=temperature,
        max_row_tokens=max_row_tokens if share_prefixes else 0,
    )
    scored = scored_among(kept, targets[batch.loss_mask.to(targets.device)], score)
    device = scored.logprobs.device
    mask = batch.loss_mask.to(device)
    logprobs = torch.zeros(targets.shape, dtype=torch.float32, device=device)
    where = mask if targets.dim() == 2 else mask[..., None].expand_as(logprobs)
    nothing = torch.zeros(mask.shape, dtype=torch.float32, device=device)
    return SequenceLogprobs(
        logprobs.masked_scatter(where, scored.logprobs), nothing.masked_scatter(mask, scored.entropy)
    )
