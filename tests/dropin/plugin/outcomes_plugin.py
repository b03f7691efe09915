"""A pytest plugin that writes the outcome of every test id as JSON to the file MMROLLOUTS_OUTCOMES.

It stands alone in its folder, and imports nothing but pytest: the folder is on the path of foreign tests.
"""

import json
import os
from pathlib import Path

import pytest

_outcomes: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        failed = "failed" if report.when == "call" else "error"
        _outcomes[report.nodeid] = failed if report.outcome == "failed" else report.outcome


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _outcomes[report.nodeid] = "error"


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # the workers of pytest-xdist report to the one that has none
        Path(os.environ["MMROLLOUTS_OUTCOMES"]).write_text(json.dumps(_outcomes, indent=1), encoding="utf-8")
