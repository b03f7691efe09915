"""The media of a store's directory or of a trajectory file, each once, and what their headers say."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from PIL import Image

from renderers import MediaPolicy, MediaSource
from renderers.errors import MediaError
from renderers.media.audio_decoding import AudioInfo, audio_info, decode_audio
from renderers.media.decoding import FORMATS, PILLOW_ERRORS, is_raw, is_raw_video, raw_size, raw_video_size
from renderers.media.samples import is_raw_audio
from renderers.media.sniffing import sniff
from renderers.media.source_directory import source_files, stray_files
from renderers.messages import Modality
from renderers.process.files import open_readable, read_bytes
from rollouts.errors import CommandFileError
from rollouts.trajectory.packed_episodes import AbsentSource
from rollouts.trajectory_files import is_run_directory, open_reader, read_episodes
from rollouts.view.sounds import peaks
from transport import RecordReader, TransportError

#: The program that stored the media has applied its own policy; these limits only protect this machine.
PERMISSIVE = MediaPolicy(
    max_bytes=2**40,
    max_pixels=2**28,
    max_frames=2**20,
    max_aspect_ratio=float("inf"),
    max_video_pixels=2**40,
    max_audio_seconds=86400,
    max_audio_channels=1024,
    timeout=600,
)
#: The rate at which sounds are decoded to be drawn or checked; enough for their magnitudes.
DRAWN_RATE = 8000


@dataclass(slots=True)
class Medium:
    """A source under its digest: in a file of its own (`path`), in a record file (`reader`), or in memory (`data`).

    Data in a record file is read on demand and not kept: it may be compressed, and all of it together may be larger
    than memory. `modality`, `uses` (the number of references) and `episodes` (their ids in order) come from the
    trajectories; a store has none.
    """

    digest: str
    nbytes: int
    path: Path | None = None
    data: bytes | memoryview = b""
    reader: RecordReader | None = None
    modality: Modality | None = None
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
            medium.modality = reference.modality
            medium.uses += 1
            medium.episodes[episode.trajectory.episode_id] = None
            references += 1
    return Inventory(list(media.values()), list(dict.fromkeys(problems)), references)


_HEAD = 1024
_NAMES = {
    "quicktime": "mov",
    "x-matroska": "mkv",
    "x-msvideo": "avi",
    "mp2t": "ts",
    "x-ms-asf": "asf",
    "mpeg": "mp3",
    "x-caf": "caf",
    "basic": "au",
}
_SUFFIXES = {"jpeg": "jpg", "mpo": "jpg", "tiff": "tif", "jpeg2000": "jp2", "unknown": "bin"}


class Description(NamedTuple):
    """`format` is short and lower-case (png, jpeg, raw, mp4, wav...). What the header does not say is None."""

    format: str
    modality: Modality
    width: int | None = None
    height: int | None = None
    sound: AudioInfo | None = None

    @property
    def suffix(self) -> str:
        """The suffix of a file that holds the bytes unchanged."""
        return _SUFFIXES.get(self.format, self.format if self.format.isalnum() else "bin")

    @property
    def kind(self) -> str:
        """The format, and for a video or a sound which of them it is."""
        return self.format if self.modality == "image" else f"{self.format} {self.modality}"

    @property
    def size(self) -> str:
        """In pixels, or for a sound its seconds, rate and channels; empty where they are unknown."""
        if self.sound is not None:
            channels = f", {self.sound.channels} channels" if self.sound.channels > 1 else ""
            return f"{self.sound.seconds:.4g} s, {self.sound.sampling_rate} Hz{channels}"
        return "" if self.width is None else f"{self.width}x{self.height}"


def describe(medium: Medium) -> Description:
    """Format and size from the header; nothing is decoded but a sound whose header has no length. Raises `OSError`."""
    with medium.open() as file:
        head = file.read(_HEAD)
        file.seek(0)
        if is_raw(head) or is_raw_video(head):
            return _describe_raw(file.read())
        media_type = sniff(head) or "unknown"
        kind, _, name = media_type.partition("/")
        if is_raw_audio(head) or "audio" in (kind, medium.modality):
            name = "raw" if is_raw_audio(head) else _NAMES.get(name, name) or "unknown"
            return Description(name, "audio", sound=_sound_properties(medium))
        if kind == "video":
            name = "mpeg" if name == "mpeg" else _NAMES.get(name, name.removeprefix("x-"))
            return Description(name, "video")
        try:
            with Image.open(file, formats=FORMATS) as image:
                name = (image.format or name or "unknown").lower()
                # An MPO is a photo followed by a preview, not an animation.
                animated = name != "mpo" and bool(getattr(image, "is_animated", False))
                return Description(name, "video" if animated else "image", image.width, image.height)
        except (Image.DecompressionBombError, *PILLOW_ERRORS):
            return Description(name or "unknown", "image")


def _describe_raw(data: bytes) -> Description:
    try:
        if is_raw(data):
            _, width, height = raw_size(data)
            return Description("raw", "image", width, height)
        _, width, height, _ = raw_video_size(data)
        return Description("raw", "video", width, height)
    except MediaError:
        return Description("raw", "video" if is_raw_video(data) else "image")


def _sound_properties(medium: Medium) -> AudioInfo | None:
    try:
        return audio_info(medium.read(), PERMISSIVE)
    except MediaError:
        return None


def waveform(source: MediaSource, columns: int) -> list[float] | None:
    """The largest magnitudes in equal parts of a sound, from 0 to 1 for the largest. None if it cannot be decoded."""
    try:
        largest = peaks(decode_audio(source, PERMISSIVE, DRAWN_RATE), columns)
    except MediaError:
        return None
    scaled: list[float] = (largest / (largest.max() or 1)).tolist()
    return scaled
