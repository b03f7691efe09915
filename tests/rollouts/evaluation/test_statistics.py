"""Estimates of evaluations: against closed forms, enumerations, other implementations and simulations."""

import itertools
import math
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from rollouts.errors import ArgumentError
from rollouts.evaluation import (
    Difference,
    mean_of_tasks,
    paired_difference,
    pass_at_k,
    pass_hat_k,
    rate_of_tasks,
    reward_of_tasks,
    unpaired_difference,
)
from rollouts.evaluation.statistics import changes


def shares_of_subsets(samples: int, successes: int, k: int) -> tuple[Fraction, Fraction]:
    """Of all choices of k samples: the share with a success, and the share of nothing but successes."""
    outcomes = [index < successes for index in range(samples)]
    chosen = list(itertools.combinations(outcomes, k))
    return Fraction(sum(map(any, chosen)), len(chosen)), Fraction(sum(map(all, chosen)), len(chosen))


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_and_pass_hat_k_are_shares_of_all_choices_of_k_samples(samples: int) -> None:
    for successes in range(samples + 1):
        for k in range(1, samples + 1):
            any_succeeds, all_succeed = shares_of_subsets(samples, successes, k)
            assert pass_at_k(samples, successes, k) == float(any_succeeds)
            assert pass_hat_k(samples, successes, k) == float(all_succeed)


def test_both_are_exact_where_products_of_floats_are_not() -> None:
    assert pass_hat_k(10_000, 9_999, 5_000) == 0.5
    assert pass_at_k(10_000, 1, 5_000) == 0.5
    assert pass_at_k(2_000, 1_000, 1_999) == 1.0


