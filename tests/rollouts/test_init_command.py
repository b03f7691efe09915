"""`rollouts init`: a project whose test passes and whose run runs, and directories that it must not change."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from rollouts.cli.init import Template
from rollouts.cli.main import app


@pytest.fixture(autouse=True)
def _environment_of_each_project() -> Iterator[None]:
    """Each project has a module of its own named `environment`."""
    path = list(sys.path)
    yield
    sys.modules.pop("environment", None)
    sys.path[:] = path


def rollouts(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("template", list(Template))
@pytest.mark.slow
def test_the_test_of_a_new_project_passes_and_its_run_runs(
    template: Template, tmp_path: Path, tiny_model_dir: Path
) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--no-such-option"\n')
    project = tmp_path / "a project"
    result = rollouts("init", project, "--template", template.value)
    assert result.exit_code == 0, result.output
    pytest_run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tests = subprocess.run(pytest_run, cwd=project, capture_output=True, text=True)
    assert tests.returncode == 0, tests.stdout + tests.stderr
    (project / "model").symlink_to(tiny_model_dir)
    dry = rollouts("run", project / "run.toml", "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert "1 image of " in dry.output
    run = rollouts("run", project / "run.toml", "--limit", "2")
    assert run.exit_code == 0, run.output
    summary = json.loads((project / "out/summary.json").read_text())
    assert (summary["groups"], summary["failed"]) == (2, 0)
    options = ["output.directory=trained", "train.steps=1", "train.groups=2", "supervised.steps=2"]
    trained = rollouts("train", project / "run.toml", *(part for one in options for part in ("--set", one)))
    assert trained.exit_code == 0, trained.output
    assert (project / "trained/last/model.safetensors").exists()
    step = [json.loads(line)["metrics"] for line in (project / "trained/training.jsonl").read_text().splitlines()]
    assert max(metrics.get("mismatch_max", 0) for metrics in step) < 1e-5


@pytest.mark.parametrize("existing", ["run.toml", "README.md", ".gitignore"])
def test_no_file_is_replaced_and_none_is_added_beside_it(existing: str, tmp_path: Path) -> None:
    (tmp_path / existing).write_text("mine")
    result = rollouts("init", tmp_path)
    assert result.exit_code == 2
    assert f"{existing}: it exists, and no file is replaced" in result.output
    assert [path.name for path in tmp_path.iterdir()] == [existing]
    assert (tmp_path / existing).read_text() == "mine"


def test_a_link_without_a_target_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "run.toml").symlink_to(tmp_path / "elsewhere")
    assert rollouts("init", tmp_path).exit_code == 2
    assert not (tmp_path / "elsewhere").exists()
