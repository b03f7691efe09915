"""The inventory of a media store's directory or of a trajectory file: each distinct medium once."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from PIL import Image

from renderers import MediaSource
from renderers.file_reading import open_readable, read_bytes
from renderers.media.source_directory import source_files, stray_files
from rollouts.cli.errors import CommandFileError
from rollouts.cli.trajectory_reader import is_run_directory, open_reader
from rollouts.trajectory.packed_episodes import AbsentSource
from rollouts.trajectory_file.episodes import read_episodes
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
    `references` is None for a store.
    """

    media: list[Medium]
    problems: list[str]
    references: int | None = None

    @property
    def nbytes(self) -> int:
        return sum(medium.nbytes for medium in self.media)


@contextmanager
def open_inventory(target: Path) -> Iterator[Inventory]:
    """List what a store directory, a record file or a run's directory holds; the media are readable in the block.

    Raises `CommandFileError` if it is none of them, and `OSError`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        if target.is_dir() and not is_run_directory(target):
            yield _of_store(target)
        else:
            with open_reader(target, "neither a media store nor a trajectory file") as reader:
                yield _of_episodes(reader)


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


def _of_episodes(reader: RecordReader) -> Inventory:
    media: dict[str, Medium] = {}
    references = 0
    problems: list[str] = []
    for episode in read_episodes(reader, problems):
        for reference in episode.trajectory.all_media():
            source = reference.source
            if isinstance(source, AbsentSource):
                problems.append(f"{source.digest}: its bytes are not in this file")
                continue
            medium = media.setdefault(source.digest, Medium(source.digest, source.nbytes, reader=reader))
            medium.uses += 1
            medium.episodes[episode.trajectory.episode_id] = None
            references += 1
    return Inventory(list(media.values()), list(dict.fromkeys(problems)), references)