@pytest.mark.parametrize(("samples", "successes", "k"), [(0, 0, 1), (4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_counts_that_cannot_be_are_refused(samples: int, successes: int, k: int) -> None:
    for estimate in (pass_at_k, pass_hat_k):
        with pytest.raises(ArgumentError, match=r"pass (a number from|an integer of at least)"):
            estimate(samples, successes, k)


def test_the_mean_has_the_interval_of_students_t() -> None:
    values = np.array([0.0, 1.0, 0.5, 0.25])
    estimate = mean_of_tasks(values)
    expected = stats.t.interval(0.95, 3, loc=values.mean(), scale=stats.sem(values))
    assert (estimate.value, estimate.tasks) == (0.4375, 4)
    assert estimate.standard_error == pytest.approx(stats.sem(values), rel=1e-12)
    assert (estimate.low, estimate.high) == pytest.approx(expected, rel=1e-12)


@given(st.integers(2, 30), st.integers(1, 6), st.randoms(use_true_random=False))
def test_the_standard_error_is_the_cluster_robust_one_of_the_mean_over_episodes(
    tasks: int, samples: int, random: object
) -> None:
    rng = np.random.default_rng(random.getrandbits(32))  # type: ignore[attr-defined]
    rewards = rng.normal(size=(tasks, samples)) + rng.normal(size=(tasks, 1))
    residuals = rewards - rewards.mean()
    # The sandwich estimator of a regression on a constant, summed pair by pair within each task.
    meat = sum(
        residuals[task, i] * residuals[task, j] for task in range(tasks) for i in range(samples) for j in range(samples)
    )
    variance = meat / (tasks * samples) ** 2 * tasks / (tasks - 1)
    assert mean_of_tasks(rewards.mean(axis=1)).standard_error == pytest.approx(math.sqrt(variance), rel=1e-9)


def test_nothing_is_said_of_the_uncertainty_of_one_task() -> None:
    for estimate in (mean_of_tasks(np.array([0.5])), rate_of_tasks(np.array([0.5]))):
        assert (estimate.value, estimate.tasks) == (0.5, 1)
        assert (estimate.standard_error, estimate.low, estimate.high) == (None, None, None)


@pytest.mark.parametrize("rate", [0.0, 1.0, 0.1])
def test_tasks_that_all_agree_do_not_make_a_rate_certain(rate: float) -> None:
    few, many = (rate_of_tasks(np.full(tasks, rate)) for tasks in (5, 500))
    widths = [one.high - one.low for one in (few, many)]  # type: ignore[operator]
    assert few.value == pytest.approx(rate)
    assert widths[0] > 0.3
    assert 0.005 < widths[1] < 0.06
    assert all(0 <= one.low <= rate <= one.high <= 1 for one in (few, many))  # type: ignore[operator]


COVERAGES = [
    pytest.param(100, 4, 2.0, 3.0, id="tasks of middling difficulty"),
    pytest.param(200, 1, 1.0, 2.0, id="one sample a task"),
    pytest.param(50, 8, 0.3, 0.3, id="tasks that are easy or hopeless"),
    pytest.param(60, 4, 8.0, 1.0, id="nearly everything is right"),
    pytest.param(400, 2, 1.0, 30.0, id="nearly everything is wrong"),
]


@pytest.mark.parametrize(("tasks", "samples", "a", "b"), COVERAGES)
def test_intervals_hold_the_truth_in_93_to_97_of_100_simulated_evaluations(
    tasks: int, samples: int, a: float, b: float
) -> None:
    rng = np.random.default_rng(30)
    p = rng.beta(a, b, size=(1_000, tasks))  # each task succeeds with its own probability
    held = 0
    for counts in rng.binomial(samples, p):
        rate = rate_of_tasks(counts / samples)
        held += rate.low <= a / (a + b) <= rate.high  # type: ignore[operator]
    assert 930 <= held <= 970


def outcomes(*counts: int) -> tuple[np.ndarray, np.ndarray]:
    """The outcomes of two runs, of so many pairs 1 1, 0 1, 1 0 and 0 0."""
    return np.repeat([1.0, 0.0, 1.0, 0.0], counts), np.repeat([1.0, 1.0, 0.0, 0.0], counts)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [((36, 12, 2, 0), (0.0569, 0.3404)), ((54, 0, 0, 0), (-0.0664, 0.0664)), ((20, 0, 0, 20), (-0.0480, 0.0480))],
)
def test_paired_differences_have_newcombes_interval(counts: tuple[int, ...], expected: tuple[float, float]) -> None:
    # Newcombe has the normal quantile and the variance with n in place of n - 1.
    found = paired_difference(*outcomes(*counts)).difference
    assert (found.low, found.high) == pytest.approx(expected, abs=0.006)


def test_unpaired_differences_have_newcombes_interval() -> None:
    first, second = np.repeat([1.0, 0.0], [48, 32]), np.repeat([1.0, 0.0], [56, 14])
    found = unpaired_difference(first, second).difference
    assert (found.low, found.high) == pytest.approx((0.0524, 0.3339), abs=0.004)


rates = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)) | st.sampled_from([(0.0, 1.0), (1.0, 1.0)]), min_size=2)


@given(rates)
@example([(1.1125369292536007e-308, 0.0), (0.0, 1.0)])
def test_differences_of_rates_have_intervals_within_their_range_that_hold_the_estimate(pairs: list) -> None:
    first, second = np.array(pairs).T
    for difference in (paired_difference, unpaired_difference):
        found = difference(first, second).difference
        assert -1 <= found.low <= found.value <= found.high <= 1  # type: ignore[operator]


