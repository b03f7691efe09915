"""Tests hypotheses about a mismatch: computes log-probabilities under each, and compares them with the reported ones.

If the log-probabilities that a hypothesis predicts are those that a side reported, to within arithmetic, then
that side had this fault, or one that computes the same numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from renderers import MediaItem
from renderers.media.item import PixelScale
from rollouts.errors import ArgumentError, SampleError, UnsupportedModelError
from rollouts.models.architecture import architecture
from rollouts.models.expert_routing import num_experts
from rollouts.training.batch import TrainingBatch
from rollouts.training.mismatch.compared import compare_tokens
from rollouts.training.mismatch.hypotheses import Cause, Hypothesis, built_in_hypotheses
from rollouts.training.mismatch.report import MismatchReport, mismatch_report
from rollouts.training.samples import TrainingSample
from rollouts.training.token_logprobs import token_logprobs, token_logprobs_and_entropy
from rollouts.values import check_integer, check_positive

Side = Literal["sampler", "trainer"]

_ROWS_AT_ONCE = 16


class HypothesisResult(NamedTuple):
    """What the log-probabilities under a hypothesis showed.

    `samples` are the examined samples that could have the fault, `explained` those of them whose differences
    it reduces to arithmetic: indices into the samples of the batch. `before` and `after` are the mean
    |difference| over the tokens of `samples`, in nats, without and with the fault. `skipped`: why the model
    could not compute it.
    """

    name: str
    cause: Cause
    samples: tuple[int, ...] = ()
    explained: tuple[int, ...] = ()
    before: float = 0.0
    after: float = 0.0
    skipped: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Diagnosis:
    """The result of `diagnose_mismatch`.

    `side` is the one that has the fault; None where no sample differs. `report` compares sampler and trainer.
    `tolerance` in nats. Of `affected` samples, those of `examined` were tested. `tested` has every
    hypothesis; `causes` those that explain samples, the one that explains most first; `unexplained` are the
    examined samples that none explains. Samples are indices into the samples of the batch.
    """

    side: Side | None
    report: MismatchReport
    tolerance: float
    affected: int = 0
    examined: tuple[int, ...] = ()
    tested: tuple[HypothesisResult, ...] = ()
    causes: tuple[HypothesisResult, ...] = ()
    unexplained: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Examined:
    """A sample, what the differing side reported for its trained tokens, and what was computed here, float64 (n,)."""

    index: int
    sample: TrainingSample
    reported: np.ndarray
    computed: np.ndarray

    @property
    def before(self) -> float:
        """The mean |difference|, infinite where a value is no finite number."""
        with np.errstate(invalid="ignore"):
            mean = self.after(self.computed)
        return mean if np.isfinite(mean) else np.inf

    def after(self, values: np.ndarray) -> float:
        """The mean |difference| to other values."""
        return float(np.abs(self.reported - values).mean())


def diagnose_mismatch(
    model: Any,
    batch: TrainingBatch,
    logprobs: torch.Tensor | None = None,
    *,
    hypotheses: Sequence[Hypothesis] = (),
    pixel_scale: PixelScale | None = None,
    tolerance: float | None = None,
    max_samples: int = 8,
) -> Diagnosis:
    """Find out which fault makes the sampler's log-probabilities of a batch differ from those of `model`.

    Computes the log-probabilities of the batch with `token_logprobs`, and then those of the `max_samples`
    samples with the largest mean difference under each hypothesis: images normalised twice, not at all or
    with the numbers of a published processor; images or sounds dropped, replaced by zeros, in another order
    or of other samples; the first token twice or missing; another temperature, fitted; for a mixture of
    experts, the experts that the sampler took, in samples that have `routed_experts`; and `hypotheses`, for
    example prompts of another template. `model` must have the weights that sampled the batch: other weights
    cannot be tested. It takes one forward pass of the batch and, for each examined sample, some 10 without
    media and up to 90 with them, without gradients.

    `logprobs` floating (B, T), if given, are those of the caller's own trainer. Where the sampler agrees with
    what is computed here and they do not, the trainer has the fault, and the hypotheses are tested on it.

    `pixel_scale` has factor, mean and standard deviation of the processor (preprocessor_config.json); pass it
    where items do not record them (`item.scale` is None), or pixels are not tested as normalised otherwise.

    A sample is affected if its mean |difference| is more than twice `tolerance`, in nats (by default 1e-4 for
    a model in float32, 0.02 for others), and explained if a hypothesis reduces it to at most `tolerance` or a
    tenth, whichever is more, and to at most half. A hypothesis is a cause if it explains at least 16 tokens.

    Raises `ArgumentError` for log-probabilities of another shape, for a tolerance that is not above 0, for
    `max_samples` below 1, and for a hypothesis whose variants have other trained tokens;
    `UnsupportedModelError` for a model that `token_logprobs` refuses.
    """
    default = 1e-4 if architecture(model).model.dtype in (torch.float32, torch.float64) else 0.02
    rule = "pass a number of nats above 0, or None"
    limit = default if tolerance is None else check_positive("tolerance", tolerance, rule)
    check_integer("max_samples", max_samples)
    with torch.no_grad():
        computed = token_logprobs(model, batch)
        side, report, reported = _differing_side(batch, computed, logprobs, 2 * limit)
        affected = sorted(_affected(batch, computed, reported, 2 * limit), key=lambda each: -each.before)
        examined = affected[:max_samples]
        if not examined:
            return Diagnosis(None, report, limit)
        items = list({item.mm_hash: item for sample in batch.samples for item, _ in sample.media}.values())
        tested = [
            _test(model, batch.pad_id, hypothesis, examined, items, limit)
            for hypothesis in (*hypotheses, *built_in_hypotheses(pixel_scale))
        ]
        tested.append(_test_temperature(model, batch.pad_id, examined, limit))
        if num_experts(architecture(model)):
            tested.append(_test_routing(model, batch.pad_id, examined, limit))
    causes, unexplained = _causes(tested, examined)
    numbers = tuple(each.index for each in examined)
    return Diagnosis(side, report, limit, len(affected), numbers, tuple(tested), causes, unexplained)


def diagnosis_text(diagnosis: Diagnosis) -> str:
    """The diagnosis for people: tested causes with their cures, what stays unexplained, and every hypothesis."""
    figures = diagnosis.report.statistics
    lines = [
        f"{diagnosis.affected} samples differ by more than {2 * diagnosis.tolerance:.0e} nats on average "
        f"({figures.tokens} tokens, mean {figures.mean_abs:.1e}, max {figures.max_abs:.1e})"
    ]
    if diagnosis.side is None:
        return lines[0]
    names = diagnosis.report.compared.names
    lines.append(f"{len(diagnosis.examined)} of them were examined; the fault is on the side of the {diagnosis.side}")
    for found in diagnosis.causes:
        explained = ", ".join(names[index] for index in found.explained)
        lines += [
            f"  {found.cause}: {found.name}, in {len(found.explained)} samples ({explained:.80})",
            f"    cure: {found.cause.cure}",
        ]
    if diagnosis.unexplained:
        lines.append(
            f"  {len(diagnosis.unexplained)} samples are explained by no hypothesis (other weights cannot be tested)"
        )
    lines += ["", f"{'tested hypothesis':56}  {'samples':>7}  {'explained':>9}  {'before':>8}  {'after':>8}"]
    for each in diagnosis.tested:
        numbers = f"{len(each.samples):>7}  {len(each.explained):>9}  {each.before:>8.1e}  {each.after:>8.1e}"
        lines.append(f"{each.name:56}  {f'not computed: {each.skipped:.60}' if each.skipped else numbers}")
    return "\n".join(lines)


def _differing_side(
    batch: TrainingBatch, computed: torch.Tensor, logprobs: torch.Tensor | None, limit: float
) -> tuple[Side, MismatchReport, torch.Tensor]:
    """The side that differs from `computed`, its report and its log-probabilities (B, T)."""
    report = mismatch_report(batch, computed)
    if (
        logprobs is None
        or report.mean_abs > limit
        or any(group.statistics.mean_abs > limit for group in report.by_sample)
    ):
        return "sampler", report, batch.logprobs
    return "trainer", mismatch_report(batch, logprobs), logprobs


def _affected(batch: TrainingBatch, computed: torch.Tensor, reported: torch.Tensor, limit: float) -> list[_Examined]:
    ours, theirs = compare_tokens(batch, computed), compare_tokens(batch, reported)
    ends = np.searchsorted(ours.sample, np.arange(len(batch.samples) + 1))
    each_sample = [
        _Examined(
            index,
            sample,
            theirs.trainer[start:end].astype(np.float64),
            ours.trainer[start:end].astype(np.float64),
        )
        for index, (sample, start, end) in enumerate(zip(batch.samples, ends[:-1], ends[1:], strict=True))
        if end > start
    ]
    return [each for each in each_sample if each.before > limit]


def _test(
    model: Any,
    pad_id: int,
    hypothesis: Hypothesis,
    examined: Sequence[_Examined],
    items: Sequence[MediaItem],
    tolerance: float,
) -> HypothesisResult:
    variants = [(each, variant) for each in examined for variant in _variants(hypothesis, each.sample, items)]
    try:
        scored = _logprobs(model, pad_id, [variant for _, variant in variants])
    except (SampleError, UnsupportedModelError) as error:
        return HypothesisResult(hypothesis.name, hypothesis.cause, skipped=str(error))
    least: dict[int, float] = {}
    for (each, _), values in zip(variants, scored, strict=True):
        least[each.index] = min(least.get(each.index, np.inf), each.after(values))
    return _result(hypothesis.name, hypothesis.cause, examined, least, tolerance)


def _test_temperature(model: Any, pad_id: int, examined: Sequence[_Examined], tolerance: float) -> HypothesisResult:
    finite = [each for each in examined if np.isfinite(each.before)]
    if not finite:
        return HypothesisResult("another temperature", Cause.WRONG_TEMPERATURE)
    batch = TrainingBatch.from_samples([each.sample for each in finite], pad_id=pad_id)
    temperature, logprobs = _fitted_temperature(model, batch, np.concatenate([each.reported for each in finite]))
    parts = np.split(logprobs, np.cumsum([len(each.reported) for each in finite])[:-1])
    least = {each.index: each.after(values) for each, values in zip(finite, parts, strict=True)}
    name = f"a temperature of {temperature:.3g}"
    return _result(name, Cause.WRONG_TEMPERATURE, examined, least, tolerance)


def _test_routing(model: Any, pad_id: int, examined: Sequence[_Examined], tolerance: float) -> HypothesisResult:
    """Whether the log-probabilities are those of the experts that the sampler took, in samples that record them."""
    name, recorded = "the sampler's experts", [each for each in examined if each.sample.routed_experts is not None]
    if not recorded:
        reason = "the samples have no routed_experts; let the server report them"
        return HypothesisResult(name, Cause.MOE_ROUTING, skipped=reason)
    try:
        scored = _logprobs(model, pad_id, [each.sample for each in recorded], routed_experts=True)
    except (ArgumentError, SampleError, UnsupportedModelError) as error:
        return HypothesisResult(name, Cause.MOE_ROUTING, skipped=str(error))
    least = {each.index: each.after(logprobs) for each, logprobs in zip(recorded, scored, strict=True)}
    return _result(name, Cause.MOE_ROUTING, examined, least, tolerance)


def _result(
    name: str, cause: Cause, examined: Sequence[_Examined], least: Mapping[int, float], tolerance: float
) -> HypothesisResult:
    """`least` has the smallest mean |difference| of each sample that can have the fault, by its index."""
    tested = [each for each in examined if each.index in least]
    tokens = [len(each.reported) for each in tested]
    after = [least[each.index] for each in tested]
    return HypothesisResult(
        name,
        cause,
        samples=tuple(each.index for each in tested),
        explained=tuple(
            each.index
            for each, value in zip(tested, after, strict=True)
            # A sample that is not finite has no size of its difference that a hypothesis could reduce.
            if np.isfinite(each.before) and value <= min(max(tolerance, each.before / 10), each.before / 2)
        ),
        before=float(np.average([each.before for each in tested], weights=tokens)) if tested else 0.0,
        after=float(np.average(after, weights=tokens)) if tested else 0.0,
    )


def _causes(
    tested: Sequence[HypothesisResult], examined: Sequence[_Examined]
) -> tuple[tuple[HypothesisResult, ...], tuple[int, ...]]:
    """The hypotheses that explain samples, each those that none before it explains; and the samples that remain."""
    tokens = {each.index: len(each.reported) for each in examined}
    causes: list[HypothesisResult] = []
    while True:
        of_rest = [(each, tuple(index for index in each.explained if index in tokens)) for each in tested]
        # Greedy: two faults in one batch are found one after the other, each by what the first leaves.
        found, explained = max(of_rest, key=lambda pair: (len(pair[1]), -pair[0].after))
        # A hypothesis must explain this many tokens: fewer can agree by chance.
        if sum(tokens[index] for index in explained) < 16:
            return tuple(causes), tuple(tokens)
        causes.append(found._replace(explained=explained))
        for index in explained:
            del tokens[index]


def _logprobs(
    model: Any, pad_id: int, samples: Sequence[TrainingSample], *, routed_experts: bool = False
) -> list[np.ndarray]:
    """The log-probabilities of the trained tokens of each sample, float64."""
    scored: list[np.ndarray] = []
    for start in range(0, len(samples), _ROWS_AT_ONCE):
        batch = TrainingBatch.from_samples(samples[start : start + _ROWS_AT_ONCE], pad_id=pad_id)
        tokens = compare_tokens(batch, token_logprobs(model, batch, routed_experts=routed_experts))
        ends = np.searchsorted(tokens.sample, np.arange(1, len(batch.samples)))
        scored += np.split(tokens.trainer.astype(np.float64), ends)
    return scored


def _variants(hypothesis: Hypothesis, sample: TrainingSample, items: Sequence[MediaItem]) -> Sequence[TrainingSample]:
    variants = hypothesis.variants(sample, items)
    trained = sample.token_ids[sample.loss_mask]
    for variant in variants:
        theirs = variant.token_ids[variant.loss_mask]
        if not np.array_equal(trained, theirs):
            rule = f"keep the {len(trained)} trained tokens of sample {sample.name} (replace_tokens does)"
            raise ArgumentError(f"a variant of {hypothesis.name!r}", f"{len(theirs)} trained tokens", rule)
    return variants


_LARGEST_TEMPERATURE = 20.0


def _fitted_temperature(model: Any, batch: TrainingBatch, reported: np.ndarray) -> tuple[float, np.ndarray]:
    """The temperature T that brings log softmax(z / T) of the trained tokens closest to `reported` float64
    (n,), and their log-probabilities at it, float64 (n,).

    Least squares over b = 1 / T by Gauss-Newton: the derivative of log softmax(b z) at the token y is z_y
    minus the mean of z, which is (log-probability + entropy) / b. One forward pass a step, at most 8, between
    T = 0.05 and 20.
    """
    inverse, best = 1.0, (1.0, np.empty(0))
    least = np.inf
    for _ in range(8):
        scored = token_logprobs_and_entropy(model, batch, temperature=1 / inverse)
        logprobs = compare_tokens(batch, scored.logprobs).trainer.astype(np.float64)
        entropy = compare_tokens(batch, scored.entropy).trainer
        rest = reported - logprobs
        # The best step so far, because Gauss-Newton may overshoot.
        if (error := float(rest @ rest)) < least:
            least, best = error, (1 / inverse, logprobs)
        slope = (logprobs + entropy) / inverse
        if not (curvature := float(slope @ slope)):
            return best
        step = float(slope @ rest) / curvature
        # Within a factor of 4 a step: the linear model holds near its point only.
        inverse = float(
            np.clip(inverse + step, max(inverse / 4, 1 / _LARGEST_TEMPERATURE), min(4 * inverse, _LARGEST_TEMPERATURE))
        )
        if abs(step) < 1e-5 * inverse:
            return best
    return best
