"""The built files of the front end are those that its source gives."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser

FRONTEND = Path(__file__).parents[3] / "rollouts" / "view" / "frontend"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the front end beside an empty directory for its built files, with the installed packages."""
    assert (FRONTEND / "node_modules").is_dir(), "run `npm ci` in rollouts/view/frontend"
    copied = tmp_path_factory.mktemp("view") / "frontend"
    shutil.copytree(FRONTEND, copied, ignore=shutil.ignore_patterns("node_modules"))
    (copied / "node_modules").symlink_to(FRONTEND / "node_modules")
    (copied.parent / "static").mkdir()
    return copied


def test_a_new_build_gives_the_committed_files(copy):
    subprocess.run(["npm", "run", "build"], cwd=copy, check=True, capture_output=True)
    for name in ("viewer.js", "viewer.css"):
        committed = (FRONTEND.parent / "static" / name).read_bytes()
        assert (copy.parent / "static" / name).read_bytes() == committed, f"{name}: run `npm run build` in {FRONTEND}"


def test_the_types_of_the_source_hold(copy):
    subprocess.run(["npm", "run", "check"], cwd=copy, check=True, capture_output=True)
