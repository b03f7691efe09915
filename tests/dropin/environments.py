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
    """pip could not make an environment, or put another distribution into it than was meant."""


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
        """Make it if it is not there, about three minutes; put this project's present state into `ours`."""
        renderers = source(self.program).renderers if self.package == "stock" else _shim_version()
        wanted = [*_TOOLS, source(self.program).requirement, f"renderers{_EXTRAS}=={renderers}"]
        stamp = self.directory / "mmrollouts-stamp"
        if self.package == "ours":
            _build_wheels()
        if not stamp.is_file() or stamp.read_text() != "\n".join(wanted):
            shutil.rmtree(self.directory, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(self.directory)], check=True)
            self._install(*wanted)
            # Beside a torch for the CPU, the one torchvision of PyPI does not import as it is.
            subprocess.run([self.python, _PROJECT / ".ci" / "torchvision_on_cpu.py"], check=True)
            stamp.write_text("\n".join(wanted))
        elif self.package == "ours":
            self._install("--force-reinstall", "--no-deps", "mmrollouts", f"renderers=={renderers}")
        self._check()

    def _install(self, *arguments: str) -> None:
        command = [self.python, "-m", "pip", "install", "-qq", "--find-links", str(_WHEELS), *arguments]
        environment = {**os.environ, "PIP_CONSTRAINT": str(_PROJECT / ".ci" / "constraints.txt")}
        if subprocess.run(command, env=environment, check=False).returncode:
            raise InstallError(f"pip cannot install into {self.directory}: {' '.join(arguments)}")

    def _check(self) -> None:
        """Which distribution the package `renderers` comes from."""
        ask = "import importlib.metadata as m; print(sorted(set(m.packages_distributions()['renderers'])))"
        said = subprocess.run([self.python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
        meant = str(["renderers"] if self.package == "stock" else ["mmrollouts"])
        if said != meant:
            raise InstallError(f"{self.directory}: the package renderers belongs to {said}, not {meant}")


def _build_wheels() -> None:
    """Wheels of this project and of the distribution that stands in for PyPI's, as they are in the working tree."""
    _WHEELS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        build = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--wheel-dir", scratch]
        subprocess.run([*build, str(_PROJECT), str(_SHIM)], check=True)
        for wheel in Path(scratch).iterdir():
            wheel.replace(_WHEELS / wheel.name)


def _shim_version() -> str:
    return str(tomllib.loads((_SHIM / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])
