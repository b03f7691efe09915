"""The key files of workers and their orchestrator, and the errors of both."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from renderers.process.files import open_readable
from rollouts.errors import RolloutsError
from rollouts.files import errors_name, made_directory
from transport.link import ClientKeys, ServerKeys, generate_keypair


class OrchestratorLostError(RolloutsError):
    """A worker could not reach its orchestrator for as long as it may wait. `seconds` is how long it has tried.

    Cure: start the orchestrator, or correct the address, and check that both sides have the keys of one set.
    """

    def __init__(self, address: str, seconds: float, reason: str) -> None:
        self.address = address
        self.seconds = seconds
        self.reason = reason
        super().__init__(
            f"no orchestrator at {address} for {seconds:.0f} s ({reason.removesuffix('.')}); start it, or correct the "
            "address, and check that both sides have the keys of one set"
        )


class KeyFileError(RolloutsError, ValueError):
    """A file of keys cannot be used. Its text has none of the keys.

    Cure: make a set of key files with `rollouts keys DIRECTORY`.
    """

    def __init__(self, path: object, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path}: {reason}; make a set of key files with `rollouts keys DIRECTORY`")


# Files of keys: one for the orchestrator, one for all its workers. Only their owner can read them.


K = TypeVar("K")

ORCHESTRATOR_FILE: Final = "orchestrator-keys.toml"
WORKER_FILE: Final = "worker-keys.toml"


def write_key_files(directory: Path) -> tuple[Path, Path]:
    """Make a set of keys: the file of the orchestrator and that of its workers, in a directory, which is made.

    Copy the second to each machine of a worker. Raises `KeyFileError` rather than replacing a file, and `OSError`.
    """
    public, secret = generate_keypair()
    worker_public, worker_secret = generate_keypair()
    orchestrator, worker = directory / ORCHESTRATOR_FILE, directory / WORKER_FILE
    for path in (orchestrator, worker):
        if path.exists():
            raise KeyFileError(path, "it exists, and processes may use it: remove it first")
    with made_directory(directory) as made:
        for path, values in (
            (orchestrator, {"public": public, "secret": secret, "workers": worker_public}),
            (worker, {"public": worker_public, "secret": worker_secret, "orchestrator": public}),
        ):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            made.append(path)
            with errors_name(path), open(descriptor, "w", encoding="ascii") as file:
                # Literal strings of TOML: no character of a key is special in them.
                file.writelines(f"{name} = '{value}'\n" for name, value in values.items())
    return orchestrator, worker


def read_orchestrator_keys(path: Path) -> ServerKeys:
    """The keys of `LinkWorkers`. Raises `KeyFileError` and `OSError`."""
    public, secret, workers = _read(path, "public", "secret", "workers")
    return _checked(path, lambda: ServerKeys(public, secret, [workers]))


def read_worker_keys(path: Path) -> ClientKeys:
    """The keys of a worker. Raises `KeyFileError` and `OSError`."""
    public, secret, orchestrator = _read(path, "public", "secret", "orchestrator")
    return _checked(path, lambda: ClientKeys(public, secret, orchestrator))


def _read(path: Path, *names: str) -> tuple[str, ...]:
    with open_readable(path) as file:
        _check_privacy(path, os.fstat(file.fileno()))
        try:
            values: dict[str, Any] = tomllib.loads(file.read().decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise KeyFileError(path, "it is not TOML") from error
    found = [values.get(name) for name in names]
    texts = tuple(value for value in found if isinstance(value, str))
    if len(texts) < len(names):
        missing = ", ".join(name for name, value in zip(names, found, strict=True) if not isinstance(value, str))
        raise KeyFileError(path, f"it has no {missing}; it is not the file of this side")
    return texts


def _check_privacy(path: Path, status: os.stat_result) -> None:
    if status.st_mode & 0o077:
        raise KeyFileError(path, f"other users may read it; run `chmod 600 {path}` if none has")
    if status.st_uid not in (os.geteuid(), 0):  # root can read every file
        owner = f"user {status.st_uid} owns it, and can read and replace it"
        raise KeyFileError(path, f"{owner}; run `chown {os.geteuid()} {path}` if that user is trusted")


def _checked(path: Path, make: Callable[[], K]) -> K:
    try:
        return make()
    except ValueError as error:  # its text has no key
        raise KeyFileError(path, str(error).rstrip(".")) from error
