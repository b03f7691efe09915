"""Virtual environments: each version of verifiers with PyPI's renderers (`stock`) and with this project (`ours`)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sources import CACHE, source

Package = Literal["stock", "ours"]

_PROJECT = Path(__file__).resolve().parents[2]
_SHIM = _PROJECT / "packaging" / "renderers"
_WHEELS = CACHE / "wheels"
# What the tests need beside their program. verifiers asks for a pytest before 9.1.
_TOOLS = [
    "torch",
    "torchvision",
    "pytest<9.1",
    "pytest-asyncio>=1.0",
    "pytest-xdist>=3.6",
    "nest-asyncio>=1.6",
    "openai-harmony>=0.0.4",
]
_EXTRAS = "[multimodal,transformers]"


class InstallError(Exception):
    """uv could not make an environment, or the package `renderers` in it is not that of the intended distribution."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment of the cache: `verifiers-0.4.0-stock`."""

    program: str  # a row of sources.toml
    package: Package

    @property
    def directory(self) -> Path:
        return CACHE / "environments" / f"{self.program}-{self.package}"

    @property
    def python(self) -> Path:
        return self.directory / "bin" / "python"

    def prepare(self) -> None:
        """Make it if it is not there, half a minute; put this project's present state into `ours`."""
        renderers = source(self.program).renderers if self.package == "stock" else _shim_version()
        wanted = [*_TOOLS, source(self.program).requirement, f"renderers{_EXTRAS}=={renderers}"]
        stamp = self.directory / "mmrollouts-stamp"
        if self.package == "ours":
            _build_wheels()
        if not stamp.is_file() or stamp.read_text() != "\n".join(wanted):
            shutil.rmtree(self.directory, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(self.directory)], check=True)
            self.install(*wanted)
            # Beside a torch for the CPU, the one torchvision of PyPI does not import as it is.
            subprocess.run([self.python, _PROJECT / ".ci" / "torchvision_on_cpu.py"], check=True)
            stamp.write_text("\n".join(wanted))
        elif self.package == "ours":
            self.install("--force-reinstall", "--no-deps", "mmrollouts", f"renderers=={renderers}")
        self._check()

    def install(self, *arguments: str) -> None:
        """Raises `InstallError`."""
        # `stock` without the wheels: 0.1.12+mmrollouts.1 is what uv takes for renderers==0.1.12 where it finds it.
        install(self.python, *arguments, wheels=_WHEELS if self.package == "ours" else None)

    def _check(self) -> None:
        """Which distribution the package `renderers` comes from."""
        program = "import importlib.metadata as m; print(sorted(set(m.packages_distributions()['renderers'])))"
        found = subprocess.run([self.python, "-c", program], check=True, capture_output=True, text=True).stdout.strip()
        intended = str(["renderers"] if self.package == "stock" else ["mmrollouts"])
        if found != intended:
            raise InstallError(f"{self.directory}: the package renderers belongs to {found}, not {intended}")


def install(python: Path, *arguments: str, wheels: Path | None = None) -> None:
    """Install with uv, also from a folder of wheels. Raises `InstallError`."""
    # An option --find-links would replace UV_FIND_LINKS, which may have the build of torch for the CPU.
    links = ",".join(filter(None, [os.environ.get("UV_FIND_LINKS"), wheels and str(wheels)]))
    options = ["--quiet", "--python", str(python), "--constraints", str(_PROJECT / ".ci" / "constraints.txt")]
    _make("uv", "pip", "install", *options, *arguments, UV_FIND_LINKS=links)


def _make(*module_and_arguments: str, **variables: str) -> None:
    """Run uv or pip, as a module of this Python. Raises `InstallError`."""
    environment = {**os.environ, **variables}
    status = subprocess.run([sys.executable, "-m", *module_and_arguments], env=environment, check=False).returncode
    if status:
        raise InstallError(
            f"{' '.join(module_and_arguments)} ended with status {status}, see its messages above; the package index "
            "that it is configured with must be reachable"
        )


def _build_wheels() -> None:
    """Wheels of this project and of the distribution that stands in for PyPI's, as they are in the working tree."""
    _WHEELS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        _make("pip", "wheel", "-qq", "--no-input", "--no-deps", "--wheel-dir", scratch, str(_PROJECT), str(_SHIM))
        for wheel in Path(scratch).iterdir():
            wheel.replace(_WHEELS / wheel.name)


def _shim_version() -> str:
    return str(tomllib.loads((_SHIM / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])
