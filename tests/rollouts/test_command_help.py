"""Help of the commands, which is plain text of any width."""

import pytest
from typer.testing import CliRunner

from rollouts.cli.main import app


def test_help_in_a_narrow_terminal_has_the_whole_names_of_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    result = CliRunner().invoke(app, ["render", "-h"])
    assert result.exit_code == 0
    for option in ("--chat-template", "--generation-prompt"):
        assert option in result.stdout


def test_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("mmrollouts ")


def test_an_invalid_choice_is_named_without_the_prefix_of_pydantic() -> None:
    result = CliRunner().invoke(app, ["init", "x", "--template", "foo"])
    assert result.exit_code == 2
    assert "'foo' is not one of 'images', 'scoring', 'tools'" in result.output
    assert "Value error" not in result.output
