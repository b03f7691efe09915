"""verifiers is no extra: which commands install it with this project, and the error without it."""

import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]


def test_no_requirement_has_a_local_version_which_no_index_serves():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text("utf-8"))["project"]
    requirements = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    assert [requirement for requirement in requirements if "+" in requirement] == []
    assert "verifiers" not in project["optional-dependencies"]  # its requirement would bring PyPI's renderers


def test_the_page_and_ci_install_the_distribution_that_stands_in_for_pypis():
    shim = tomllib.loads((PROJECT / "packaging" / "renderers" / "pyproject.toml").read_text("utf-8"))["project"]
    page = (PROJECT / "docs" / "migrating-from-renderers.md").read_text("utf-8")
    commands = [line.split() for line in page.splitlines() if "--find-links wheels" in line and line.startswith("    ")]
    assert {" ".join(command[:3]) for command in commands} == {"pip install --find-links"}
    named = re.findall(r"renderers==([\w.+]+)", page + (PROJECT / ".ci" / "check_requirements").read_text("utf-8"))
    assert set(named) == {shim["version"]}


@pytest.mark.slow
def test_without_verifiers_the_error_names_the_page():
    code = "import sys; sys.modules['verifiers'] = None; import rollouts.environments.verifiers"
    result = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False)
    (line,) = result.stderr.splitlines()[-1:]
    assert "needs verifiers 0.4; install it as docs/migrating-from-renderers.md says" in line


@pytest.mark.slow
def test_another_version_of_verifiers_is_named_with_the_one_that_is_needed(tmp_path):
    package = tmp_path / "verifiers" / "v1"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "clients.py").touch()  # without Client
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import rollouts.environments.verifiers"
    result = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False)
    (line,) = result.stderr.splitlines()[-1:]
    assert "needs verifiers 0.4; install it as" in line
    assert "'Client' from 'verifiers.v1.clients'" in line
