"""`rollouts doctor` without a URL: versions, extras, GPUs and the system, and which `renderers` a program imports."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path
from platform import machine, platform, python_implementation, python_version
from shutil import which
from subprocess import DEVNULL, SubprocessError, run
from typing import Any, Final

import typer

import renderers
from renderers.installation import install_command
from renderers.process.threads import available_cores
from rollouts.terminal.table import Column, print_table
from rollouts.terminal.text import print_json, print_line

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
_EXTRA: Final = re.compile(r"""extra\s*==\s*["']([\w-]+)["']""")
#: An extra for those who change mmrollouts.
_DEVELOPMENT: Final = "dev"


def describe_installation(*, as_json: bool) -> bool:
    """Print versions, extras, GPUs and the system, for bug reports. torch is not loaded.

    False if another distribution's `renderers` is installed beside ours.
    """
    report = _report()
    if as_json:
        print_json(report)
    else:
        _print(report)
    return not report["conflict"]


def installed_version(name: str) -> str | None:
    """The version of an installed distribution; None if it is not installed."""
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def missing_requirements() -> dict[str, list[str]]:
    """By extra of mmrollouts, the names of the distributions that it needs and that are not installed.

    Versions are not compared. Empty where mmrollouts itself is not installed.
    """
    missing: dict[str, list[str]] = {}
    for requirement in _own_requirements():
        extra = _EXTRA.search(requirement)
        name = re.match(r"[\w.-]+", requirement)
        if extra is None or name is None or extra[1] == _DEVELOPMENT:
            continue
        of_extra = missing.setdefault(extra[1], [])
        if name[0] not in of_extra and _is_needed(requirement) and installed_version(name[0]) is None:
            of_extra.append(name[0])
    return missing


def _own_requirements() -> list[str]:
    try:
        return requires("mmrollouts") or []
    except PackageNotFoundError:
        return []


def _is_needed(requirement: str) -> bool:
    """Whether the conditions of a requirement on the Python version hold here; others are not used by extras."""
    limit = re.search(r"python_version\s*<\s*[\"'](\d+)\.(\d+)[\"']", requirement)
    return limit is None or sys.version_info[:2] < (int(limit[1]), int(limit[2]))


def _report() -> dict[str, Any]:
    installed = installed_version("renderers")
    return {
        "python": python_version(),
        "implementation": python_implementation(),
        "system": platform(),
        "machine": machine(),
        "cores": available_cores(),
        "packages": {name: installed_version(name) for name in _PACKAGES},
        "extras": missing_requirements(),
        "gpus": _gpus(),
        "renderers_at": str(Path(renderers.__file__).parent),
        "conflict": installed is not None and _STAND_IN not in installed,
    }


def _gpus() -> dict[str, Any]:
    """What `nvidia-smi` reports, a line for each GPU; `error` says why nothing is known."""
    program = which("nvidia-smi")
    if program is None:
        return {"found": [], "error": "nvidia-smi is not installed"}
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        # The program is the system's own, and its arguments are constants.
        result = run(  # noqa: S603
            query,
            stdin=DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10.0,
            check=True,
        )
    except (OSError, SubprocessError) as error:
        return {"found": [], "error": f"nvidia-smi failed: {error}"}
    return {"found": result.stdout.splitlines(), "error": ""}


def _print(report: dict[str, Any]) -> None:
    packages: dict[str, str | None] = report["packages"]
    gpus: list[str] = report["gpus"]["found"] or [f"none known ({report['gpus']['error'] or 'nvidia-smi lists none'})"]
    rows = [
        ("python", f"{report['python']} ({report['implementation']})"),
        ("system", f"{report['system']}, {report['machine']}"),
        ("cores", f"{report['cores']} may be used"),
        *(("gpu", gpu) for gpu in gpus),
        *((name, version or "not installed") for name, version in packages.items()),
    ]
    print_table([Column("what"), Column("value", wraps=True)], rows)
    extras: dict[str, list[str]] = report["extras"]
    if extras:
        typer.echo()
        extra_rows = [(name, _extra_text(name, missing)) for name, missing in sorted(extras.items())]
        print_table([Column("extra"), Column("state", wraps=True)], extra_rows)
    typer.echo()
    print_line(_renderers_text(packages["renderers"], report["renderers_at"]))


def _extra_text(extra: str, missing: list[str]) -> str:
    if not missing:
        return "installed"
    return f"needs {', '.join(missing)}: {install_command(extra)}"


def _renderers_text(installed: str | None, place: str) -> str:
    """Which distribution `import renderers` belongs to."""
    if installed is None:
        return (
            f"`import renderers` gives mmrollouts ({place}). To install verifiers or prime-rl with it, see "
            "docs/migrating-from-renderers.md: they require a distribution named renderers."
        )
    if _STAND_IN in installed:
        return f"`import renderers` gives mmrollouts ({place}); the distribution renderers {installed} names it."
    return (
        f"`import renderers` gives mmrollouts ({place}), and the distribution renderers {installed} of PyPI, whose "
        "files have the same place, is installed too: some files may be of either. Run `pip uninstall -y renderers "
        "mmrollouts`, then install mmrollouts and the distribution of packaging/renderers."
    )
