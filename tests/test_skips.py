"""Only tests whose package is missing are skipped (tests/skips.py), and every test is in the quarter of some commit."""

from collections.abc import Iterator

import corpus
import pytest
import skips

pytest_plugins = ["pytester"]


def raised(statement: str) -> BaseException:
    with pytest.raises(BaseException) as caught:
        exec(statement, {"pytest": pytest})
    return caught.value


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skips, "_MISSING", frozenset({"ray"}))


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize(
    "statement",
    [
        "raise ModuleNotFoundError(\"No module named 'ray'\", name='ray')",
        "raise ModuleNotFoundError(\"No module named 'ray.util'\", name='ray.util')",
        "raise ImportError('Servers requires the Ray library but it was not found')",
        "raise ValueError('no servers') from ModuleNotFoundError('No module', name='ray')",
        "pytest.skip(\"could not import 'ray.util': No module named 'ray'\")",
    ],
)
def test_an_error_of_a_missing_package_has_its_name(statement: str) -> None:
    assert skips.missing_package(raised(statement)) == "ray"


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize(
    "statement",
    [
        # The text of another error has the name.
        "assert 'ray' == 'rays'",
        "raise ValueError('ray is not installed')",
        # A module of this project was renamed.
        "raise ModuleNotFoundError(\"No module named 'rollouts.ray.gone'\", name='rollouts.ray.gone')",
        "raise ImportError(\"cannot import name 'Gone' from 'rollouts.ray'\", name='rollouts.ray')",
        "raise ImportError('rollouts.ray.gone cannot be imported')",
        # The package is installed, or nobody knows it.
        "raise ModuleNotFoundError(\"No module named 'scipy.gone'\", name='scipy.gone')",
        "raise ModuleNotFoundError(\"No module named 'unknown'; ray\", name='unknown')",
        # What runs without the package has an error of its own.
        "try:\n    raise ModuleNotFoundError('No module', name='ray')\nexcept ImportError:\n    raise TypeError",
    ],
)
def test_an_error_with_another_reason_is_no_missing_package(statement: str) -> None:
    assert skips.missing_package(raised(statement)) is None


@pytest.mark.usefixtures("without_ray")
def test_a_module_and_a_test_without_their_package_are_skipped_and_planted_failures_fail(
    pytester: pytest.Pytester,
) -> None:
    missing = "raise ModuleNotFoundError(\"No module named 'ray'\", name='ray')\n"
    pytester.makepyfile(
        test_module=missing,
        test_of_gone="raise ModuleNotFoundError(\"No module named 'rollouts.ray.gone'\", name='rollouts.ray.gone')\n",
        test_each=f"def test_missing():\n    {missing}\ndef test_planted():\n    assert 'ray' == 'rays'\n",
    )
    result = pytester.runpytest_inprocess(
        "-p", "skips", "-p", "no:cacheprovider", "-rs", "--continue-on-collection-errors"
    )
    result.assert_outcomes(skipped=2, failed=1, errors=1)
    result.stdout.fnmatch_lines("*ray is not installed: pip install -e '.[[]ray[]]'*")


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize(
    ("listed", "code"),
    [
        ("test_each.py .[ray]\ntest_module.py .[ray]", pytest.ExitCode.OK),
        ("# test_module.py .[ray]\ntest_each.py .[ray]", pytest.ExitCode.TESTS_FAILED),
        ("test_each.py .[mcp]\ntest_module.py .[ray]", pytest.ExitCode.TESTS_FAILED),
    ],
    ids=["all", "a module is not", "a test is not"],
)
def test_a_skip_that_is_not_listed_fails_the_run(pytester: pytest.Pytester, listed: str, code: pytest.ExitCode) -> None:
    missing = "raise ModuleNotFoundError(\"No module named 'ray'\", name='ray')\n"
    pytester.makepyfile(
        test_module=missing, test_each=f"def test_missing():\n    {missing}\ndef test_passes():\n    pass\n"
    )
    pytester.makefile(".txt", expected=listed)
    result = pytester.runpytest_inprocess("-p", "skips", "-p", "no:cacheprovider", "--expected-skips=expected.txt")
    assert result.ret == code
    assert ("not on the list" in result.stdout.str()) == (code != pytest.ExitCode.OK)


@pytest.fixture
def commit(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    corpus.quarter_of_the_commit.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    corpus.quarter_of_the_commit.cache_clear()


def test_every_name_is_in_the_quarter_of_one_commit_in_four(commit: pytest.MonkeyPatch) -> None:
    names = [*corpus.templates(), *corpus.tokenizer_names()]
    taken: list[str] = []
    for quarter in range(4):
        commit.setattr(corpus, "quarter_of_the_commit", lambda quarter=quarter: quarter)
        taken += [name for name in names if corpus.is_drawn(name)]
        by_mark = [name for name in corpus.drawn(names) if isinstance(name, str)]
        assert by_mark == [name for name in names if corpus.is_drawn(name)]
        commit.undo()
    assert sorted(taken) == sorted(names)
