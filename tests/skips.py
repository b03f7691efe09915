"""Skips tests whose packages are not installed, and finds skips that nobody expects.

A test module, or a test, that fails because a package of an extra is missing counts as skipped; the reason has the
command that installs it. `pytest --expected-skips=FILE` fails where anything is skipped that no such file lists.
A line of the file has the path of a test module or folder and a part of the reason,
`tests/rollouts/environments/test_mcp.py .[mcp]`; a line that begins with `#` is a comment.
"""

import re
from collections.abc import Generator, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

#: Packages that tests import or need, and the extra of pyproject.toml that installs each.
EXTRA_OF_PACKAGE = {
    "agents": "dev",
    "av": "audio",
    "datasets": "trainers",
    "duckdb": "dev",
    "gymnasium": "gym",
    "jaxtyping": "dev",
    "langchain_core": "dev",
    "langchain_openai": "dev",
    "markdown": "docs",
    "material": "docs",
    "mcp": "mcp",
    "mkdocs": "docs",
    "mkdocs_material": "docs",
    "mkdocstrings": "docs",
    "msgspec": "trainers",
    "num2words": "processors",
    "openai": "test",
    "peft": "lora",
    "playwright": "dev",
    "psutil": "dev",
    "pyarrow": "parquet",
    "ray": "ray",
    "ruff": "dev",
    "scipy": "eval",
    "sklearn": "demo",
    "soundfile": "audio",
    "soxr": "audio",
    "starlette": "serve",
    "tensorboard": "dev",
    "tensorboardX": "tensorboard",
    "tensordict": "dev",
    "tinker": "tinker",
    "torch": "torch",
    "torchvision": "processors",
    "transformers": "torch",
    "trl": "test",
    "uvicorn": "serve",
    "wandb": "wandb",
}


#: Looked up before a test hides a package.
_MISSING = frozenset(package for package in EXTRA_OF_PACKAGE if find_spec(package) is None)


def missing_package(error: BaseException | None) -> str | None:
    """The package of an extra whose absence is the reason of an error, or None.

    An error is followed to its cause (`raise ... from ...`) and not to its context: an error in the lines that handle a
    missing package is a failure.
    """
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        for package in _packages_named_by(error):
            if package in _MISSING:
                return package
        error = error.__cause__
    return None


def _packages_named_by(error: BaseException) -> Iterator[str]:
    if isinstance(error, ImportError) and error.name is not None:
        yield error.name.partition(".")[0]
    elif isinstance(error, ImportError | pytest.skip.Exception):
        # "needs torchvision and num2words"; transformers: "requires the Torchvision library". In "rollouts.ray" nothing
        # names the package ray.
        for name in re.findall(r"\w+(?:\.\w+)*", str(error).lower()):
            yield name.partition(".")[0]


def reason_of(package: str) -> str:
    return f"{package} is not installed: pip install -e '.[{EXTRA_OF_PACKAGE[package]}]'"


def _skip_for_a_missing_package(report: Any, error: BaseException | None, place: tuple[Path, int]) -> None:
    if not report.passed and (package := missing_package(error)) is not None:
        report.outcome = "skipped"
        report.longrepr = (str(place[0]), place[1], f"Skipped: {reason_of(package)}")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    call: Any = getattr(report, "call", None)
    if call is not None and call.excinfo:
        _skip_for_a_missing_package(report, call.excinfo.value, (collector.path, 0))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    report = yield
    if call.excinfo:
        _skip_for_a_missing_package(report, call.excinfo.value, (item.path, item.location[1] or 0))
    return report


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "fail where a test is skipped that no such file lists"
    parser.addoption("--expected-skips", type=Path, action="append", default=[], help=help)


def pytest_configure(config: pytest.Config) -> None:
    files: list[Path] = config.getoption("--expected-skips")
    if files and not hasattr(config, "workerinput"):
        config.pluginmanager.register(ExpectedSkips(files))


class ExpectedSkips:
    """Collects what was skipped that the files do not list."""

    def __init__(self, files: Sequence[Path]) -> None:
        text = "".join(file.read_text("utf-8") for file in files)
        lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
        self.expected = [(path, " ".join(reason)) for path, *reason in lines]
        self.unexpected: set[str] = set()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._check(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._check(report)

    def _check(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(report.nodeid.startswith(path) and part in reason for path, part in self.expected):
            self.unexpected.add(f"{report.nodeid}: {reason}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unexpected and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for line in sorted(self.unexpected):
            terminalreporter.write_line(f"SKIPPED, and not on the list: {line}", red=True)
