"""Log-probabilities and entropy of tokens from hidden states, without the logits of a whole row in memory."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from rollouts.errors import ArgumentError
from rollouts.models.output_head import LowRank
from rollouts.values import check_integer, check_positive


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

    Logits exist only as tiles of `chunk_positions` x `chunk_vocabulary`; the backward pass computes each tile
    again (as Wijmans et al. 2024, arXiv:2411.09009, and Hsu et al. 2024, arXiv:2410.10989). Beyond the
    arguments and their gradients, that takes about three tiles of float32, and for hidden states of less
    precision one float32 (P, H), in which their gradient is summed. Raises `ArgumentError` for other targets,
    and for values out of range.
    """
    check_targets(hidden, weight, targets)
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
        # Autocast does not reach into a function of autograd.
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

    `targets` are (P, K). `low` (P, r) and `up` (V, r) of an adapter add `low @ up.T` to the logits; both None
    without.
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
        # log_total is that of logits less the largest so far. The sum of both would have the rounding of the
        # largest logit, 5e-7 where it is above 8, also in the log-probability of a token that is nearly certain.
        largest = hidden.new_full((count,), -math.inf, dtype=torch.float32)
        log_total = largest.clone()
        entropy = torch.zeros_like(largest)
        target_logits = torch.zeros_like(targets, dtype=torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            for words in _slices(len(weight), head.chunk_vocabulary):
                for rows in _slices(count, head.chunk_positions):
                    added = _product(low, up, rows, words)
                    logits, _ = _tile(hidden[rows], weight[words], _part(bias, words), added, head)
                    index, is_here = _targets_in(targets[rows], words)
                    # A target lies in one tile of the vocabulary; in the others the value so far stays.
                    target_logits[rows] = torch.where(is_here, logits.gather(1, index), target_logits[rows])
                    tile_largest, tile_total, tile_entropy = _log_sum_and_entropy(logits)
                    now_largest = torch.maximum(largest[rows], tile_largest)
                    before = log_total[rows] + (largest[rows] - now_largest)
                    now = tile_total + (tile_largest - now_largest)
                    largest[rows], log_total[rows] = now_largest, torch.logaddexp(before, now)
                    # The chain rule of entropy: of the choice of a tile, and of the choice within it.
                    before, now = (torch.exp(each - log_total[rows]) for each in (before, now))
                    choice = torch.special.entr(before) + torch.special.entr(now)
                    entropy[rows] = choice + before * entropy[rows] + now * tile_entropy
        ctx.save_for_backward(hidden, weight, bias, low, up, targets, largest + log_total, entropy)
        # An output without use then has None as its gradient, and no tensor of zeros.
        ctx.set_materialize_grads(False)
        ctx.head = head
        return target_logits - largest[:, None] - log_total[:, None], entropy

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
                    # In place, as are the steps below: a tile is the largest thing in memory here.
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
                    # The logits are scale * z / temperature; where both are equal, the factor is 1.
                    if head.scale != head.temperature:
                        gradient *= head.scale / head.temperature
                    if grad_bias is not None:
                        grad_bias[words] += gradient.sum(dim=0)
                    if grad_low is not None and grad_up is not None:
                        grad_low[rows] += gradient @ up[words].float()
                        grad_up[words] += gradient.T @ low[rows].float()
                    # Only now, after the sums in float32 above: the products below run in the dtype of the
                    # model.
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
        # The derivative of softcap * tanh(z / softcap): the factors cancel.
        slope = 1 - capped.square()
        logits = capped * head.softcap
    if head.temperature != 1:
        logits /= head.temperature
    return logits, slope


def _log_sum_and_entropy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """max(z) of each row, log(s), and the entropy of its softmax, with one exponential. Overwrites `logits`.

    With d = z - max(z) and s = sum(exp(d)), log(sum(exp(z))) is max(z) + log(s), and the entropy is log(s) -
    sum(exp(d) d) / s.
    """
    # Less the largest: exp overflows float32 from 89 on.
    largest = logits.amax(dim=-1)
    difference = logits.sub_(largest[:, None])
    exponential = torch.exp(difference)
    total = exponential.sum(dim=-1)
    log_total = torch.log(total)
    return largest, log_total, log_total - difference.mul_(exponential).sum(dim=-1) / total


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
    # Added, not set: among K targets of a position one id may stand twice.
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


def check_targets(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
    """Raise `ArgumentError` unless `targets` are ids below V, (P,) or (P, K)."""
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