@pytest.mark.parametrize(("tasks", "samples", "a", "b"), [*COVERAGES, pytest.param(8, 4, 1, 1, id="few tasks")])
def test_intervals_of_differences_hold_the_truth_at_least_as_often_as_they_say(
    tasks: int, samples: int, a: float, b: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollouts.evaluation.statistics._p_value", lambda differences: 1.0)  # 5 million permutations
    rng = np.random.default_rng(33)
    p = rng.beta(a, b, size=(500, tasks))
    truth = 0.1 * (1 - a / (a + b))
    held = np.zeros(2)
    for first, second in zip(rng.binomial(samples, p), rng.binomial(samples, p + 0.1 * (1 - p)), strict=True):
        for place, difference in enumerate((paired_difference, unpaired_difference)):
            found = difference(first / samples, second / samples).difference
            held[place] += found.low <= truth <= found.high  # type: ignore[operator]
    assert held.min() >= 465


@pytest.mark.parametrize("spread", [0.01, 0.1])
def test_graded_differences_of_tasks_that_correlate_have_the_interval_of_their_differences(spread: float) -> None:
    rng = np.random.default_rng(34)
    first = rng.beta(2, 2, size=(500, 10)) * 0.6 + 0.2
    second = np.clip(first + rng.normal(0.02, spread, size=first.shape), 0, 1)
    held = 0
    for one, other in zip(first, second, strict=True):
        found = paired_difference(one, other).difference
        assert (found.low, found.high) == pytest.approx(stats.ttest_rel(other, one).confidence_interval(), rel=1e-9)
        held += found.low <= 0.02 <= found.high  # type: ignore[operator]
    assert held >= 465


def test_paired_intervals_have_a_width_and_are_opposite_where_the_runs_are_exchanged() -> None:
    rng = np.random.default_rng(35)
    graded = rng.uniform(size=6)
    for first, second in [
        (graded, np.roll(graded, 1)),
        (graded, graded),
        (graded * 0.9, graded * 0.9 + 0.1),
        (np.full(3, 0.1 + 0.2), np.array([0.3, 0.1 + 0.2, 0.3])),  # equal, but for rounding
        (np.array([0.0, 0.0, 0.01]), np.ones(3)),
        outcomes(3, 1, 0, 2),
        outcomes(0, 4, 0, 0),
    ]:
        found, exchanged = (paired_difference(*pair).difference for pair in ((first, second), (second, first)))
        assert -1 <= found.low <= found.value <= found.high <= 1  # type: ignore[operator]
        assert found.high - found.low > 1e-3  # type: ignore[operator]
        assert (exchanged.low, exchanged.high) == pytest.approx((-found.high, -found.low), abs=1e-12)  # type: ignore[operator]


def test_a_rounding_error_does_not_take_values_out_of_0_to_1() -> None:
    first, second = outcomes(0, 5, 1, 0)
    rounded = first - (first == 0) * 1e-17, second * (0.2 + 0.4 + 0.3 + 0.1)
    for compare in (
        paired_difference,
        unpaired_difference,
        lambda _, values: Difference(reward_of_tasks(values), None),
    ):
        exact, found = (compare(*pair).difference for pair in ((first, second), rounded))
        assert (found.value, found.low, found.high) == pytest.approx((exact.value, exact.low, exact.high), abs=1e-12)
    certain = paired_difference(np.full(4, -1e-17), np.full(4, 0.2 + 0.4 + 0.3 + 0.1)).difference
    assert certain.low < certain.value == certain.high == 1  # type: ignore[operator]


thirds = st.integers(-6, 6).map(lambda number: Fraction(number, 3))


@given(st.lists(thirds, min_size=2, max_size=8), st.randoms(use_true_random=False))
@example([Fraction(number, 3) for number in (2, -6, -4, 5, 4, -1)], Random(0))
def test_the_p_value_of_few_tasks_is_the_share_of_sign_choices_with_as_large_a_sum(
    differences: list[Fraction], random: Random
) -> None:
    choices = itertools.product((-1, 1), repeat=len(differences))
    sums = [sum(sign * one for sign, one in zip(signs, differences, strict=True)) for signs in choices]
    share = Fraction(sum(abs(one) >= abs(sum(differences)) for one in sums), len(sums))
    zeros, values = np.zeros(len(differences)), np.array(differences, np.float64)
    assert paired_difference(zeros, values).p_value == float(share)
    random.shuffle(values)
    assert paired_difference(values, zeros).p_value == float(share), "in another order, with the runs exchanged"


@pytest.mark.parametrize("tasks", [14, 501])
def test_exchanging_the_runs_does_not_change_the_p_value_of_many_tasks(tasks: int) -> None:
    first, second = np.random.default_rng(36).integers(0, [[4], [5]], (2, tasks * 2)) / 3
    order = np.random.default_rng(37).permutation(len(first))
    p_value = paired_difference(first, second).p_value
    assert 0 < p_value < 1  # type: ignore[operator]
    assert paired_difference(second[order], first[order]).p_value == p_value


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e6])
def test_tasks_that_differ_by_rounding_alone_are_equal_and_do_not_count(scale: float) -> None:
    first = np.array([0.0, 0.1 + 0.2, 0.3, 1.0, 0.5, 0.5, 0.5, 0.0]) * scale
    second = np.array([-2.8e-17, 0.3, 0.1 + 0.2, 1.0 - 1e-16, 0.5, 0.6, 0.1 + 0.2 + 0.3, 0.1]) * scale
    found = paired_difference(first, second)
    assert found.p_value == pytest.approx(2 / 2**3), "of three tasks that changed by the same"
    assert list(changes(first, second) != 0) == [False] * 5 + [True] * 3
    unchanged = paired_difference(first[:5], second[:5])
    assert (unchanged.difference.value, unchanged.difference.standard_error, unchanged.p_value) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("outlier", [1e12, -1e15])
