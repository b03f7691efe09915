"""The bench's own check finds what it must find."""

import comparison
import pytest

STOCK = {"tests/test_a.py::one": "passed", "tests/test_a.py::two[x/y-1]": "passed", "tests/test_b.py::three": "failed"}
REVIEWED = comparison.Difference("test_a.py", ["two[*]"], "differs on purpose", "theirs drops a token")


def test_nothing_is_found_where_this_project_passes_at_least_as_much():
    ours = {**STOCK, "tests/test_b.py::three": "passed"}
    assert list(comparison.violations(STOCK, ours, [])) == []
    assert comparison.lost(ours, STOCK) == ["tests/test_b.py::three"]


@pytest.mark.parametrize("outcome", ["failed", "error", "skipped", None])
def test_a_test_that_only_the_other_package_passes_is_found(outcome):
    ours = {test: outcome for test in STOCK if outcome is not None}
    found = list(comparison.violations(STOCK, ours, []))
    assert [line.partition(": ")[0] for line in found] == ["tests/test_a.py::one", "tests/test_a.py::two[x/y-1]"]


def test_a_reviewed_difference_is_none_and_brackets_are_no_wildcards():
    ours = {**STOCK, "tests/test_a.py::two[x/y-1]": "failed"}
    assert list(comparison.violations(STOCK, ours, [REVIEWED])) == []
    assert REVIEWED.covers("tests/test_a.py::two[]")
    assert not REVIEWED.covers("tests/test_a.py::twox")
    assert not REVIEWED.covers("tests/test_b.py::two[]")


def test_a_row_that_matches_nothing_is_found_for_a_file_of_which_all_tests_were_run():
    (line,) = comparison.violations(STOCK, STOCK, [REVIEWED])
    assert "remove it" in line
    assert list(comparison.violations(STOCK, STOCK, [REVIEWED], drawn=["tests/test_a.py"])) == []


def test_files_of_which_one_package_has_no_figures_are_named_and_not_compared():
    ours = {"tests/test_b.py::three": "passed", "tests/test_c.py::four": "passed"}
    assert comparison.files_of_one(STOCK, ours) == {"PyPI's renderers": ["test_c.py"], "this project": ["test_a.py"]}
    common = comparison.of_common_files(STOCK, ours)
    assert common == ({"tests/test_b.py::three": "failed"}, {"tests/test_b.py::three": "passed"})
