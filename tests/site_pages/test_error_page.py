"""The page of all errors with their cures."""

import re
from pathlib import Path

import pytest
from error_classes import error_classes
from error_page import error_page, when_and_cure

from rollouts.errors import RolloutsError

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("error_class", error_classes(), ids=lambda each: f"{each.__module__}.{each.__name__}")
def test_the_docstring_of_an_error_says_when_it_is_raised_and_ends_with_its_cure(error_class: type[Exception]) -> None:
    when, cure = when_and_cure(error_class)
    assert when.endswith((".", ":")), f"write in the docstring of {error_class.__name__} when it is raised"
    assert re.fullmatch(r"[^\n].*\.", cure, re.DOTALL), f"end the docstring of {error_class.__name__} with 'Cure: ...'"
    assert "\n\n" not in cure


def test_a_docstring_without_a_cure_and_an_inherited_docstring_are_found() -> None:
    class WithoutCureError(RolloutsError):
        """A value is wrong."""

    class WithoutDocstringError(RolloutsError):
        pass

    assert when_and_cure(WithoutCureError) == ("A value is wrong.", "")
    assert when_and_cure(WithoutDocstringError) == ("", "")


def test_each_error_has_an_entry_with_an_anchor_of_its_own() -> None:
    anchors = re.findall(r"^### `\w+` \{ #(\S+) \}$", error_page(), re.MULTILINE)
    assert len(anchors) == len(set(anchors)) == len(error_classes())


def test_every_public_error_class_of_the_files_is_on_the_page() -> None:
    page = error_page()
    declared = {
        name
        for package in ("renderers", "transport", "rollouts")
        for path in (ROOT / package).rglob("*.py")
        for name in re.findall(r"^class ([A-Z]\w*Error)\(", path.read_text("utf-8"), re.MULTILINE)
    }
    assert [name for name in sorted(declared) if f"### `{name}`" not in page] == []


def test_errors_of_engines_lead_to_the_command_that_checks_a_server() -> None:
    entries = {entry.partition("`")[0]: entry for entry in error_page().split("\n### `")}
    assert "commands.md#rollouts-doctor" in entries["ServerTimeoutError"]
    assert "commands.md#rollouts-doctor" not in entries["SampleError"]
