"""Log-probabilities and entropy of the tokens of a batch, without the logits of a whole row in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from rollouts.errors import ArgumentError, SampleError, UnsupportedModelError
from rollouts.models.architecture import architecture
from rollouts.models.forward import forward_inputs
from rollouts.models.forward_pass import ForwardPass, packing_of
from rollouts.models.output_head import LowRank
from rollouts.models.placed_rows import PlacedRows, TokenSequence, beginning, padded_rows, placed_rows, row_positions
from rollouts.models.placeholders import check_placeholders, check_token_ids, refuse_literals
from rollouts.models.sounds_by_range import length_heard_otherwise, refuse_changed_sounds
from rollouts.training.batch import TrainingBatch, check_trained
from rollouts.values import check_integer, check_positive


def model_inputs(batch: TrainingBatch, model: Any) -> dict[str, Any]:
    """`input_ids` (B, T) and what else the model's forward takes, on the model's device; floats in its dtype.

    `attention_mask` (B, T) for padded rows; packed rows have none, and transformers separates the samples of
    a row where `position_ids` begin again (pass `use_cache=False`). Models that do not (gpt-oss; Gemma 3 and
    4 with images) get masks (B, 1, T, T) in a dict by type of layer. `position_ids` (B, T), for models with
    M-RoPE (3, B, T) and packed (4, B, T); `token_type_ids` or `mm_token_type_ids` (B, T); and the tensors of
    the media by their names, of all rows, in order.

    transformers finds media by token id, so it would take a sampled placeholder token for an image: a row with such a
    token raises `SampleError`. So do sounds of other lengths where padding would change them.
    `token_logprobs` finds media by range, each sound by itself, and accepts such rows. A packed batch for a model
    that does not keep the samples of a row apart raises `UnsupportedModelError`.
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
    packing = packing_of(known, with_media=with_media) if rows.packed else None
    if rows.packed and packing is None:
        raise UnsupportedModelError(
            known.model_type,
            "in a packed row, its hidden states depend on the sample before (found with a probe of two sequences). Use "
            'layout="padded", or token_logprobs, which computes packed batches of such a model in padded rows',
        )
    positions, _ = row_positions(known, rows)
    return forward_inputs(known, rows, known.model, positions, explicit_masks=packing == "masks")


def batch_rows(batch: TrainingBatch) -> PlacedRows:
    """The samples of a batch with their media, in the rows and columns that the batch has for them."""
    rows, columns = batch.input_ids.shape
    starts = batch.starts.cpu().numpy()
    packed = batch.layout == "packed"
    return placed_rows(batch_sequences(batch), starts, (rows, columns), pad_id=batch.pad_id, packed=packed)


def batch_sequences(batch: TrainingBatch) -> list[TokenSequence]:
    """The samples of a batch with the token ids that the batch has, which may have been changed."""
    ids = batch.input_ids.cpu().numpy()
    spans = zip(batch.starts.tolist(), batch.lengths.tolist(), strict=True)
    return [
        TokenSequence(ids[row, column : column + length], sample.media, sample.name)
        for sample, ((row, column), length) in zip(batch.samples, spans, strict=True)
    ]


class SequenceLogprobs(NamedTuple):
    """`logprobs` and `entropy`, float32 (P,), in nats; `logprobs` (P, K) for K targets a position."""

    logprobs: torch.Tensor
    entropy: torch.Tensor


class _Head(NamedTuple):
    """How hidden states become logits, and how many positions and vocabulary entries a tile of logits has."""

    scale: float
    softcap: float | None
    temperature: float
    chunk_positions: int
    chunk_vocabulary: int


