"""The inventory of a media store's directory or of a trajectory file: each distinct medium once."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from renderers import MediaSource
from renderers.file_reading import open_readable, read_bytes
from renderers.media.source_directory import source_files, stray_files
from rollouts.cli.errors import CommandFileError
from rollouts.cli.trajectory_file.episodes import UnreadableRecord, open_reader, read_episodes
from rollouts.trajectory.pixel_forms import AbsentSource
from transport import RecordReader, TransportError


@dataclass(slots=True)
class Medium:
    """A source under its digest: in a file of its own (`path`), in a record file (`reader`), or in memory (`data`).

    Data in a record file is read on demand and not kept: it may be compressed, and all of it together may be larger
    than memory. `uses` counts the references of trajectories, `episodes` has their ids in order; both are empty for a
    store.
    """

    digest: str
    nbytes: int
    path: Path | None = None
    data: bytes | memoryview = b""
    reader: RecordReader | None = None
    uses: int = 0
    episodes: dict[str, None] = field(default_factory=dict)

    def open(self) -> BinaryIO:
        """A file object at the first byte. Raises `OSError`."""
        return io.BytesIO(self.read().data) if self.path is None else open_readable(self.path)

    def read(self) -> MediaSource:
        """The source, not verified. Raises `OSError`."""
        if self.path is not None:
            return MediaSource(self.digest, read_bytes(self.path))
        if self.reader is None:
            return MediaSource(self.digest, self.data)
        try:
            return self.reader.media(self.digest)
        except TransportError as error:  # the record was readable before: the file was truncated since
            raise OSError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Inventory:
    """`media` in the order of digests for a store, of first use for trajectories.

    `problems` names what cannot be read: records with a wrong checksum, files that are not named by a digest.
    `references` is None for a store. Media of a record file are readable until `close`.
    """

    media: list[Medium]
    problems: list[str]
    references: int | None = None
    reader: RecordReader | None = None

    def close(self) -> None:
        """Close the record file."""
        if self.reader is not None:
            self.reader.close()

    @property
    def nbytes(self) -> int:
        return sum(medium.nbytes for medium in self.media)


def read_inventory(target: Path) -> Inventory:
    """List what a store directory or a record file holds, without reading the media of a store.

    Raises `CommandFileError` if it is neither.
    """
    try:
        return _of_store(target) if target.is_dir() else _of_records(target)
    except OSError as error:
        raise CommandFileError(target, f"cannot be read: {error.strerror or error}") from error


def _of_store(directory: Path) -> Inventory:
    media = [Medium(file.digest, file.nbytes, file.path) for file in source_files(directory)]
    stray = stray_files(directory)
    first = next(stray, None)
    if first is not None and not media:
        raise CommandFileError(
            directory,
            f"not a media store: it holds files such as {first.relative_to(directory)}, and none that is named by its "
            "digest. Pass the directory that a MediaStore was given, or a trajectory file",
        )
    problems = [
        f"{path.relative_to(directory)}: not named by a digest, so a store never serves it"
        for path in (first, *stray)
        # A hidden file is being written, or its writer has ended; a store removes such files by itself.
        if path is not None and not path.name.startswith(".")
    ]
    return Inventory(media, problems)


def _of_records(path: Path) -> Inventory:
    reader = open_reader(path, "neither a media store nor a trajectory file")
    try:
        return _of_episodes(reader)
    except BaseException:
        reader.close()
        raise


def _of_episodes(reader: RecordReader) -> Inventory:
    media: dict[str, Medium] = {}
    references = 0
    problems: dict[str, None] = {}
    for found in read_episodes(reader):
        if isinstance(found, UnreadableRecord):
            problems[found.reason] = None
            continue
        for reference in found.trajectory.all_media():
            source = reference.source
            if isinstance(source, AbsentSource):
                problems[f"{source.digest}: its bytes are not in this file"] = None
                continue
            medium = media.setdefault(source.digest, Medium(source.digest, source.nbytes, reader=reader))
            medium.uses += 1
            medium.episodes[found.trajectory.episode_id] = None
            references += 1
    if reader.truncated_bytes:
        problems[f"{reader.truncated_bytes} bytes at the end are an incomplete record"] = None
    return Inventory(list(media.values()), list(problems), references, reader)
