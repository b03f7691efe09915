"""`rollouts doctor` without a URL: versions and the system, and which `renderers` a program imports."""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from platform import machine, platform, python_implementation, python_version
from typing import Final

import renderers
from renderers.process.threads import available_cores
from rollouts.terminal.table import Column, print_table
from rollouts.terminal.text import print_json

_PACKAGES: Final = (
    "mmrollouts",
    "renderers",
    "verifiers",
    "vllm",
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "pillow",
)
#: The local part of the version of our distribution `renderers` (`packaging/renderers`).
_STAND_IN: Final = "+mmrollouts"


def describe_installation(*, as_json: bool) -> bool:
    """Print versions and the system; False if another distribution's `renderers` is installed beside ours."""
    installed = installed_version("renderers")
    report = {
        "python": f"{python_version()} ({python_implementation()})",
        "system": f"{platform()}, {machine()}",
        "cores": f"{available_cores()} may be used",
        **{name: installed_version(name) or "not installed" for name in _PACKAGES},
        "import renderers": f"mmrollouts ({Path(renderers.__file__).parent}){_advice(installed)}",
    }
    if as_json:
        print_json(report)
    else:
        print_table([Column("what"), Column("value", wraps=True)], report.items())
    return installed is None or _STAND_IN in installed


def installed_version(name: str) -> str | None:
    """The version of an installed distribution; None if it is not installed."""
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def _advice(installed: str | None) -> str:
    """What to do about the distribution that is installed under the name `renderers`."""
    if installed is None:
        return (
            ". To install verifiers or prime-rl with it, see docs/migrating-from-renderers.md: they require "
            "a distribution named renderers."
        )
    if _STAND_IN in installed:
        return f"; the distribution renderers {installed} names it."
    return (
        f", and the distribution renderers {installed} of PyPI, whose files have the same place, is "
        "installed too: some files may be of either. Run `pip uninstall -y renderers mmrollouts`, then "
        "install mmrollouts and the distribution of packaging/renderers."
    )
