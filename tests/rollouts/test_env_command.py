"""`rollouts env` says which distribution `import renderers` belongs to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from rollouts.cli import env_command
from rollouts.cli.main import app


def run(monkeypatch: pytest.MonkeyPatch, renderers_version: str | None) -> tuple[int, str]:
    versions = {"mmrollouts": "0.1.0", "renderers": renderers_version}

    def distribution(name: str) -> SimpleNamespace:
        if versions.get(name) is None:
            raise env_command.PackageNotFoundError(name)
        return SimpleNamespace(version=versions[name])

    monkeypatch.setattr(env_command, "distribution", distribution)
    result = CliRunner().invoke(app, ["env"])
    return result.exit_code, result.stdout


def test_without_a_distribution_of_that_name_the_page_on_installing_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, text = run(monkeypatch, None)
    assert code == 0
    assert "migrating-from-renderers.md" in text


def test_the_empty_distribution_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = run(monkeypatch, "0.1.12+mmrollouts.1")
    assert code == 0
    assert "the distribution renderers 0.1.12+mmrollouts.1 names it" in text


def test_the_other_distribution_beside_this_one_is_an_error_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = run(monkeypatch, "0.1.12")
    assert code == 1
    assert "pip uninstall -y renderers mmrollouts" in text
