"""`pytest -m quick` collects the modules that it lists, and no other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from quick import QUICK_MODULES

ROOT = Path(__file__).parent.parent


def test_every_module_of_the_quick_run_exists() -> None:
    assert [module for module in sorted(QUICK_MODULES) if not (ROOT / module).is_file()] == []


def test_the_quick_run_collects_a_module_that_is_listed_and_no_other() -> None:
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "quick", "--collect-only", "-p", "no:cacheprovider"]
    folder = ROOT / "tests" / "transport"
    done = subprocess.run([*command, str(folder)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "tests/transport/test_limits.py:" in done.stdout, done.stderr
    assert "tests/transport/test_joining.py:" not in done.stdout
