"""What `mkdocs` prints while it builds the site: nothing but its own lines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
LOAD = "import sys; from mkdocs.config import load_config; load_config(sys.argv[1])"


def printed_with(configuration: Path) -> str:
    """What is printed when the configuration is loaded, with the theme and the hooks."""
    environment = {name: value for name, value in os.environ.items() if name != "NO_MKDOCS_2_WARNING"}
    # The theme prints for the program `mkdocs` only.
    program = f"import sys; sys.argv[0] = 'mkdocs'; {LOAD}"
    done = subprocess.run(
        [sys.executable, "-c", program, configuration], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_build_prints_no_advertisement_of_the_theme(tmp_path: Path) -> None:
    assert printed_with(ROOT / "mkdocs.yml") == ""
    (tmp_path / "docs").mkdir()
    other = tmp_path / "mkdocs.yml"
    other.write_text("site_name: other\ntheme:\n  name: material\n")
    assert "NO_MKDOCS_2_WARNING" in printed_with(other)
