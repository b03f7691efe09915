"""What `uv run` starts in tests of others: recipes of tinker-cookbook offline, and `rollouts tinker` as SkyRL's server.

    python tests/dropin/tinker_uv.py run [--extra NAME] [python] -m MODULE [OPTION ...]

`tinker_suites.py` puts it in the place of `uv`.
"""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

import tinker_environment

_HERE = Path(__file__).resolve().parent


def main() -> None:
    at = sys.argv.index("-m")
    module, given = sys.argv[at + 1], sys.argv[at + 2 :]
    command = _server(given) if module == "skyrl.tinker.api" else _recipe(module, given)
    os.execv(command[0], command)


def _server(given: list[str]) -> list[str]:
    """The options of its server come in pairs, and those that `rollouts tinker` has are taken. `--base-model` is the
    name of a directory here."""
    options = dict(zip(given[::2], given[1::2], strict=True))
    rollouts = str(Path(sys.executable).with_name("rollouts"))
    return [rollouts, "tinker", "--model", options["--base-model"], "--port", options["--port"]]


def _recipe(module: str, given: list[str]) -> list[str]:
    """The recipe in its environment, with what tinker_suites.toml adds to its options."""
    rows = tomllib.loads((_HERE / "tinker_suites.toml").read_text(encoding="utf-8"))["option"]
    added = [f"{row['name']}={row['value']}" for row in rows if module in row["modules"]]
    return [str(tinker_environment.PYTHON), str(_HERE / "tinker_offline_recipe.py"), module, *given, *added]


if __name__ == "__main__":
    main()
