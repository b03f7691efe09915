"""A file that names the servers of a fleet, one address a line, read again when it changes."""

from __future__ import annotations

import os
from pathlib import Path

from rollouts.errors import ServerFileError


class ServerFile:
    """Empty lines, and what follows a `#`, are ignored. Replace the file in one step (`os.replace`) to change it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._read_version: tuple[int, int, int] | None = None

    def read(self) -> list[str]:
        """The addresses. Raises `ServerFileError` where it cannot be read, or names no server."""
        try:
            self._read_version = self._version()
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ServerFileError(self.path, str(error)) from error
        addresses = [line.partition("#")[0].strip() for line in text.splitlines()]
        if not any(addresses):
            raise ServerFileError(self.path, "it names no server; write one address a line")
        return [address for address in addresses if address]

    def read_if_changed(self) -> list[str] | None:
        """The addresses if the file has changed since the last `read`, else None. Raises `ServerFileError`."""
        try:
            changed = self._version() != self._read_version
        except OSError as error:
            raise ServerFileError(self.path, str(error)) from error
        return self.read() if changed else None

    def _version(self) -> tuple[int, int, int]:
        status = self.path.stat()
        return status.st_ino, status.st_mtime_ns, status.st_size
