"""The servers of a fleet: of a file, and of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rollouts.errors import ArgumentError, MissingExtraError, ServerActorError, ServerFileError, describe_exception


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


_FIRST_SECONDS: Final = 60.0  # for an actor that is being placed
_NEXT_SECONDS: Final = 5.0  # for one whose server is started again, meanwhile the fleet goes on without it


class RayServerNames:
    """The addresses of servers by the names of actors, which have a method `base_url`, as those of `RayServers` do.

    Requests go to the addresses: pixels do not pass through actors. Raises `ArgumentError`.
    """

    def __init__(self, names: Sequence[str], namespace: str | None) -> None:
        if isinstance(names, str) or not names or not all(isinstance(name, str) for name in names):
            raise ArgumentError("names", names, "pass a list of names of actors")
        self._names = list(names)
        self._namespace = namespace
        self._urls: dict[str, str] = {}

    def read(self) -> list[str]:
        """The addresses. Raises `ServerActorError` for a name without such an actor, and `MissingExtraError`."""
        self._urls = {name: self._ask(name, _FIRST_SECONDS) for name in self._names}
        return list(self._urls.values())

    def read_if_changed(self) -> list[str] | None:
        """The addresses if one has changed since the last call, else None. That of a lost actor stays as it was."""
        urls = dict(self._urls)
        for name in self._names:
            try:
                urls[name] = self._ask(name, _NEXT_SECONDS)
            except ServerActorError:
                continue
        if urls == self._urls:
            return None
        self._urls = urls
        return list(urls.values())

    def _ask(self, name: str, seconds: float) -> str:
        ray = _ray()
        try:
            actor = ray.get_actor(name, namespace=self._namespace)
            return str(ray.get(actor.base_url.remote(), timeout=seconds))
        except (ValueError, AttributeError, TimeoutError, ray.exceptions.RayError) as error:
            raise ServerActorError(name, describe_exception(error)) from error


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("EngineFleet.from_ray", "ray", "ray") from error
    if not ray.is_initialized():
        rule = 'call rollouts.ray.connect(), or ray.init(address="auto"), before EngineFleet.from_ray'
        raise ArgumentError("names", "no connection to Ray", rule)
    return ray
