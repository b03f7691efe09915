"""The reference of the command line and of the Python packages."""

import re
from importlib import import_module

import pytest
from command_reference import command_page
from python_reference import python_reference_pages
from typer.testing import CliRunner

from rollouts.cli.main import app


def commands(*group: str) -> list[str]:
    """The names of the commands, as the help of `rollouts` lists them."""
    shown = CliRunner().invoke(app, [*group, "--help"], env={"COLUMNS": "200"}).output
    return re.findall(r"^  ([a-z-]+)  ", shown.partition("Show this message and exit.")[2], re.MULTILINE)


def test_each_command_has_a_section_with_its_options() -> None:
    page = command_page()
    for name in commands():
        assert f"\n## `rollouts {name}`\n" in page
    for name in commands("traj"):
        assert f"\n### `rollouts traj {name}`\n" in page
    assert "* `--api-key-env VARIABLE`: The environment variable with the server's key." in page
    assert "`-h, --help`" in page


def test_the_help_lists_the_commands_that_the_page_is_compared_with() -> None:
    assert {"doctor", "run", "traj"} <= set(commands())
    assert {"show", "repair"} <= set(commands("traj"))


def test_help_groups_the_commands_and_shows_names_of_arguments_without_types() -> None:
    shown = CliRunner().invoke(app, ["--help"]).output
    assert re.findall("^([A-Z].*):$", shown, re.MULTILINE) == ["Options", "Begin", "Run", "Look at episodes"]
    for name in commands():
        help_of_command = CliRunner().invoke(app, [name, "--help"]).output
        assert not re.search(r"\.{4}|<\w+[\[>]", help_of_command), name


@pytest.mark.parametrize("page", [path for path in python_reference_pages() if "verifiers" not in path])
def test_a_page_of_the_python_reference_is_of_a_module_that_users_can_import(page: str) -> None:
    module = page.removeprefix("reference/python/").removesuffix(".md")
    assert import_module(module).__doc__


def test_the_reference_has_the_three_packages_and_those_within_them() -> None:
    assert {
        f"reference/python/{name}.md" for name in ("renderers", "transport", "rollouts", "rollouts.training")
    } <= set(python_reference_pages())
