"""Estimates of an evaluation with their uncertainty, and the comparison of two evaluations.

Episodes of one task resemble each other, so that counting each as independent evidence gives intervals that
are too narrow. Every estimate here is therefore the mean over tasks of one value a task (the mean reward of
its episodes, its share of successes...), and its standard error is that of the differences between tasks: it
is clustered by task. Where all tasks have as many episodes, this equals the cluster-robust standard error of
the mean over episodes with the correction G / (G - 1) for G clusters (E. Miller, "Adding Error Bars to
Evals", arXiv:2411.00640, section on clustered questions; Cameron and Miller, "A Practitioner's Guide to
Cluster-Robust Inference", 2015, section VI).
"""

import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from renderers.errors import MissingExtraError
from rollouts.errors import ArgumentError
from rollouts.values import check_integer, mean_and_spread

#: The probability with which an interval holds the true value.
CONFIDENCE: Final = 0.95
#: Equal values differ by this share of their size where they were summed in another order.
_ROUNDING: Final = 1e-12


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks, its standard error, and the ends of its 95 % interval.

    `tasks` is the number of tasks that it is of. The last three are None for a single task, of which nothing
    is known about the differences between tasks; the ends are None, too, where no task differs from another
    and nothing else bounds the mean.
    """

    value: float
    tasks: int
    standard_error: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """How much larger the values of one run are than those of another.

    `difference` is the mean of second minus first: over the same tasks (`paired_difference`), or that of the
    runs' means (`unpaired_difference`), whose `tasks` are those of both. `p_value` is the probability of a
    difference at least as large, in either direction, if the runs did not differ; None where there are too
    few tasks to tell.
    """

    difference: Estimate
    p_value: float | None


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """The probability that at least one of `k` samples of a task succeeds.

    >>> pass_at_k(4, 1, 2)
    0.5

    The unbiased estimate from `successes` of `samples`: 1 - C(n - c, k) / C(n, k) (Chen et al., "Evaluating
    Large Language Models Trained on Code", arXiv:2107.03374, equation 1). Computed in integers, so that it is
    exact up to the rounding of the result. Raises `ArgumentError` unless 0 <= successes <= samples and 1 <= k
    <= samples.
    """
    _check_counts(samples, successes, k)
    drawn = math.comb(samples, k)
    return (drawn - math.comb(samples - successes, k)) / drawn


def pass_hat_k(samples: int, successes: int, k: int) -> float:
    """pass^k: the probability that all of `k` samples of a task succeed.

    >>> pass_hat_k(4, 3, 2)
    0.5

    The unbiased estimate from `successes` of `samples`: C(c, k) / C(n, k) (Yao et al., "tau-bench",
    arXiv:2406.12045, section 3). Raises as `pass_at_k` does.
    """
    _check_counts(samples, successes, k)
    return math.comb(successes, k) / math.comb(samples, k)


def _check_counts(samples: int, successes: int, k: int) -> None:
    check_integer("samples", samples)
    if not 0 <= successes <= samples:
        raise ArgumentError("successes", successes, f"pass a number from 0 to {samples}, the number of samples")
    if not 1 <= k <= samples:
        raise ArgumentError("k", k, f"pass a number from 1 to {samples}, the number of samples of the task")


def mean_of_tasks(values: np.ndarray) -> Estimate:
    """The mean of finite `values`, float64 (tasks,), with Student's t interval for tasks - 1 degrees of freedom.

    Equal values have no interval: it would have no width, as if the next task were known to have the same
    value. Raises `ArgumentError` without values.
    """
    if not len(values) or not np.isfinite(values).all():
        raise ArgumentError("values", values, "pass a finite value for each of at least one task")
    mean, spread = mean_and_spread(values)[:2]
    count = len(values)
    if count == 1:
        return Estimate(mean, 1)
    if np.ptp(values) <= _ROUNDING * np.abs(values).max():  # equal, but for rounding
        return Estimate(mean, count, 0.0)
    error = spread / math.sqrt(count - 1)  # `spread` divides by the count
    half = _t_quantile(count - 1) * error
    return Estimate(mean, count, error, mean - half, mean + half)


def rate_of_tasks(values: np.ndarray) -> Estimate:
    """The mean of `values` from 0 to 1, float64 (tasks,), each the share or the probability of something in one task.

    The interval is Wilson's with Student's t in place of the normal quantile, for as many independent trials
    as would have the standard error of the clustered mean (Korn and Graubard, "Confidence intervals for
    proportions with small expected number of positive counts estimated from survey data", 1998; Franco et
    al., "Comparative study of confidence intervals for proportions in complex sample surveys", 2019). It lies
    in 0 to 1. Where no task differs from another, the trials are the tasks: that all succeed does not say
    that the next one will. Raises `ArgumentError` without values.
    """
    mean = mean_of_tasks(values)
    if mean.standard_error is None:
        return mean
    value, count = min(max(mean.value, 0.0), 1.0), len(values)
    variance = value * (1 - value)
    trials = float(count)
    if variance and mean.standard_error:
        ratio = math.sqrt(variance) / mean.standard_error  # their squares may underflow
        trials = ratio * ratio  # infinite, where ** raises
    square = _t_quantile(count - 1) ** 2
    centre = value + square / (2 * trials)
    half = math.sqrt(square * variance / trials + (square / (2 * trials)) ** 2)
    low, high = ((centre + sign * half) / (1 + square / trials) for sign in (-1, 1))
    return Estimate(value, count, mean.standard_error, max(low, 0.0), min(high, 1.0))


def reward_of_tasks(values: np.ndarray) -> Estimate:
    """The mean of `values`, float64 (tasks,), each the mean reward of one task.

    Where all lie in 0 to 1 (but for rounding), as those of most scoring functions do, it has the interval of
    `rate_of_tasks`, which lies there too; else that of `mean_of_tasks`. Raises `ArgumentError` without
    values.
    """
    return rate_of_tasks(values) if _is_bounded(values) else mean_of_tasks(values)


def _is_bounded(values: np.ndarray) -> bool:
    return len(values) > 0 and bool(values.min() >= -_ROUNDING and values.max() <= 1 + _ROUNDING)


def paired_difference(first: np.ndarray, second: np.ndarray) -> Difference:
    """Compare the values of two runs on the same tasks: `second` minus `first`, float64 (tasks,) each, in one order.

    The p-value is that of the paired permutation test: under the hypothesis that the runs do not differ, the
    sign of each task's difference is chance (exact for up to 13 tasks that differ, else from 9,999 permutations
    with a fixed seed; for more than 500, that of the paired t-test). Of n tasks it is at least 2 ** (1 - n).
    Exchanging the runs does not change it.

    The interval is that of `mean_of_tasks` of the differences, within -1 to 1 where all values lie in 0 to 1.
    Where those are only 0 and 1, or no difference differs from another, it is Newcombe's hybrid score
    interval for pairs, of the intervals of `rate_of_tasks` and the correlation of the two runs between tasks,
    less his continuity correction (method 10 of R. G. Newcombe, "Improved confidence intervals for the
    difference between binomial proportions based on paired data", 1998). It has a width also where all tasks
    agree. Its correction is for outcomes that are one success or failure a task: for graded rewards, whose
    runs often correlate more than it allows, the interval would be several times as wide as the differences
    vary. Raises `ArgumentError` for rows of different lengths or without values.
    """
    if len(first) != len(second):
        raise ArgumentError("second", len(second), f"pass a value for each of the {len(first)} tasks of first")
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    differences = changes(first, second)
    estimate = mean_of_tasks(differences)
    if estimate.tasks == 1:
        return Difference(estimate, None)
    return Difference(_bounded(estimate, first, second, paired=True), _p_value(differences))


def changes(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """`second` minus `first`, float64 (tasks,) each: 0 where they are equal, but for rounding; NaN where one is NaN."""
    differences, sizes = second - first, np.abs([first, second])
    usual = np.median(sizes[sizes > 0]) if (sizes > 0).any() else 0.0  # also for a 0 that is the rest of a sum
    least = _ROUNDING * np.maximum(usual, sizes.max(axis=0))
    return np.where(np.abs(differences) <= least, 0.0, differences)


def unpaired_difference(first: np.ndarray, second: np.ndarray) -> Difference:
    """Compare the values of two runs on different tasks: the mean of `second` minus that of `first`, float64 (tasks,).

    The interval and the p-value are those of Welch's t-test (B. L. Welch, "The generalization of 'Student's'
    problem when several different population variances are involved", 1947): the variances of the two means
    are added, and are those between the tasks of each run; None where no two tasks of a run differ. Where all
    values lie in 0 to 1, the interval is Newcombe's hybrid score interval of those of `rate_of_tasks`, which
    lies in -1 to 1 and has a width (method 10 of "Interval estimation for the difference between independent
    proportions: comparison of eleven methods", 1998). Raises `ArgumentError` without values.
    """
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    runs = [mean_of_tasks(values) for values in (first, second)]
    value, tasks = runs[1].value - runs[0].value, runs[0].tasks + runs[1].tasks
    errors = [run.standard_error for run in runs if run.standard_error is not None]
    if len(errors) < len(runs):
        return Difference(Estimate(value, tasks), None)
    error = math.hypot(*sorted(errors))
    if not error:
        return Difference(_bounded(Estimate(value, tasks, 0.0), first, second, paired=False), None)
    shares = [(one / error) ** 4 / (run.tasks - 1) for one, run in zip(errors, runs, strict=True)]
    degrees = 1 / sum(shares)
    half = _t_quantile(degrees) * error
    p_value = 2 * float(scipy_stats().t.sf(abs(value) / error, degrees))
    estimate = Estimate(value, tasks, error, value - half, value + half)
    return Difference(_bounded(estimate, first, second, paired=False), p_value)


def _bounded(mean: Estimate, first: np.ndarray, second: np.ndarray, *, paired: bool) -> Estimate:
    """The mean difference with an interval within -1 to 1, where all values lie in 0 to 1; else as it is."""
    if not _is_bounded(first) or not _is_bounded(second):
        return mean
    first, second = np.clip(first, 0, 1), np.clip(second, 0, 1)
    is_of_differences = (
        paired
        and any(np.any(values % 1) for values in (first, second))
        and np.ptp(second - first) > _ROUNDING * max(first.max(), second.max())
    )
    low, high = mean.low, mean.high
    if low is None or high is None or not is_of_differences:
        low, high = _hybrid_interval(mean.value, first, second, paired=paired)
    return replace(mean, value=min(max(mean.value, -1.0), 1.0), low=max(low, -1.0), high=min(high, 1.0))


def _hybrid_interval(value: float, first: np.ndarray, second: np.ndarray, *, paired: bool) -> tuple[float, float]:
    runs = [rate_of_tasks(values) for values in (first, second)]
    deviations = math.prod(math.sqrt(run.value * (1 - run.value)) for run in runs)  # of single successes and failures
    correlation = 0.0
    if paired and deviations and runs[0].standard_error and runs[1].standard_error:
        # Divided by their maxima, small values have squares.
        correlation = float(np.corrcoef(first / first.max(), second / second.max())[0, 1])
        if correlation > 0:
            correlation = max(correlation - 1 / (2 * len(first) * deviations), 0.0)
    (below, above), (own_below, own_above) = (
        (run.value - (run.low or 0.0), (run.high or 0.0) - run.value) for run in runs
    )

    def half(one: float, other: float) -> float:
        return math.sqrt(max(one**2 - 2 * correlation * one * other + other**2, 0.0))

    return value - half(own_below, above), value + half(own_above, below)


def _p_value(differences: np.ndarray) -> float:
    changed = differences[differences != 0]
    if len(changed) < 2:  # both signs of one difference are as large
        return 1.0
    if np.ptp(changed) <= _ROUNDING * np.abs(changed).max():  # of all choices of signs, two have as large a sum
        return float(2.0 ** (1 - len(changed)))
    # Neither the order of the tasks nor that of the runs changes the numbers below.
    sizes, total = np.sort(np.abs(changed)), math.fsum(changed)
    if len(changed) > 500:  # the t-test gives the same to three digits, at once
        ascending = np.sort(differences if total > 0 else -differences)
        return float(scipy_stats().ttest_1samp(ascending, 0.0).pvalue)
    if is_exact := 2 ** len(changed) <= 9_999:
        signs = np.array(list(itertools.product((-1, 1), repeat=len(changed))))
    else:
        signs = np.random.default_rng(0).choice((-1, 1), (9_999, len(changed)))
    # Sums that are equal, but for rounding, are as large as each other.
    as_large = int((np.abs(signs @ sizes) >= abs(total) - _ROUNDING * sizes.sum()).sum())
    return as_large / len(signs) if is_exact else (as_large + 1) / (len(signs) + 1)


@functools.lru_cache(maxsize=1024)
def _t_quantile(degrees: float) -> float:
    return float(scipy_stats().t.ppf((1 + CONFIDENCE) / 2, degrees))


def scipy_stats() -> Any:
    """The module `scipy.stats`. Raises `MissingExtraError`."""
    try:
        from scipy import stats
    except ImportError as error:
        raise MissingExtraError("intervals of an evaluation", "eval", "scipy") from error
    return stats
