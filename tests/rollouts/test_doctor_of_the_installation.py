"""`rollouts doctor` without a URL: the installation, and which distribution `import renderers` belongs to."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from rollouts.cli.doctor import installation
from rollouts.cli.main import app


def run(monkeypatch: pytest.MonkeyPatch, renderers_version: str | None) -> tuple[int, str]:
    versions = {"mmrollouts": "0.1.0", "renderers": renderers_version}

    def distribution(name: str) -> SimpleNamespace:
        if versions.get(name) is None:
            raise installation.PackageNotFoundError(name)
        return SimpleNamespace(version=versions[name])

    monkeypatch.setattr(installation, "distribution", distribution)
    result = CliRunner().invoke(app, ["doctor"])
    return result.exit_code, result.stdout


def test_the_empty_distribution_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = run(monkeypatch, "0.1.12+mmrollouts.1")
    assert code == 0
    assert "the distribution renderers 0.1.12+mmrollouts.1 names it" in text


def test_the_other_distribution_beside_this_one_is_an_error_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = run(monkeypatch, "0.1.12")
    assert code == 1
    assert "pip uninstall -y renderers mmrollouts" in text


@pytest.mark.slow
def test_json_has_the_cores_and_the_versions() -> None:
    report = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert report["cores"].endswith(" may be used")
    assert report["numpy"] != "not installed"


@pytest.mark.parametrize("given", [["http://127.0.0.1:9"], ["--model", "absent"]])
def test_a_url_or_a_model_alone_is_an_error_that_asks_for_both(given: list[str]) -> None:
    result = CliRunner().invoke(app, ["doctor", *given])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: pass both: the URL of the server")


@pytest.mark.slow
def test_torch_is_not_loaded() -> None:
    module = "rollouts.cli.doctor.installation"
    program = f"import sys; from {module} import describe_installation; describe_installation(as_json=True)"
    ending = "; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program + ending], check=True)