def sequence_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    low_rank: LowRank | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    temperature: float = 1.0,
    chunk_positions: int = 1024,
    chunk_vocabulary: int = 4096,
) -> SequenceLogprobs:
    """log p(target) at P positions, and the entropy of the distribution there. Differentiable once.

    `hidden` floating (P, H) are the last hidden states, `weight` (V, H) and `bias` (V,) the output layer in
    the same dtype, `targets` integers (P,) from 0 to V - 1, or (P, K) for K of them at each position. The
    logits are `hidden @ weight.T + bias` in that dtype, and from there on float32: plus what an adapter adds
    to them (`low_rank`, as the `OutputHead` of the model has it), times `scale`, then
    `softcap * tanh(logits / softcap)` (Gemma 2, arXiv:2408.00118, section 2), then divided by `temperature`.

    Logits exist only as tiles of `chunk_positions` x `chunk_vocabulary`; the backward pass computes each tile again
    (as Wijmans et al. 2024, arXiv:2411.09009, and Hsu et al. 2024, arXiv:2410.10989). Beyond the arguments and their
    gradients, that takes about three tiles of float32, and for hidden states of less precision one float32 (P, H), in
    which their gradient is summed. Raises `ArgumentError` for other targets, and for values out of range.
    """
    _check_tensors(hidden, weight, targets, bias)
    head = _Head(
        check_positive("scale", scale),
        None if softcap is None else check_positive("softcap", softcap),
        check_positive("temperature", temperature),
        check_integer("chunk_positions", chunk_positions),
        check_integer("chunk_vocabulary", chunk_vocabulary),
    )
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = bias if bias is None else bias.to(dtype)
    low, up = None, None
    if low_rank is not None:
        low, up = low_rank.scale * (hidden.to(low_rank.down.dtype) @ low_rank.down.T), low_rank.up
    columns = targets.long() if targets.dim() == 2 else targets.long()[:, None]
    logprobs, entropy = _TiledLogprobs.apply(hidden, weight, bias, low, up, columns, head)  # type: ignore[no-untyped-call]
    return SequenceLogprobs(logprobs if targets.dim() == 2 else logprobs[:, 0], entropy)


class _TiledLogprobs(torch.autograd.Function):
    """The forward pass keeps two numbers for each position; the backward pass computes the logits again.

    `targets` are (P, K). `low` (P, r) and `up` (V, r) of an adapter add `low @ up.T` to the logits; both None without.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        low: torch.Tensor | None,
        up: torch.Tensor | None,
        targets: torch.Tensor,
        head: _Head,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(hidden)
        log_sum = hidden.new_full((count,), -math.inf, dtype=torch.float32)
        entropy = torch.zeros_like(log_sum)
        target_logits = torch.zeros_like(targets, dtype=torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            for words in _slices(len(weight), head.chunk_vocabulary):
                for rows in _slices(count, head.chunk_positions):
                    added = _product(low, up, rows, words)
                    logits, _ = _tile(hidden[rows], weight[words], _part(bias, words), added, head)
                    index, is_here = _targets_in(targets[rows], words)
                    target_logits[rows] = torch.where(is_here, logits.gather(1, index), target_logits[rows])
                    tile_log_sum, tile_entropy = _log_sum_and_entropy(logits)
                    # The chain rule of entropy: of the choice of a tile, and of the choice within it.
                    total = torch.logaddexp(log_sum[rows], tile_log_sum)
                    before, now = torch.exp(log_sum[rows] - total), torch.exp(tile_log_sum - total)
                    choice = torch.special.entr(before) + torch.special.entr(now)
                    entropy[rows] = choice + before * entropy[rows] + now * tile_entropy
                    log_sum[rows] = total
        ctx.save_for_backward(hidden, weight, bias, low, up, targets, log_sum, entropy)
        ctx.set_materialize_grads(False)
        ctx.head = head
        return target_logits - log_sum[:, None], entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, low, up, targets, log_sum, entropy = ctx.saved_tensors
        head: _Head = ctx.head
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_low = None if low is None else torch.zeros_like(low, dtype=torch.float32)
        grad_up = None if up is None else torch.zeros_like(up, dtype=torch.float32)
        # Sums of many tiles are float32, whatever the dtype of the model is.
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for words in _slices(len(weight), head.chunk_vocabulary):
                word_weight = weight[words]
                word_grad = torch.zeros_like(word_weight, dtype=torch.float32) if needs_weight else None
                for rows in _slices(len(hidden), head.chunk_positions):
                    added = _product(low, up, rows, words)
                    logits, slope = _tile(hidden[rows], word_weight, _part(bias, words), added, head)
                    log_probabilities = logits.sub_(log_sum[rows, None])
                    gradient = _logit_gradient(
                        log_probabilities,
                        _part(grad_logprobs, rows),
                        _part(grad_entropy, rows),
                        entropy[rows],
                        _targets_in(targets[rows], words),
                    )
                    if slope is not None:
                        gradient *= slope
                    if head.scale != head.temperature:
                        gradient *= head.scale / head.temperature
                    if grad_bias is not None:
                        grad_bias[words] += gradient.sum(dim=0)
                    if grad_low is not None and grad_up is not None:
                        grad_low[rows] += gradient @ up[words].float()
                        grad_up[words] += gradient.T @ low[rows].float()
                    gradient = gradient.to(hidden.dtype)
                    if grad_hidden is not None:
                        _add_product(grad_hidden[rows], gradient, word_weight)
                    if word_grad is not None:
                        _add_product(word_grad, gradient.T, hidden[rows])
                if grad_weight is not None and word_grad is not None:
                    grad_weight[words] = word_grad
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            grad_weight,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None if grad_low is None else grad_low.to(low.dtype),
            None if grad_up is None else grad_up.to(up.dtype),
            None,
            None,
        )


def _product(low: torch.Tensor | None, up: torch.Tensor | None, rows: slice, words: slice) -> torch.Tensor | None:
    """What an adapter adds to the logits of some positions and vocabulary entries, float32."""
    return None if low is None or up is None else low[rows].float() @ up[words].float().T


def _tile(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    added: torch.Tensor | None,
    head: _Head,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The logits of some positions and vocabulary entries, float32, and the derivative of the soft-capping there."""
    logits = linear(hidden, weight, bias).float()
    if added is not None:
        logits += added
    slope = None
    if head.scale != 1:
        logits *= head.scale
    if head.softcap is not None:
        capped = logits.div_(head.softcap).tanh_()
        slope = 1 - capped.square()
        logits = capped * head.softcap
    if head.temperature != 1:
        logits /= head.temperature
    return logits, slope


