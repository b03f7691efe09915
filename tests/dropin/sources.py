"""Source distributions that the bench reads: downloaded by pip, checked against their digest, unpacked once."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(
    os.environ.get("MMROLLOUTS_DROPIN_CACHE")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmrollouts" / "dropin"
)
_PINS = tomllib.loads(Path(__file__).with_name("sources.toml").read_text(encoding="utf-8"))


class SourceError(Exception):
    """A source distribution cannot be had, or is not the pinned one."""


@dataclass(frozen=True)
class Source:
    """A pinned source distribution; `renderers` is the release of PyPI's renderers that its tests are compared with."""

    distribution: str
    version: str
    sha256: str
    renderers: str | None = None

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"


def source(name: str) -> Source:
    """The row `name` of sources.toml."""
    return Source(**_PINS[name])


def fetch(name: str) -> Path:
    """The unpacked folder of the row `name`; downloaded if it is not there."""
    pinned = source(name)
    target = CACHE / "sources" / f"{pinned.distribution}-{pinned.version}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        archive = _download(pinned, Path(scratch))
        with tarfile.open(archive) as packed:
            packed.extractall(scratch, filter="data")
        (unpacked,) = (path for path in Path(scratch).iterdir() if path.is_dir())
        unpacked.rename(target)
    return target


def _download(pinned: Source, folder: Path) -> Path:
    options = ["-qq", "--no-input", "--retries", "2", "--timeout", "60", "--no-deps", "--dest", str(folder)]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        *options,
        "--no-binary",
        pinned.distribution,
        pinned.requirement,
    ]
    done = subprocess.run(command, check=False)
    archives = list(folder.glob("*.tar.gz"))
    if done.returncode or len(archives) != 1:
        raise SourceError(
            f"pip download {pinned.requirement} gave no source distribution (status {done.returncode}); the package "
            "index that pip is configured with must be reachable and have it"
        )
    digest = hashlib.sha256(archives[0].read_bytes()).hexdigest()
    if digest != pinned.sha256:
        raise SourceError(f"{archives[0].name} has sha256 {digest}; sources.toml requires {pinned.sha256}")
    return archives[0]
