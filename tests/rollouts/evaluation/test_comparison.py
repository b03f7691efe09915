"""Comparisons of stored runs: closed forms, planted differences, invariants, and what is said before the numbers."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation.compared_runs import CONFIGURATION, add_results, line, write_run
from hypothesis import given, settings
from hypothesis import strategies as st
from report.report_runs import episode
from scipy import stats

from rollouts.errors import CommandFileError, RolloutsError
from rollouts.evaluation import Comparison, compare_runs
from rollouts.evaluation.comparison import RunDifference
from rollouts.evaluation.statistics import Difference
from transport import RecordWriter


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """New directories, for examples of hypothesis too."""
    return (tmp_path_factory.mktemp("runs") for _ in itertools.count())


def difference_of(first: Path, second: Path, **options: Any) -> RunDifference:
    return compare_runs([first, second], **options).against_baseline[0]


def reward_of(against: RunDifference) -> Difference:
    assert against.differences.total_reward is not None
    return against.differences.total_reward


def test_runs_with_different_numbers_of_samples_share_the_k_that_both_allow(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", {"1": [0, 1, 1, 1], "2": [0, 0, 0, 1]})
    second = write_run(tmp_path / "b", {"1": [1, 1], "2": [0, 1]})
    against = difference_of(first, second)
    assert {k: one.difference.value for k, one in against.differences.pass_at_k.items()} == {1: 0.25, 2: 0.25}
    assert "samples of a task: 4 in a, 2 in b" in against.notes


def test_failed_episodes_count_as_the_option_says_in_both_runs(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", [line("1", [1, 1], failed=[0]), line("2", [0, 0])])
    second = write_run(tmp_path / "b", [line("1", [1, 1]), line("2", [0, 1], failed=[0])])
    assert reward_of(difference_of(first, second)).difference.value == 0.5
    assert reward_of(difference_of(first, second, failed="exclude")).difference.value == 0.5 * (0 + 1)
    assert [run.failed for run in compare_runs([first, second]).runs] == [1, 1]


def test_threshold_and_failures_are_those_of_results_json_and_another_threshold_is_named(tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / name, {"1": [0.5, 1], "2": [0.5, 0]}) for name in "ab")
    add_results(first, samples=2, threshold=0.5, failed="exclude")
    add_results(second, samples=2, threshold=0.75)
    comparison = compare_runs([first, second])
    assert (comparison.threshold, comparison.failed_episodes) == (0.5, "exclude")
    assert comparison.runs[0].estimates.pass_at_k[1].value == 0.75
    assert comparison.runs[1].notes == [
        "its results.json has the threshold 0.75; here it is 0.5",
        "in its results.json failed episodes count as 'zero'; here as 'exclude'",
    ]
    assert compare_runs([first, second], threshold=0.0).runs[0].estimates.pass_at_k[1].value == 1.0


def simulated_run(directory: Path, rng: np.random.Generator, difficulty: np.ndarray, added: float = 0.0) -> Path:
    rewards = (rng.random((len(difficulty), 4)) < difficulty[:, None] + added).astype(float)
    return write_run(directory, {f"task {number}": row for number, row in enumerate(rewards.tolist())})


@pytest.mark.slow
def test_a_planted_difference_is_found_and_its_interval_holds_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    difficulty = rng.uniform(0.2, 0.7, 300)
    first = simulated_run(tmp_path / "a", rng, difficulty)
    second = simulated_run(tmp_path / "b", rng, difficulty, added=0.1)
    found = difference_of(first, second, k=[1]).differences.pass_at_k[1]
    assert found.p_value is not None
    assert found.p_value < 0.001
    assert found.difference.low is not None
    assert found.difference.high is not None
    assert 0 < found.difference.low < 0.1 < found.difference.high


rewards_of_tasks = st.dictionaries(
    st.integers(0, 20).map(str), st.lists(st.sampled_from([0.0, 0.25, 1.0, -3.0]), min_size=1, max_size=3), min_size=2
)


@pytest.mark.slow
@settings(max_examples=15)
@given(first=rewards_of_tasks, second=rewards_of_tasks)
def test_swapping_the_runs_negates_differences_and_mirrors_intervals(
    folders: Iterator[Path], first: dict[str, list[float]], second: dict[str, list[float]]
) -> None:
    folder = next(folders)
    first = {**first, "shared": [1.0, 0.0]}
    runs = [write_run(folder / "a", first), write_run(folder / "b", {**second, "shared": [1.0, 1.0]})]
    one, other = difference_of(*runs), difference_of(*runs[::-1])
    pairs = zip(one.differences.labelled(), other.differences.labelled(), strict=True)
    for (label, forward), (same_label, backward) in pairs:
        assert label == same_label
        assert forward.difference.value == pytest.approx(-backward.difference.value)
        assert forward.p_value == backward.p_value
        if forward.difference.low is not None:
            assert forward.difference.low == pytest.approx(-backward.difference.high)
            assert forward.difference.high == pytest.approx(-backward.difference.low)
    assert (one.increased, one.only_in_run) == (other.decreased, other.only_in_baseline)


@pytest.mark.slow
@settings(max_examples=15)
@given(shared=rewards_of_tasks, only=rewards_of_tasks)
def test_tasks_of_one_run_alone_change_no_paired_number(
    folders: Iterator[Path], shared: dict[str, list[float]], only: dict[str, list[float]]
) -> None:
    folder = next(folders)
    changed = {task_id: [1.0, *rewards[1:]] for task_id, rewards in shared.items()}
    runs = [write_run(folder / "a", shared), write_run(folder / "b", changed)]
    more = write_run(folder / "more", {**changed, **{f"only {name}": rewards for name, rewards in only.items()}})
    small, large = difference_of(*runs, k=[1]), difference_of(runs[0], more, k=[1])
    assert large.only_in_run == len(only)
    assert large.differences == small.differences
    assert large.most_increased == small.most_increased


def test_what_differs_is_named(tmp_path: Path) -> None:
    other = {**CONFIGURATION, "sampling": {"max_tokens": 64, "temperature": 0.5}, "template": "fedcba"}
    other["engine"] = {"kind": "local", "directory": "model-2"}
    first = write_run(tmp_path / "a", {"1": [1], "2": [1], "3": [0], "only a": [1]})
    lines = [
        line("1", [1], task_data={"question": "another"}),
        line("2", [1], task_data=None),
        line("3", [1], reward_parts={"exact": [1], "short": [1]}),
        line("only b", [0]),
    ]
    second = write_run(tmp_path / "b", lines, configuration=other, complete=False)
    comparison = compare_runs([first, second])
    assert comparison.runs[1].notes == ["it is not complete: not all of its tasks were run"]
    assert comparison.runs[0].notes == []
    assert set(comparison.against_baseline[0].notes) == {
        "1 task only in a: 'only a'",
        "1 task only in b: 'only b'",
        "the data of 1 shared task differ: '1'",
        "the data of 1 shared task are not in both files, and not compared",
        "named rewards only in b: 'short'",
        'engine.directory: "model" in a, "model-2" in b',
        "sampling.temperature: 1.0 in a, 0.5 in b",
        'digest of the chat template: "0123456789abcdef" in a, "fedcba" in b',
    }


# Two versions of the weights of one training run.


def trained(directory: Path) -> Path:
    """Three tasks in each of two steps, and one that is in both."""
    early = [line(f"early {number}", [0, number % 2 * 2], oldest_version="0") for number in range(3)]
    late = [line(f"late {number}", [2, number % 2 * 2], oldest_version="1") for number in range(3)]
    return write_run(directory, [*early, *late])


def test_two_steps_of_a_run_with_different_tasks_are_compared_unpaired_by_welch(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    comparison = compare_runs([f"{run}@0", f"{run}@1"])
    assert [(one.name, one.weight_version, one.tasks) for one in comparison.runs] == [
        ("run@0", "0", 3),
        ("run@1", "1", 3),
    ]
    against = comparison.against_baseline[0]
    assert against.notes[0].startswith("unpaired (their tasks are different): ")
    found = reward_of(against)
    welch = stats.ttest_ind([1, 2, 1], [0, 1, 0], equal_var=False)
    interval = welch.confidence_interval(0.95)
    assert found.p_value == pytest.approx(welch.pvalue)
    assert (found.difference.low, found.difference.high) == pytest.approx((interval.low, interval.high))


def test_evaluations_of_two_steps_are_named_by_run_and_step(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for step in ("10", "20"):
        write_run(tmp_path / "run" / "evaluations" / step, {"1": [1], "2": [0]})
    comparison = compare_runs([f"{tmp_path / 'run'}@{step}" for step in ("10", "20")])
    assert [run.name for run in comparison.runs] == ["run@10", "run@20"]


def test_tasks_without_data_in_both_files_are_no_difference(tmp_path: Path) -> None:
    lines = [line("1", [1], task_data=None), line("2", [1])]
    comparison = compare_runs([write_run(tmp_path / name, lines) for name in ("a", "b")])
    assert comparison.against_baseline[0].notes == []


def test_a_task_with_several_groups_has_the_episodes_of_all_of_them(tmp_path: Path) -> None:
    lines = [line("1", [0], oldest_version="0"), line("1", [1, 1, 1], oldest_version="1"), line("2", [1, 1])]
    run = compare_runs([write_run(tmp_path / "a", lines), write_run(tmp_path / "b", {"1": [1], "2": [1]})]).runs[0]
    assert (run.tasks, run.episodes, run.samples) == (2, 6, (2, 4))
    assert run.estimates.total_reward is not None
    assert run.estimates.total_reward.value == (0.75 + 1) / 2
    assert "its groups are of 2 versions of weights, from '0' to '1'" in run.notes


def test_a_directory_with_an_at_sign_in_its_name_is_no_version(tmp_path: Path) -> None:
    first = write_run(tmp_path / "model@1", {"1": [1], "2": [0]})
    second = write_run(tmp_path / "model@2", {"1": [1], "2": [1]})
    assert [run.name for run in compare_runs([first, second, f"{first}@0"]).runs] == ["model@1", "model@2", "model@1@0"]


def test_runs_without_metrics_have_the_environment_rewards_of_their_episodes(tmp_path: Path) -> None:
    for name, version in (("a", "0"), ("b", "1")):
        (tmp_path / name).mkdir()
        with RecordWriter(tmp_path / name / "trajectories.mmr") as writer:
            for number in range(8):
                writer.append(episode(number, reward=float(number % 2 or version == "1"), version=version))
    comparison = compare_runs([tmp_path / "a", tmp_path / "b"])
    against = comparison.against_baseline[0]
    assert (against.shared_tasks, reward_of(against).difference.value) == (2, 0.5)
    assert "it has no metrics.jsonl" in comparison.runs[0].notes[-1]
    assert "version of the weights: 0 in a, 1 in b" in against.notes


# Bad input.


def test_runs_without_a_common_task_are_refused_unless_they_are_compared_unpaired(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", {"1": [1, 1], "2": [0, 1]})
    second = write_run(tmp_path / "b", {"3": [1, 1], "4": [1, 1]})
    with pytest.raises(RolloutsError, match=r"have no task in common, .*'1' and '3'.*--unpaired"):
        compare_runs([first, second])
    assert reward_of(difference_of(first, second, unpaired=True)).difference.value == 0.25


def test_files_that_cannot_be_used_are_named_with_line_and_cure(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", {"1": [1], "2": [0]})
    damaged = write_run(tmp_path / "damaged", {"1": [1]})
    with open(damaged / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"task_id": 3}\n')
    with pytest.raises(CommandFileError, match=r"metrics.jsonl, line 2: .*--resume writes it anew") as caught:
        compare_runs([run, damaged])
    assert caught.value.line == 2
    without = write_run(tmp_path / "without", {})
    with pytest.raises(CommandFileError, match=r"it has no finished group; compare it when"):
        compare_runs([run, without])
    (run / "summary.json").write_text('{"compl', "utf-8")
    with pytest.raises(CommandFileError, match=r"summary.json: it is no JSON, or was cut off after 7 bytes"):
        compare_runs([run, without])


def test_episodes_with_rewards_whose_squares_have_no_float_count_as_failed_and_are_said(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", {"1": [1e308, 1e308], "2": [1.0, 1.0], "3": [0.0, 0.0]})
    second = write_run(tmp_path / "b", {"1": [-1e308, -1e308], "2": [2.0, 2.0], "3": [2.0, 2.0]})
    comparison = compare_runs([first, second])
    found = reward_of(comparison.against_baseline[0]).difference
    assert (found.value, found.tasks) == (1.0, 3)
    assert "2 episodes have a reward that is not finite, or 1e150 or more" in comparison.runs[0].notes[-1]
    without = compare_runs([first, second], failed="exclude").against_baseline[0]
    assert (reward_of(without).difference.value, reward_of(without).difference.tasks) == (1.5, 2)
    assert Comparison.model_validate_json(comparison.model_dump_json()) == comparison


def test_more_named_rewards_than_64_are_left_out_and_said(tmp_path: Path) -> None:
    lines = [line(str(number), [1.0], reward_parts={f"part {number}": [1.0]}) for number in range(100)]
    run = compare_runs([write_run(tmp_path / "a", lines), write_run(tmp_path / "b", {"1": [1.0]})]).runs[0]
    assert len(run.estimates.reward_parts) == 64
    assert "it has more than 64 named rewards; the others are left out" in run.notes
