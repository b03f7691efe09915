"""Light at the edge: what importing the packages loads, and whose `renderers` it accepts."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from renderers.installation import install_command

ROOT = Path(__file__).parent.parent
HEAVY = [
    *("torch", "transformers", "torchvision", "sklearn", "matplotlib", "vllm"),
    *("gymnasium", "mcp", "prometheus_client"),
]
PACKAGES = [
    *("renderers", "transport"),
    *("rollouts", "rollouts.testing", "rollouts.environments", "rollouts.runner", "rollouts.observability"),
    "rollouts.cli.traj.levels",
]


def run(code: str, *first_on_path: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that sees these directories, then the repository."""
    path = os.pathsep.join(str(directory) for directory in (*first_on_path, ROOT))
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def loaded(imports: str) -> set[str]:
    result = run(f"import sys\n{imports}\nprint(*(name for name in {HEAVY} if name in sys.modules))")
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_loads_no_heavy_library(package: str) -> None:
    assert loaded(f"import {package}") == set()


@pytest.mark.slow
def test_the_import_check_sees_a_planted_import() -> None:
    assert loaded("import renderers, sklearn") == {"sklearn"}


@pytest.mark.slow
def test_loading_and_using_a_renderer_loads_no_heavy_library(tiny_model_dir: Path) -> None:
    use = f"""
import numpy, renderers
renderer = renderers.load_renderer({str(tiny_model_dir)!r})
part = {{"type": "image", "image": numpy.zeros((32, 32, 3), dtype=numpy.uint8)}}
prompt = renderer.render([{{"role": "user", "content": [part]}}], add_generation_prompt=True)
renderer.bridge_to_next_turn(prompt.token_ids, [65], [{{"role": "user", "content": "x"}}],
    previous_multi_modal_data=prompt.multi_modal_data)
renderer.parse_response([65])"""
    assert loaded(use) == set()


def test_the_renderers_package_of_another_distribution_is_refused_with_what_to_uninstall(tmp_path: Path) -> None:
    foreign = tmp_path / "renderers"
    foreign.mkdir()
    (foreign / "__init__.py").write_text("__version__ = '0.1.12'\n")
    result = run("import rollouts", tmp_path)
    assert result.returncode != 0
    assert "belongs to another distribution" in result.stderr
    assert str(foreign / "__init__.py") in result.stderr
    assert "pip uninstall -y renderers mmrollouts" in result.stderr
    assert "mmrollouts" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("module", ["rollouts.engines.local", "rollouts.training"])
def test_what_needs_torch_names_the_extra_where_torch_is_missing(module: str) -> None:
    result = run(f"import sys; sys.modules['torch'] = None; import {module}")
    assert "MissingExtraError" in result.stderr.splitlines()[-1]
    assert install_command("torch") in result.stderr.splitlines()[-1]


@pytest.mark.slow
def test_the_tiny_model_without_weights_needs_no_torch(tmp_path: Path) -> None:
    use = "from rollouts.testing import tiny_qwen3_vl"
    assert (
        loaded(f"{use}; import renderers; renderers.load_renderer(tiny_qwen3_vl({str(tmp_path)!r}, weights=False))")
        == set()
    )
    assert not list(tmp_path.glob("*.safetensors"))


def installed_beside(folder: Path, init: str | None) -> Path:
    """A copy of `renderers` between the files of another package of that name; `init`: its `__init__.py` won."""
    package = shutil.copytree(ROOT / "renderers", folder / "renderers", ignore=shutil.ignore_patterns("__pycache__"))
    (package / "_version.py").write_text("__version__ = '0.1.12'\n")
    (package / "qwen3.py").write_text("from renderers.parsing import parse_qwen3\n")
    if init is not None:
        (package / "__init__.py").write_text(init)
    return package


@pytest.mark.parametrize(
    ("init", "use"),
    [(None, "import renderers"), ("", "import renderers.qwen3")],
    ids=["ours was installed last", "theirs was installed last"],
)
def test_two_packages_of_the_name_in_one_folder_are_refused_with_what_to_do(
    tmp_path: Path, init: str | None, use: str
) -> None:
    package = installed_beside(tmp_path, init)
    (line,) = run(use, tmp_path).stderr.splitlines()[-1:]
    assert line.startswith(f"ImportError: {package} has files of PyPI's renderers")
    assert "pip uninstall -y renderers mmrollouts" in line
