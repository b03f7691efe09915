"""The keyword arguments that the model's own forward takes for a batch."""

from typing import Any

import numpy as np

from rollouts.errors import SampleError, UnsupportedModelError
from rollouts.models.architecture import architecture
from rollouts.models.forward import forward_inputs
from rollouts.models.packing_support import packing_of
from rollouts.models.placed_rows import PlacedRows, TokenRow
from rollouts.models.placeholders import check_placeholders, check_token_ids, refuse_literals
from rollouts.models.positions import row_positions
from rollouts.models.sounds_by_range import refuse_changed_sounds
from rollouts.training.batch import TrainingBatch
from rollouts.training.samples import TrainingSample
from rollouts.training.token_extras import of_samples


def model_inputs(batch: TrainingBatch, model: Any) -> dict[str, Any]:
    """`input_ids` (B, T) and what else the model's forward takes, on the model's device; floats in its dtype.

    `attention_mask` (B, T) for padded rows; packed rows have none, and transformers separates the samples of
    a row where `position_ids` begin again (pass `use_cache=False`). Models that do not (gpt-oss; Gemma 3 and
    4 with images) get masks (B, 1, T, T) in a dict by type of layer. `position_ids` (B, T), for models with
    M-RoPE (3, B, T) and packed (4, B, T); `token_type_ids` or `mm_token_type_ids` (B, T); and the tensors of
    the media by their names, of all rows, in order.

    transformers finds media by token id, so it would take a sampled placeholder token for an image: a row
    with such a token raises `SampleError`. So do sounds of other lengths where padding would change them.
    `token_logprobs` finds media by range, each sound by itself, and accepts such rows. A packed batch for a
    model that does not keep the samples of a row apart raises `UnsupportedModelError`.
    """
    known = architecture(model)
    if not batch.lengths.any():
        missing = "tokens" if batch.samples else "samples"
        raise SampleError(None, f"a batch without {missing} has no model inputs; leave it out")
    rows = batch_rows(batch)
    check_placeholders(known, rows)
    check_token_ids(known, rows)
    refuse_literals(
        known,
        rows,
        "transformers would take it for an image. Compute this row with token_logprobs",
    )
    refuse_changed_sounds(known, rows, batch.loss_mask.cpu().numpy())
    with_media = any(sample.media for sample in batch.samples)
    packing = packing_of(known, with_media=with_media, columns=rows.input_ids.shape[1]) if rows.packed else None
    if rows.packed and packing is None:
        raise UnsupportedModelError(
            known.model_type,
            "in a packed row, its hidden states depend on the sample before (found with a probe of two "
            "sequences). Use "
            'layout="padded", or token_logprobs, which computes packed batches of such a model in padded rows',
        )
    positions, _ = row_positions(known, rows)
    return forward_inputs(known, rows, known.model, positions, explicit_masks=packing == "masks")


def batch_rows(batch: TrainingBatch, *, routed_experts: bool = False) -> PlacedRows:
    """The `batch_sequences` of a batch, in the rows and columns that the batch has for them."""
    return PlacedRows(
        sequences=tuple(batch_sequences(batch, routed_experts=routed_experts)),
        input_ids=batch.input_ids.cpu().numpy(),
        position_ids=batch.position_ids.cpu().numpy(),
        sequence_ids=batch.sequence_ids.cpu().numpy(),
        starts=batch.starts.numpy(),
        packed=batch.layout == "packed",
    )


def batch_sequences(batch: TrainingBatch, *, routed_experts: bool = False) -> list[TokenRow]:
    """The samples of a batch with the token ids that the batch has, which may have been changed.

    With `routed_experts` the sampler's experts compute all tokens but the last, whose are not known. Raises
    `SampleError` for a sample with trained tokens that has none.
    """
    ids_of_samples = of_samples(batch.input_ids.cpu(), batch.starts, batch.lengths)
    return [
        TokenRow(ids.numpy(), sample.media, sample.name, _experts(sample) if routed_experts else None)
        for sample, ids in zip(batch.samples, ids_of_samples, strict=True)
    ]


def _experts(sample: TrainingSample) -> np.ndarray | None:
    """int32 (n, layers, experts a token): those that compute each token of a sample, -1 for the last one."""
    experts = sample.routed_experts
    if experts is not None:
        # A row of the sample has the experts of the pass that predicted its token: those of the token before.
        unknown = np.full_like(experts[:1], -1, dtype=np.int32)
        return np.concatenate([experts[1:].astype(np.int32), unknown])
    if sample.loss_mask.any():
        cure = "let the server report them, or leave out routed_experts=True"
        raise SampleError(sample.name, f"it has no routed_experts to compute with; {cure}")
    return None
