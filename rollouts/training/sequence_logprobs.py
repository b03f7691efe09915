"""Log-probabilities and entropy of tokens from hidden states, without the logits of a whole row in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from rollouts.errors import ArgumentError
from rollouts.numbers import finite_number, whole_number


class SequenceLogprobs(NamedTuple):
    """`logprobs` and `entropy`, float32 (P,), in nats."""

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
    softcap: float | None = None,
    scale: float = 1.0,
    temperature: float = 1.0,
    chunk_positions: int = 1024,
    chunk_vocabulary: int = 4096,
) -> SequenceLogprobs:
    """log p(target) at P positions, and the entropy of the distribution there. Differentiable once.

    `hidden` floating (P, H) are the last hidden states, `weight` (V, H) and `bias` (V,) the output layer in the same
    dtype, `targets` integers (P,) from 0 to V - 1. The logits are `hidden @ weight.T + bias` in that dtype, and from
    there on float32: times `scale`, then `softcap * tanh(logits / softcap)` (Gemma 2, arXiv:2408.00118, section 2),
    then divided by `temperature`.

    Logits exist only as tiles of `chunk_positions` x `chunk_vocabulary`; the backward pass computes each tile again
    (as Wijmans et al. 2024, arXiv:2411.09009, and Hsu et al. 2024, arXiv:2410.10989). Beyond the arguments and their
    gradients, that takes about three tiles of float32, and for hidden states of less precision one float32 (P, H), in
    which their gradient is summed. Raises `ArgumentError` for other shapes, dtypes and devices, and for values out of
    range.
    """
    _check_tensors(hidden, weight, targets, bias)
    head = _Head(
        _positive("scale", scale),
        None if softcap is None else _positive("softcap", softcap),
        _positive("temperature", temperature),
        _at_least_one("chunk_positions", chunk_positions),
        _at_least_one("chunk_vocabulary", chunk_vocabulary),
    )
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = bias if bias is None else bias.to(dtype)
    logprobs, entropy = _TiledLogprobs.apply(hidden, weight, bias, targets.long(), head)  # type: ignore[no-untyped-call]
    return SequenceLogprobs(logprobs, entropy)


class _TiledLogprobs(torch.autograd.Function):
    """The forward pass keeps two numbers for each position; the backward pass computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        head: _Head,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(hidden)
        log_sum = hidden.new_full((count,), -math.inf, dtype=torch.float32)
        entropy = torch.zeros_like(log_sum)
        target_logits = torch.zeros_like(log_sum)
        with torch.autocast(hidden.device.type, enabled=False):
            for words in _slices(len(weight), head.chunk_vocabulary):
                for rows in _slices(count, head.chunk_positions):
                    logits, _ = _tile(hidden[rows], weight[words], None if bias is None else bias[words], head)
                    index, is_here = _targets_in(targets[rows], words)
                    found = logits.gather(1, index[:, None])[:, 0]
                    target_logits[rows] = torch.where(is_here, found, target_logits[rows])
                    tile_log_sum, tile_entropy = _log_sum_and_entropy(logits)
                    # The chain rule of entropy: of the choice of a tile, and of the choice within it.
                    total = torch.logaddexp(log_sum[rows], tile_log_sum)
                    before, now = torch.exp(log_sum[rows] - total), torch.exp(tile_log_sum - total)
                    choice = torch.special.entr(before) + torch.special.entr(now)
                    entropy[rows] = choice + before * entropy[rows] + now * tile_entropy
                    log_sum[rows] = total
        ctx.save_for_backward(hidden, weight, bias, targets, log_sum, entropy)
        ctx.set_materialize_grads(False)
        ctx.head = head
        return target_logits - log_sum, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, log_sum, entropy = ctx.saved_tensors
        head: _Head = ctx.head
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Sums of many tiles are float32, whatever the dtype of the model is.
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for words in _slices(len(weight), head.chunk_vocabulary):
                word_weight = weight[words]
                word_grad = torch.zeros_like(word_weight, dtype=torch.float32) if needs_weight else None
                for rows in _slices(len(hidden), head.chunk_positions):
                    logits, slope = _tile(hidden[rows], word_weight, None if bias is None else bias[words], head)
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
            None,
            None,
        )


def _tile(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, head: _Head
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The logits of some positions and vocabulary entries, float32, and the derivative of the soft-capping there."""
    logits = linear(hidden, weight, bias).float()
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
    factor = torch.zeros_like(entropy) if grad_logprobs is None else grad_logprobs
    if grad_entropy is None:
        gradient *= -factor[:, None]
    else:
        inner = log_probabilities.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(factor[:, None])
        gradient *= inner.neg_()
    index, is_here = targets
    return gradient.scatter_add_(1, index[:, None], torch.where(is_here, factor, 0)[:, None])


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
    tensors = {"hidden": hidden, "weight": weight, "targets": targets, **({} if bias is None else {"bias": bias})}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(name, tensor, "pass a torch tensor")
    if hidden.dim() != 2 or not hidden.is_floating_point():
        raise ArgumentError("hidden", _kind(hidden), "pass hidden states (positions, hidden size) of a floating dtype")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1] or not len(weight):
        rule = f"pass the output layer's (vocabulary, {hidden.shape[1]}), the hidden size of `hidden`"
        raise ArgumentError("weight", _kind(weight), rule)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ArgumentError("bias", _kind(bias), f"pass ({len(weight)},), one value for each row of weight, or None")
    if targets.shape != hidden.shape[:1] or targets.is_floating_point() or targets.dtype == torch.bool:
        raise ArgumentError(
            "targets", _kind(targets), f"pass integers ({len(hidden)},), one token id for each position"
        )
    for name, tensor in tensors.items():
        if tensor.device != hidden.device:
            raise ArgumentError(f"the device of {name}", str(tensor.device), f"move it to {hidden.device}, as hidden")
        if name != "targets" and tensor.dtype != hidden.dtype and not torch.is_autocast_enabled(hidden.device.type):
            raise ArgumentError(f"the dtype of {name}", str(tensor.dtype), f"pass {hidden.dtype}, as hidden has")
    outside = ((targets < 0) | (targets >= len(weight))).nonzero()
    if len(outside):
        position = int(outside[0])
        raise ArgumentError(
            f"targets[{position}]",
            int(targets[position]),
            f"pass trained positions only, and ids from 0 to {len(weight) - 1}",
        )


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _positive(name: str, value: float) -> float:
    number = finite_number(value)
    if number is None or number <= 0:
        raise ArgumentError(name, value, "pass a finite number above 0")
    return number


def _at_least_one(name: str, value: int) -> int:
    number = whole_number(value)
    if number is None or number < 1:
        raise ArgumentError(name, value, "pass an integer of at least 1")
    return number