def test_one_large_value_does_not_make_the_differences_of_other_tasks_equal(outlier: float) -> None:
    found = paired_difference(np.array([0.0] * 10 + [outlier]), np.array([1.0] * 10 + [outlier]))
    assert (found.difference.value, found.p_value) == (pytest.approx(10 / 11), pytest.approx(2 / 2**10))


@pytest.mark.slow
def test_many_tasks_have_the_p_value_of_the_t_test_and_as_many_permutations_agree() -> None:
    rng = np.random.default_rng(32)
    first, second = rng.normal(size=12_000), rng.normal(0.02, 1.0, size=12_000)
    whole = paired_difference(first, second).p_value
    assert whole == pytest.approx(stats.ttest_rel(second, first).pvalue, rel=1e-9)
    part = slice(0, 490)
    permuted = paired_difference(first[part], second[part]).p_value
    assert permuted == pytest.approx(stats.ttest_rel(second[part], first[part]).pvalue, abs=0.02)


@pytest.mark.parametrize("values", [[1e-200, 3e-200], [1e149, -1e149, 0.0], [5e-324, 0.0]])
def test_very_small_and_large_rewards_have_finite_intervals(values: list[float]) -> None:
    estimate = reward_of_tasks(np.array(values))
    assert all(math.isfinite(number) for number in (estimate.value, estimate.low, estimate.high))  # type: ignore[arg-type]


def test_equal_differences_of_many_tasks_have_the_probability_of_their_signs() -> None:
    assert paired_difference(np.zeros(601), np.full(601, 0.1)).p_value == 2.0**-600


@pytest.mark.parametrize(
    ("estimate", "rule"),
    [
        (lambda: mean_of_tasks(np.array([])), "at least one task"),
        (lambda: mean_of_tasks(np.array([1.0, math.nan])), "a finite value"),
        (lambda: paired_difference(np.zeros(3), np.zeros(2)), "a value for each of the 3 tasks"),
    ],
)
def test_values_without_an_estimate_are_refused(estimate, rule) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ArgumentError, match=rule):
        estimate()


def test_the_interval_of_a_rate_is_wilsons_where_tasks_have_one_sample() -> None:
    # Tasks of one sample are independent trials; with many of them Student's t is the normal distribution, and the
    # clustered variance, which divides by n - 1, that of the proportion.
    outcomes = np.array([1.0] * 30_000 + [0.0] * 70_000)
    estimate = rate_of_tasks(outcomes)
    wilson = stats.binomtest(30_000, 100_000).proportion_ci(0.95, method="wilson")
    assert (estimate.low, estimate.high) == pytest.approx((wilson.low, wilson.high), abs=1e-6)
