"""The rows that a `Trainer` computes: their checks, and the passes that they are divided into."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from renderers.placement import PlacedItem, item_placement_error
from rollouts.engines.protocol import NO_TOKEN
from rollouts.engines.token_checks import float32_array
from rollouts.errors import ArgumentError, SampleError, short_repr
from rollouts.models.architecture import Architecture
from rollouts.models.placed_rows import TokenRow, placed_rows
from rollouts.models.placeholders import check_placeholders, check_token_ids
from rollouts.models.prefix_tree import Tree
from rollouts.training.correction import has_weights, rollout_correction
from rollouts.training.named_losses import CANDIDATES, CORRECTION_WEIGHTS, NamedLoss, named_loss
from rollouts.training.samples import (
    TrainingSample,
    check_column,
    check_comparable_with_teacher,
    check_kept_ids,
)
from rollouts.training.truncation import tower_rows, trees_within
from rollouts.trajectory.token_node import SAMPLING_MASK

#: What each row, or none, has besides the inputs of its loss, where a correction is made.
CORRECTED = frozenset({"sampler_logprobs", "lags"})
_WIDE = CANDIDATES | {SAMPLING_MASK}


@dataclass(frozen=True, slots=True, eq=False)
class Datum(TokenRow):
    """A row of n tokens with a target for each.

    `token_ids` integers (n,), with `media` and the ranges of their placeholder tokens; `target_ids` integers
    (n,): the model predicts target t from the tokens 0 to t, so that it usually is token t + 1. `inputs` are
    what the loss takes for each target, finite numbers (n,) by name: `weights`, `logprobs`, `advantages`,
    `mask`, `sequence_ratio_mask`, `teacher_logprobs`; and (n, k), with one k for all rows, `teacher_top_ids`
    and `teacher_top_logprobs`, and of any k the `sampling_mask` of a sample. With a correction also
    `sampler_logprobs` and `lags`, or with one that the caller has made its `correction_weights`. For
    "cross_entropy", `target_ids` and `weights` may be (n, k): k targets for each token, with a weight each.
    `experts` integers (n, layers, experts a token): those that computed each token when it was sampled, for
    `Trainer(routed_experts=True)`.

    A `Trainer` checks it, and names it in errors by its place in the list: `data[3]`.
    """

    token_ids: np.ndarray
    target_ids: np.ndarray
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    media: Sequence[PlacedItem] = ()
    name: str = ""
    experts: np.ndarray | None = None


def datum_from_sample(sample: TrainingSample, loss: str) -> Datum:
    """The datum of a sample of n tokens for a loss of `Trainer.forward_backward`: n - 1 tokens predict the last n - 1.

        data = [datum_from_sample(sample, "ppo") for sample in samples]

    The weights of `cross_entropy` are the advantages, 1 in a supervised sample, and its log-probabilities are
    among all ids, whatever the sampler kept; tokens outside of the loss mask have no part in any loss. Losses
    with a teacher need its columns (`with_teacher`). Raises `SampleError` for a sample of one token, for one
    whose last token belongs to a medium, and for one without a column that the loss needs.
    """
    count, known = len(sample) - 1, named_loss(loss)
    if count < 1:
        raise SampleError(sample.name, f"it has {len(sample)} tokens, and a target needs two; leave it out")
    if sample.media and sample.media[-1][1].end > count:
        kind = sample.media[-1][0].modality
        raise SampleError(sample.name, f"its last token belongs to an {kind}, which cannot be cut; leave it out")
    mask = sample.loss_mask[1:]
    if loss == "reverse_kl":
        check_comparable_with_teacher(sample)
    columns = {
        "weights": np.where(mask, sample.advantages[1:], 0),
        "advantages": np.where(mask, sample.advantages[1:], 0),
        "logprobs": np.where(mask, sample.logprobs[1:], 0),
        "mask": mask,
        "sequence_ratio_mask": mask,
    }
    names = sorted(known.required | known.optional)
    for name in names:
        if name not in columns:
            if (column := getattr(sample, name)) is None:
                raise SampleError(sample.name, f"the loss {loss!r} needs its {name}; add them with with_teacher")
            columns[name] = np.where(mask if column.ndim == 1 else mask[:, None], column[1:], 0)
    inputs = {name: columns[name].astype(np.float32) for name in names}
    if sample.sampling_mask is not None and "logprobs" in known.required:
        inputs[SAMPLING_MASK] = sample.sampling_mask[1:]
    experts = None if sample.routed_experts is None else sample.routed_experts[1:]
    return Datum(sample.token_ids[:count], sample.token_ids[1:], inputs, sample.media, experts=experts)


def check_data(
    data: Sequence[Datum],
    loss: NamedLoss,
    architecture: Architecture,
    vocabulary: int,
    *,
    routed_experts: bool = False,
) -> list[Datum]:
    """The rows with their names, after a check of everything that can be known without a forward pass.

    Without `routed_experts` they have no experts.

    Raises `SampleError`.
    """
    if not data:
        raise ArgumentError("data", data, "pass a list with at least one Datum")
    longest = architecture.max_length
    named = [
        replace(datum, name=f"data[{index}]", experts=datum.experts if routed_experts else None)
        for index, datum in enumerate(data)
    ]
    for datum in named:
        check_column(datum.name, "token_ids", datum.token_ids, "iu", ("n",))
        if not (count := len(datum)):
            raise SampleError(datum.name, "it has no tokens; leave it out")
        if longest is not None and count > longest:
            raise SampleError(datum.name, f"it has {count} tokens, and the model reads {longest}; shorten it")
        several = loss.takes_several and isinstance(datum.target_ids, np.ndarray) and datum.target_ids.ndim == 2
        check_column(datum.name, "target_ids", datum.target_ids, "iu", (count, "k") if several else (count,))
        if datum.target_ids.size > count * vocabulary:
            reason = f"it has {datum.target_ids.shape[1]} targets for each token, and the model {vocabulary} ids"
            raise SampleError(datum.name, f"{reason}; pass at most as many")
        wrong = (datum.target_ids < 0) | (datum.target_ids >= vocabulary)
        if wrong.any():
            place = tuple(np.argwhere(wrong)[0].tolist())
            target = f"target {', '.join(map(str, place))} is {datum.target_ids[place]}"
            raise SampleError(datum.name, f"{target}; the ids of the model are from 0 to {vocabulary - 1}")
        _check_inputs(datum.name, datum.inputs, loss, datum.target_ids.shape)
        if loss.has_candidates:
            _check_candidates(datum.name, datum.inputs, named[0].inputs)
        for key, least in (("teacher_top_ids", 0), (SAMPLING_MASK, NO_TOKEN)):
            ids = datum.inputs.get(key, np.empty(0))
            if ids.size and not least <= ids.min() <= ids.max() < vocabulary:
                wrong = ids.max() if ids.max() >= vocabulary else ids.min()
                raise SampleError(datum.name, f"{key} has {wrong}; the ids of the model are from 0 to {vocabulary - 1}")
        if SAMPLING_MASK in datum.inputs:
            check_kept_ids(datum.name, datum.target_ids, datum.inputs[SAMPLING_MASK])
        if (error := item_placement_error(datum.media, count)) is not None:
            raise SampleError(datum.name, f"{error}; place each item at as many tokens as its processor makes of it")
        if routed_experts:
            if datum.experts is None:
                reason = "it has no experts; let the server report them, or leave out routed_experts=True"
                raise SampleError(datum.name, reason)
            check_column(datum.name, "experts", datum.experts, "iu", (count, "layers", "experts a token"))
    rows = placed_rows(named, pad_id=architecture.neutral_id, layout="packed")
    check_placeholders(architecture, rows)
    check_token_ids(architecture, rows)
    return named


def _check_inputs(name: str, inputs: Mapping[str, np.ndarray], loss: NamedLoss, targets: tuple[int, ...]) -> None:
    of_samplers = {SAMPLING_MASK, CORRECTION_WEIGHTS} if "logprobs" in loss.required else set()
    known = loss.required | loss.optional | of_samplers
    if unknown := sorted(inputs.keys() - known, key=str):
        taken = f"it takes {', '.join(sorted(known))}"
        raise SampleError(name, f"the loss has no input {short_repr(unknown[0])}; {taken}")
    if missing := sorted(loss.required - inputs.keys()):
        raise SampleError(name, f"the loss needs the input {missing[0]!r}, one number for each target")
    for key, values in inputs.items():
        check_column(name, key, values, "fiub", (*targets, "k") if key in _WIDE else targets)
        if not (finite := np.isfinite(float32_array(values))).all():
            place = tuple(np.argwhere(~finite)[0].tolist())
            raise SampleError(name, f"{key}[{', '.join(map(str, place))}] is {values[place]}; pass finite numbers")
    if "sequence_ratio_mask" in inputs:
        outside = (inputs["sequence_ratio_mask"] == 0) & (inputs["advantages"] != 0)
        if outside.any():
            reason = f"token {int(outside.argmax())} has an advantage, and sequence_ratio_mask is 0 there"
            raise SampleError(name, f"{reason}; pass an advantage of 0 outside of the sampled tokens")


def _check_candidates(name: str, inputs: Mapping[str, np.ndarray], of_first: Mapping[str, np.ndarray]) -> None:
    """Each row has as many ids of a teacher, with a log-probability for each."""
    ids, logprobs = inputs["teacher_top_ids"], inputs["teacher_top_logprobs"]
    if ids.shape != logprobs.shape or ids.shape[1:] != of_first["teacher_top_ids"].shape[1:]:
        reason = f"teacher_top_ids is {ids.shape} and teacher_top_logprobs {logprobs.shape}"
        raise SampleError(name, f"{reason}; pass both (n, k), with the k of the first row")


def corrected_data(
    data: Sequence[Datum],
    loss: NamedLoss,
    options: Mapping[str, Any],
    forward: Callable[[], Any],
) -> tuple[list[Datum], dict[str, float]]:
    """The rows as `rollout_correction` leaves them to a loss, and its figures.

    `forward` computes the rows, for the `logprobs` of the trained model, where the loss requires no
    `sampler_logprobs` beside their own. Raises `ArgumentError`.
    """
    inputs = [loss.inputs_of(datum.inputs) for datum in data]
    logprobs = [each["logprobs"] for each in inputs]
    policy, sampler = logprobs, [each.get("sampler_logprobs", each["logprobs"]) for each in inputs]
    if "sampler_logprobs" not in loss.required:
        with torch.no_grad():
            policy = forward().logprobs
        if loss.has_ratio and has_weights(options):
            logprobs = policy  # the loss's own ratio to the sampler would be a second weight
    lengths = [len(datum) for datum in data]
    correction = rollout_correction(
        _one_row(policy),
        _one_row(sampler),
        _one_row([each[loss.mask_name] for each in inputs]) != 0,
        torch.from_numpy(np.repeat(np.arange(len(data)), lengths))[None],
        options,
        lags=_one_row([each["lags"] for each in inputs]) if "lags" in loss.required else None,
    )
    parts = [np.split(each[0].numpy(), np.cumsum(lengths)[:-1]) for each in (correction.weights, correction.mask)]
    corrected = []
    for datum, each, old, weights, mask in zip(data, inputs, logprobs, *parts, strict=True):
        kept = {"advantages": np.where(mask, each["advantages"], 0), loss.mask_name: mask}
        corrected.append(replace(datum, inputs={**each, **kept, "logprobs": old, CORRECTION_WEIGHTS: weights}))
    return corrected, correction.figures


def _one_row(columns: Sequence[np.ndarray]) -> torch.Tensor:
    """Values of all rows, one after another, float32 (1, n)."""
    return torch.from_numpy(np.concatenate(columns).astype(np.float32))[None]


def passes(
    data: Sequence[Datum], trees: Sequence[Tree], tokens_per_pass: int, patches_per_pass: int
) -> list[list[int]]:
    """The numbers of the rows of each forward pass: trees of similar sizes, within two budgets.

    A pass has at most `tokens_per_pass` tokens with its padding, and `patches_per_pass` patches and frames; a
    tree that is larger than a budget has a pass of its own.
    """
    found: list[list[int]] = []
    first, count, patches = 0, 0, 0
    for tree in sorted(trees_within(trees, data, patches_per_pass), key=lambda tree: -tree.tokens):  # stable
        own = sum(tower_rows(item) for item, _ in tree.items(data))
        if found and (count + 1) * first <= tokens_per_pass and patches + own <= patches_per_pass:
            found[-1].extend(tree.numbers)
            count, patches = count + 1, patches + own
        else:
            found.append(list(tree.numbers))
            first, count, patches = tree.tokens, 1, own
    return found
