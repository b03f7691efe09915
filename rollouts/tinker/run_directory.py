"""The runs of a server and their checkpoints, on disk: a server that is started again finds all of them.

    DIR/MODEL_ID/run.json                  what is trained
    DIR/MODEL_ID/weights/NAME/             a checkpoint of `Trainer.save`
    DIR/MODEL_ID/weights/NAME.json         written after it: a directory without this file is no checkpoint
    DIR/MODEL_ID/sampler_weights/NAME/     of `Trainer.save_for_sampler`
    DIR/MODEL_ID/external_weights/NAME/    of the same, for a client to download
    DIR/MODEL_ID/unlisted/NAME/            of the same, until the server or the session ends

A checkpoint has the URI `tinker://MODEL_ID/KIND/NAME`.
"""

import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, cast, get_args

from pydantic import AwareDatetime
from pydantic.dataclasses import dataclass

from rollouts.errors import ArgumentError
from rollouts.files import replaced_file
from rollouts.serve.errors import RequestError
from rollouts.values import check_integer
from transport.errors import FileLockedError
from transport.records.file_lock import locked

log = logging.getLogger("rollouts.tinker")

Record = TypeVar("Record", "TrainingRun", "Checkpoint")
Kind = Literal["weights", "sampler_weights", "external_weights"]

#: A checkpoint is deleted as long after it has expired: the clocks of machines differ.
KEPT_EXPIRED: Final = timedelta(hours=1)
#: What clients accept as the longest time until a checkpoint expires.
MAX_TTL_SECONDS: Final = 10 * 366 * 24 * 3600
_SCHEME: Final = "tinker://"
_UNLISTED: Final = "unlisted"
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:=+@,-]{0,127}")
_NAME_RULE: Final = "pass 1 to 128 letters, digits and characters of _.:=+@,- that begin with a letter, a digit or _"


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A model that is or was trained. `lora`: the fields of its `LoraOptions`; None: all parameters were trained."""

    model_id: str
    base_model: str
    session_id: str
    lora: dict[str, Any] | None
    created: AwareDatetime
    user_metadata: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint. Times are in UTC; `expires_at` None: it is kept until it is deleted."""

    model_id: str
    kind: Kind
    name: str
    created: AwareDatetime
    size_bytes: int
    user_metadata: dict[str, str] | None = None
    expires_at: AwareDatetime | None = None

    @property
    def uri(self) -> str:
        return uri_of(self.model_id, self.kind, self.name)


def uri_of(model_id: str, kind: str, name: str) -> str:
    return f"{_SCHEME}{model_id}/{kind}/{name}"


