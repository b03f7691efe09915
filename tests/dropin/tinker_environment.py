"""The environment with tinker-cookbook and what this project requires: `python tests/dropin/tinker_environment.py`.

Programs in it find this project itself in PYTHONPATH.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

from environments import install
from sources import CACHE

_PROJECT = Path(__file__).resolve().parents[2]
_DIRECTORY = CACHE / "environments" / "tinker-cookbook-0.6.1"
PYTHON = _DIRECTORY / "bin" / "python"
_COOKBOOK = "tinker-cookbook==0.6.1"
# tinker-cookbook is installed without its requirements, and these are they, because one of them, tml-renderers>=0.4.1,
# which only renders models of the family Inkling, is not on every index.
_PACKAGES = [
    "tinker==0.38.0",
    "blobfile>=3",
    "chz>=0.4",
    "cloudpickle>=3",
    "datasets>=4",
    "pylatexenc>=2",
    "scikit-learn>=1.5",
    "sympy>=1.12",
    "math-verify>=0.5",
    "termcolor>=2",
    "tiktoken>=0.12",
    "torchvision",
    "tqdm>=4.60",
    "transformers>=5.15",
]


def prepare() -> None:
    """Make it if it is not there, a minute; a second process waits for the first.

    Raises `InstallError` where the package index does not answer or lacks a package.
    """
    wanted = "\n".join([_COOKBOOK, *_PACKAGES])
    stamp = _DIRECTORY / "mmrollouts-stamp"
    _DIRECTORY.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{_DIRECTORY}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
            return
        shutil.rmtree(_DIRECTORY, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", _DIRECTORY], check=True)
        install(PYTHON, f"{_PROJECT}[torch]", *_PACKAGES)
        install(PYTHON, "--no-deps", _COOKBOOK)
        # Beside a torch for the CPU, the one torchvision of PyPI does not import as it is.
        subprocess.run([PYTHON, _PROJECT / ".ci" / "torchvision_on_cpu.py"], check=True)
        stamp.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    prepare()
    print(PYTHON)
