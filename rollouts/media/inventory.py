"""What a media store's directory or a file of trajectories holds, each distinct medium once."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeGuard

from renderers import MediaSource
from renderers.media.source_directory import source_files, stray_files
from rollouts.errors import RolloutsError
from rollouts.pixel_forms import AbsentSource
from rollouts.traj.episodes import members
from rollouts.trajectory import Trajectory
from transport import RecordReader, TransportError


class InventoryError(RolloutsError):
    """A path holds neither a media store nor trajectories. `path` names it."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path}: {reason}")


@dataclass(slots=True)
class Medium:
    """A source under its digest, in a file of its own (`path`) or read from a record file (`data`).

    `uses` counts the references of trajectories, `episodes` names them in order; a store does not know either.
    """

    digest: str
    nbytes: int
    path: Path | None = None
    data: bytes | memoryview = b""
    uses: int = 0
    episodes: dict[str, None] = field(default_factory=dict)

    def open(self) -> BinaryIO:
        """From its first byte. Raises `OSError`."""
        return io.BytesIO(self.data) if self.path is None else self.path.open("rb")

    def read(self) -> MediaSource:
        """All of it, not verified. Raises `OSError`."""
        return MediaSource(self.digest, self.data if self.path is None else self.path.read_bytes())


@dataclass(frozen=True, slots=True)
class Inventory:
    """`media` by digest for a store, as they first appear for trajectories.

    `damage` says what cannot be read at all: records with a wrong checksum, files that no store would serve.
    `references` is None for a store.
    """

    media: list[Medium]
    damage: list[str]
    references: int | None = None
    records: int = 0

    @property
    def nbytes(self) -> int:
        return sum(medium.nbytes for medium in self.media)


def take_inventory(target: Path) -> Inventory:
    """List what a store directory or a record file holds, without reading the media of a store.

    Raises `InventoryError` if it is neither.
    """
    try:
        return _of_store(target) if target.is_dir() else _of_records(target)
    except OSError as error:
        raise InventoryError(target, f"cannot be read: {error.strerror or error}") from error
    except TransportError as error:
        raise InventoryError(target, f"neither a media store nor a trajectory file: {error}") from error


def _of_store(directory: Path) -> Inventory:
    media = [Medium(file.digest, file.nbytes, file.path) for file in source_files(directory)]
    stray = stray_files(directory)
    first = next(stray, None)
    if first is not None and not media:
        raise InventoryError(
            directory,
            f"no media store: it holds files such as {first.relative_to(directory)}, and none that is named by its "
            "digest. Pass the directory that a MediaStore was given, or a trajectory file",
        )
    damage = [
        f"{path.relative_to(directory)}: not named by a digest, never served"
        for path in (first, *stray)
        # Hidden files are being written, or were when their writer died; a store removes them by itself.
        if path is not None and not path.name.startswith(".")
    ]
    return Inventory(media, damage)


def _of_records(path: Path) -> Inventory:
    media: dict[str, Medium] = {}
    references = 0
    damage: dict[str, None] = {}
    with RecordReader(path) as reader:
        for number in range(len(reader)):
            try:
                record = reader[number]
            except TransportError as error:
                damage[f"record {number}: {error}"] = None
                continue
            for trajectory in filter(_is_trajectory, members(record)):
                for reference in trajectory.all_media():
                    source = reference.source
                    if isinstance(source, AbsentSource):
                        damage[f"{source.digest}: its bytes are not in this file"] = None
                        continue
                    medium = media.setdefault(source.digest, Medium(source.digest, source.nbytes, data=source.data))
                    medium.uses += 1
                    medium.episodes[trajectory.episode_id] = None
                    references += 1
        if reader.truncated_bytes:
            damage[f"{reader.truncated_bytes} bytes at the end are no whole record: cut off, or never finished"] = None
        return Inventory(list(media.values()), list(damage), references, len(reader))


def _is_trajectory(member: object) -> TypeGuard[Trajectory]:
    return isinstance(member, Trajectory)