class RunDirectory:
    """Threads may share one. A checkpoint that has expired is not found.

    It is deleted by `tidy`, or when it is met, once that was `KEPT_EXPIRED` ago. `now` is the time of day.

    Raises `RequestError` (404) for runs and checkpoints that do not exist, and `ArgumentError` for wrong
    values.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.directory = self.directory.resolve()
        self._now = now
        self._tidied: datetime | None = None
        # Re-entrant: `saving` and `set_ttl` read checkpoints under it, and reading takes it.
        self._lock = threading.RLock()
        self._being_saved: set[Path] = set()
        self._owned = ExitStack()

    def own(self) -> None:
        """Keep other servers out until `release`, and remove what an earlier one left without a name.

        Raises `ArgumentError` where another server has the directory. The lock ends with the process that has
        it.
        """
        try:
            self._owned.enter_context(locked(self.directory / "server.lock", make=True))
        except FileLockedError as error:
            rule = "another server keeps its checkpoints there; end that one, or pass another directory"
            raise ArgumentError("--run", str(self.directory), rule) from error
        for run in self.training_runs():
            self._remove_unlisted(run)

    def release(self) -> None:
        """Let other servers have the directory."""
        self._owned.close()

    # Runs.

    def add_run(self, run: TrainingRun) -> Path:
        """Write what is trained. Returns the directory of the run, for other files about it."""
        directory = self._path(run.model_id)
        directory.mkdir()
        _write(directory / "run.json", run)
        return directory

    def has_run(self, model_id: str) -> bool:
        return self._read_run(model_id) is not None

    def training_run(self, model_id: str) -> TrainingRun:
        if (run := self._read_run(model_id)) is None:
            raise RequestError(404, f"there is no training run {model_id!r:.200} here; list those that there are")
        return run

    def training_runs(self) -> list[TrainingRun]:
        """All of them, the newest first."""
        with os.scandir(self.directory) as entries:
            names = [each.name for each in entries if each.is_dir(follow_symlinks=False)]
        runs = [run for name in names if (run := self._read_run(name)) is not None]
        return sorted(runs, key=lambda run: (run.created, run.model_id), reverse=True)

    def last_change(self, model_id: str) -> datetime:
        """When the newest file of a run was written."""
        self.training_run(model_id)
        with os.scandir(self._path(model_id)) as entries:
            return datetime.fromtimestamp(max(each.stat(follow_symlinks=False).st_mtime for each in entries), UTC)

    # Checkpoints.

    @contextmanager
    def saving(
        self,
        model_id: str,
        kind: Kind,
        name: str,
        *,
        overwrite: bool = False,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> Iterator[Path]:
        """The path of a directory that the block writes: a checkpoint when the block has ended without an error.

        What a process that was killed while it wrote has left there is removed. A checkpoint of this name is
        an error, except of kind `weights` with `overwrite`, whose file the block replaces.
        """
        self.training_run(model_id)
        path = self._path(model_id, kind, name)
        expires_at = self._expiry(ttl_seconds)
        with self._lock:
            if path in self._being_saved:
                raise ArgumentError("name", name, f"a checkpoint of {kind} with this name is being written")
            replaces = self._read(model_id, kind, name) is not None
            if replaces and not (overwrite and kind == "weights"):
                cure = ", or overwrite=True" if kind == "weights" else ""
                raise ArgumentError("name", name, f"{model_id} has {kind} of this name; pass another one{cure}")
            if not replaces:
                self._delete(path)
            for partial in path.parent.glob(f".{name}.*.partial"):
                if partial.name[len(name) + 2 : -len(".partial")].isdecimal():  # of `replaced_path`
                    _remove(partial)
            self._being_saved.add(path)
        try:
            path.parent.mkdir(exist_ok=True)
            yield path
            # The record is written last: a directory without it is no checkpoint.
            size = sum(each.stat().st_size for each in _files(path).values())
            checkpoint = Checkpoint(model_id, kind, name, self._now(), size, user_metadata, expires_at)
            _write(_about(path), checkpoint)
        except BaseException:
            if not replaces:
                _remove(path)
            raise
        finally:
            self._being_saved.discard(path)

    def checkpoints(self, model_id: str) -> list[Checkpoint]:
        """Those of a run, the newest first."""
        self.training_run(model_id)
        return _newest_first(self._checkpoints(model_id))

    def all_checkpoints(self) -> list[Checkpoint]:
        """Those of all runs, the newest first."""
        return _newest_first(each for run in self.training_runs() for each in self._checkpoints(run.model_id))

    def checkpoint(self, model_id: str, kind: str, name: str) -> Checkpoint:
        found = self._read(model_id, cast(Kind, kind), name) if kind in get_args(Kind) else None
        if found is None:
            text = f"there is no checkpoint {uri_of(model_id, kind, name)!r:.400} here; it was never saved whole"
            raise RequestError(404, f"{text}, has expired or was deleted; list those that there are")
        return found

    def find(self, uri: str) -> Checkpoint:
        """The checkpoint of a URI. Raises `ArgumentError` for one of another form."""
        parts = uri.removeprefix(_SCHEME).split("/") if uri.startswith(_SCHEME) else []
        if len(parts) != 3:
            raise ArgumentError("path", uri, f"pass {_SCHEME}MODEL_ID/KIND/NAME; KIND: {', '.join(get_args(Kind))}")
        return self.checkpoint(*parts)

    def path(self, checkpoint: Checkpoint) -> Path:
        """The directory of a checkpoint, never outside of this one."""
        return self._path(checkpoint.model_id, checkpoint.kind, checkpoint.name)

    def weights(self, uri: str, kind: Kind) -> Path:
        """The directory of the checkpoint of a URI. Raises `RequestError` (400) for one of another kind than `kind`."""
        found = self.find(uri)
        if found.kind != kind:
            cure = {"weights": "save_weights", "sampler_weights": "save_weights_for_sampler"}.get(kind, "")
            raise RequestError(400, f"{uri} has {found.kind}; this needs {kind}, which {cure} saves")
        return self.path(found)

    def files(self, checkpoint: Checkpoint) -> dict[str, Path]:
        """Path within the checkpoint, with `/` -> path."""
        return _files(self.path(checkpoint))

    def delete(self, checkpoint: Checkpoint) -> None:
        with self._lock:
            self._delete(self.path(checkpoint))

    def tidy(self) -> None:
        """Meet every checkpoint, once in `KEPT_EXPIRED`."""
        if self._tidied is None or self._now() - self._tidied >= KEPT_EXPIRED:
            self._tidied = self._now()
            self.all_checkpoints()

    def set_ttl(self, checkpoint: Checkpoint, ttl_seconds: int | None) -> Checkpoint:
        """Let it expire after these seconds from now; None: never."""
        with self._lock:
            current = self.checkpoint(checkpoint.model_id, checkpoint.kind, checkpoint.name)
            changed = replace(current, expires_at=self._expiry(ttl_seconds))
            _write(_about(self.path(changed)), changed)
        return changed

    # Weights that no client can name.

    def unlisted(self, model_id: str, name: str) -> Path:
        """A path for weights that are no checkpoint, at which there is nothing."""
        self.training_run(model_id)
        path = self._path(model_id, _UNLISTED, name)
        path.parent.mkdir(exist_ok=True)
        _remove(path)
        return path

    def remove_unlisted(self, session_id: str) -> None:
        """Remove those of all runs of a session."""
        for run in self.training_runs():
            if run.session_id == session_id:
                self._remove_unlisted(run)

    def _remove_unlisted(self, run: TrainingRun) -> None:
        place = self._path(run.model_id) / _UNLISTED
        if not place.is_symlink():
            _remove(place)

    # What the methods are made of.

    def _path(self, model_id: str, kind: str | None = None, name: str | None = None) -> Path:
        """The directory of a run or of a checkpoint; its names are checked, and that no part of it is a link."""
        if _NAME.fullmatch(model_id) is None:
            raise ArgumentError("model_id", model_id, _NAME_RULE)
        path = self.directory / model_id
        if kind is not None and name is not None:
            if _NAME.fullmatch(name) is None or name.endswith(".json"):
                raise ArgumentError("name", name, f"{_NAME_RULE}, and do not end with .json")
            path = path / kind / name
        # A link in it could lead out of the directory, to files of others.
        if os.path.realpath(path) != os.fspath(path):
            raise RequestError(404, f"{path.relative_to(self.directory)} has symbolic links, which are not followed")
        return path

    def _path_to_read(self, *names: str) -> Path | None:
        """The path of `_path`; None where that raises."""
        try:
            return self._path(*names)
        except (ArgumentError, RequestError):
            return None

    def _expiry(self, ttl_seconds: int | None) -> datetime | None:
        if ttl_seconds is None:
            return None
        seconds = check_integer("ttl_seconds", ttl_seconds)
        if seconds > MAX_TTL_SECONDS:
            raise ArgumentError("ttl_seconds", seconds, f"pass at most {MAX_TTL_SECONDS}, ten years, or None for ever")
        return self._now() + timedelta(seconds=seconds)

    def _read_run(self, model_id: str) -> TrainingRun | None:
        path = self._path_to_read(model_id)
        return None if path is None else _read_record(path / "run.json", TrainingRun, model_id=model_id)

    def _checkpoints(self, model_id: str) -> Iterator[Checkpoint]:
        for kind in get_args(Kind):
            for about in (self._path(model_id) / kind).glob("*.json"):
                if (found := self._read(model_id, kind, about.name.removesuffix(".json"))) is not None:
                    yield found

    def _read(self, model_id: str, kind: Kind, name: str) -> Checkpoint | None:
        """The checkpoint; None where there is none, or none any more."""
        if (path := self._path_to_read(model_id, kind, name)) is None:
            return None

        with self._lock:
            found = _read_record(_about(path), Checkpoint, model_id=model_id, kind=kind, name=name)
            if found is None or not path.is_dir():
                return None
            now = self._now()
            if path in self._being_saved or found.expires_at is None or found.expires_at > now:
                return found
            if now - found.expires_at >= KEPT_EXPIRED:
                self._delete(path)
        return None

    def _delete(self, path: Path) -> None:
        # The record first: a process that is killed in between leaves a directory that is no checkpoint.
        _about(path).unlink(missing_ok=True)
        _remove(path)


def _about(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _newest_first(checkpoints: Iterator[Checkpoint]) -> list[Checkpoint]:
    return sorted(checkpoints, key=lambda each: (each.created, each.uri), reverse=True)


def _write(path: Path, record: TrainingRun | Checkpoint) -> None:
    with replaced_file(path) as file:
        file.write(json.dumps(asdict(record), indent=1, default=datetime.isoformat).encode())


def _read_record(path: Path, record: type[Record], /, **known: str) -> Record | None:
    """The record of a file at the place `known`; None without one, or where a time has no zone."""
    try:
        return record(**{**json.loads(path.read_bytes()), **known})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        log.warning("%s is not as it was written, and is passed over: %r", path, error)
        return None


def _files(directory: Path) -> dict[str, Path]:
    """Hidden ones are not of a checkpoint: a process that was killed has left them."""
    paths = (Path(parent, name) for parent, _, names in os.walk(directory) for name in names if name[0] != ".")
    return {path.relative_to(directory).as_posix(): path for path in sorted(paths) if not path.is_symlink()}


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
