"""The extra `verifiers`: what it requires, and the error without it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[2]


def test_the_extra_requires_the_distribution_that_stands_in_for_pypis():
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    shim = tomllib.loads((PROJECT / "packaging" / "renderers" / "pyproject.toml").read_text("utf-8"))["project"]
    assert f"renderers=={shim['version']}" in extras["verifiers"]


def test_without_verifiers_the_error_names_the_extra():
    code = "import sys; sys.modules['verifiers'] = None; import rollouts.environments.verifiers"
    result = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert "MissingExtraError" in result.stderr
    assert "pip install 'mmrollouts[verifiers]'" in result.stderr


def test_another_version_of_verifiers_is_named_with_the_one_that_is_needed(tmp_path):
    package = tmp_path / "verifiers" / "v1"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "clients.py").touch()  # without Client
    (tmp_path / "verifiers-0.3.1.dist-info").mkdir()
    (tmp_path / "verifiers-0.3.1.dist-info" / "METADATA").write_text("Name: verifiers\nVersion: 0.3.1\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import rollouts.environments.verifiers"
    result = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False)
    (line,) = result.stderr.splitlines()[-1:]
    assert (
        "UnsupportedVersionError: rollouts.environments.verifiers needs verifiers 0.4, and 0.3.1 is installed" in line
    )
    assert "'Client' from 'verifiers.v1.clients'" in line