def _log_sum_and_entropy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log(sum(exp(z))) of each row and the entropy of its softmax, with one exponential. `logits` is overwritten.

    With d = z - max(z) and s = sum(exp(d)), the entropy is log(s) - sum(exp(d) d) / s.
    """
    largest = logits.amax(dim=-1)
    difference = logits.sub_(largest[:, None])
    exponential = torch.exp(difference)
    total = exponential.sum(dim=-1)
    log_total = torch.log(total)
    return largest + log_total, log_total - difference.mul_(exponential).sum(dim=-1) / total


def _logit_gradient(
    log_probabilities: torch.Tensor,
    grad_logprobs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    entropy: torch.Tensor,
    targets: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """The gradient with respect to the logits of one tile. `log_probabilities` is overwritten.

    With p = softmax(z): d log p_t / d z_j = [j = t] - p_j, and d H / d z_j = -p_j (log p_j + H).
    """
    gradient = torch.exp(log_probabilities)
    index, is_here = targets
    factors = torch.zeros_like(is_here, dtype=torch.float32) if grad_logprobs is None else grad_logprobs
    factor = factors.sum(dim=1)
    if grad_entropy is None:
        gradient *= -factor[:, None]
    else:
        inner = log_probabilities.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(factor[:, None])
        gradient *= inner.neg_()
    return gradient.scatter_add_(1, index, torch.where(is_here, factors, 0))


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add `left @ right` to a float32 `total`."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _targets_in(targets: torch.Tensor, words: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """For each target its index among `words`, and whether it is one of them; the index of another is any.

    Without a selection by a mask, whose size a GPU would have to report before the next tile.
    """
    index = targets - words.start
    size = words.stop - words.start
    return index.clamp(0, size - 1), (index >= 0) & (index < size)


def _part(values: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    return None if values is None else values[rows]


def _check_tensors(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None
) -> None:
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ArgumentError("bias", _kind(bias), f"pass ({len(weight)},), one value for each row of weight, or None")
    is_wrong = targets.dim() not in (1, 2) or targets.shape[:1] != hidden.shape[:1]
    if is_wrong or targets.is_floating_point() or targets.dtype == torch.bool:
        rule = f"pass integers ({len(hidden)},), one token id for each position, or ({len(hidden)}, K) for K"
        raise ArgumentError("targets", _kind(targets), rule)
    outside = ((targets < 0) | (targets >= len(weight))).nonzero()
    if len(outside):
        position = outside[0].tolist()
        raise ArgumentError(
            f"targets[{', '.join(map(str, position))}]",
            int(targets[tuple(position)]),
            f"pass trained positions only, and ids from 0 to {len(weight) - 1}",
        )


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def token_logprobs(model: Any, batch: TrainingBatch) -> torch.Tensor:
    """log p(token t | tokens before t) float32 (B, T) where `loss_mask` is True, 0 elsewhere. Differentiable.

    Any model of transformers with an output layer of its own, through its own forward. Media are placed by range, so
    that a sampled placeholder token is text. The log-probabilities are computed in chunks, on trained positions only.
    Equal samples of a padded batch share one forward pass (episodes of a group often sample the same completion), and
    for Qwen3-VL an image that is in many rows passes the vision tower once. A packed batch of a model that cannot keep
    the sequences of a row apart (layers with a recurrent state) is computed in padded rows, with the same result.
    Phi-4-multimodal projects the sounds of a prompt with images in another way: what it sampled before the first image
    of a row is computed without that image, as it was sampled, in a row of its own.

    Raises `SampleError`, which names the row, for media and token ids that the model cannot take, `BatchError` for a
    `loss_mask` that was changed to train padding or the first token of a sample, and `UnsupportedModelError`, which
    says what was tried, for a model whose hidden states or output layer are not accessible.
    """
    return token_logprobs_and_entropy(model, batch).logprobs


def candidate_logprobs(model: Any, batch: TrainingBatch, candidates: torch.Tensor) -> torch.Tensor:
    """`token_logprobs` of K other tokens in the place of each: float32 (B, T, K), 0 outside of `loss_mask`.

        ids = torch.cat([batch.input_ids[..., None], batch.column("teacher_top_ids")], -1)
        logprobs = candidate_logprobs(model, batch, ids)  # [..., 0] are those of the sampled tokens

    `candidates` integers (B, T, K), of the batch's rows and columns. One forward pass, as for `token_logprobs`, with
    the same errors, and `ArgumentError` for candidates of another shape or outside of the vocabulary.
    """
    shape = tuple(batch.loss_mask.shape)
    if not isinstance(candidates, torch.Tensor) or candidates.dim() != 3 or tuple(candidates.shape[:2]) != shape:
        given = _kind(candidates) if isinstance(candidates, torch.Tensor) else candidates
        raise ArgumentError("candidates", given, f"pass integers {(*shape, 'K')}, such as a teacher's likeliest tokens")
    return _scored(model, batch, candidates, 1.0).logprobs


def token_logprobs_and_entropy(model: Any, batch: TrainingBatch, *, temperature: float = 1.0) -> SequenceLogprobs:
    """`token_logprobs`, and the entropy of the distribution that each token is drawn from: both float32 (B, T), in
    nats, 0 outside of `loss_mask`. The logits are divided by `temperature`. Differentiable, with the same errors.
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
    parts: list[TokenSequence] = []
    for index, sequence in enumerate(sequences):
        in_part = (number == index) & (position < length_heard_otherwise(forward.architecture.search, sequence.media))
        if bool(in_part.any()):
            number[in_part] = len(sequences) + len(parts)
            parts.append(beginning(sequence, int(position[in_part].max()) + 1))
    with_media = any(sample.media for sample in batch.samples)
    if batch.layout == "packed" and not parts and packing_of(forward.architecture, with_media=with_media):
        hidden = forward.hidden_states(batch_rows(batch))
        row, column = trained.nonzero(as_tuple=True)
    else:
        distinct, row_of = _distinct([*sequences, *parts])
        hidden = forward.hidden_states(padded_rows(distinct, pad_id=batch.pad_id))
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
