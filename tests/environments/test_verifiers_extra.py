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
