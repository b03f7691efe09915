"""Runs tests/environments, which need verifiers 0.4, in the environment that has it with this project.

    python tests/dropin/verifiers_environment.py
    python tests/dropin/verifiers_environment.py -m real tests/real/test_real_verifiers.py   # with a real vLLM

Arguments go to pytest. The environment is that of `tests/dropin/main.py ours` (`verifiers-0.4.0`), made if it is not
there; the tests run on the working tree.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from environments import Environment

_PROJECT = Path(__file__).resolve().parents[2]


def main() -> int:
    environment = Environment("verifiers-0.4.0", "ours")
    if not environment.python.is_file():
        environment.prepare()
    # Imported by tests/conftest.py; the statistics of an evaluation.
    environment.install("hypothesis>=6.120", "scipy>=1.15")
    pytest = [environment.python, "-m", "pytest", "-n", "0", *(sys.argv[1:] or ["tests/environments"])]
    return subprocess.run(pytest, cwd=_PROJECT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
