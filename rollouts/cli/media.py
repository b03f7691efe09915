"""`rollouts media ls|show|verify|export`: the media of a store's directory or of a trajectory file, each once."""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import numpy as np
import typer
from PIL import Image, ImageDraw, ImageOps

from renderers import MediaPolicy, MediaSource
from renderers.errors import MediaDigestError, MediaError
from renderers.media.decoding import (
    FORMATS,
    PILLOW_ERRORS,
    decode_image,
    is_raw,
    is_raw_video,
    raw_size,
    raw_to_image,
    raw_video_frames,
    raw_video_size,
    to_rgb,
)
from renderers.media.samples import is_raw_audio, raw_samples, wav_bytes
from renderers.media.sniffing import sniff
from renderers.media.source_directory import source_files, stray_files
from renderers.media.video_decoding import FramePlan, VideoInfo, sample_video
from renderers.process.files import open_readable, read_bytes
from rollouts.cli.command_group import APP_SETTINGS, Command, CommandGroup
from rollouts.errors import CommandFileError, ExportError
from rollouts.files import new_file, replaced_file
from rollouts.terminal.table import (
    Column,
    exit_with_error,
    print_error,
    print_json,
    print_line,
    print_table,
    printable_line,
)
from rollouts.trajectory.packed_episodes import AbsentSource
from rollouts.trajectory_files import is_run_directory, open_reader, read_episodes
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


_HEAD = 1024
_VIDEO_NAMES = {"quicktime": "mov", "x-matroska": "mkv", "x-msvideo": "avi", "mp2t": "ts", "x-ms-asf": "asf"}
_SUFFIXES = {"jpeg": "jpg", "mpo": "jpg", "tiff": "tif", "jpeg2000": "jp2", "unknown": "bin"}


class Description(NamedTuple):
    """`format` is short and lower-case (png, jpeg, raw, mp4...). width and height are None where no header has them."""

    format: str
    width: int | None
    height: int | None
    is_video: bool

    @property
    def suffix(self) -> str:
        """The suffix of a file that holds the bytes unchanged."""
        return _SUFFIXES.get(self.format, self.format if self.format.isalnum() else "bin")


def describe(medium: Medium) -> Description:
    """Format and size from the header; nothing is decoded. Raises `OSError`."""
    with medium.open() as file:
        head = file.read(_HEAD)
        file.seek(0)
        if is_raw(head) or is_raw_video(head):
            return _describe_raw(file.read())
        media_type = sniff(head) or "unknown"
        kind, _, name = media_type.partition("/")
        if kind == "video":
            return Description(_VIDEO_NAMES.get(name, name.removeprefix("x-")), None, None, is_video=True)
        try:
            with Image.open(file, formats=FORMATS) as image:
                name = (image.format or name or "unknown").lower()
                # An MPO is a photo followed by a preview, not an animation.
                animated = name != "mpo" and bool(getattr(image, "is_animated", False))
                return Description(name, image.width, image.height, is_video=animated)
        except (Image.DecompressionBombError, *PILLOW_ERRORS):
            return Description(name or "unknown", None, None, is_video=False)


def _describe_raw(data: bytes) -> Description:
    try:
        if is_raw(data):
            _, width, height = raw_size(data)
            return Description("raw", width, height, is_video=False)
        _, width, height, _ = raw_video_size(data)
        return Description("raw video", width, height, is_video=True)
    except MediaError:
        return Description("raw", None, None, is_video=is_raw_video(data))


# A contact sheet: one image with a grid of thumbnails, their numbers, digests and sizes.


MAX_THUMBNAILS = 400
_SIDE = 144
_MARGIN = 10
_CAPTION = 28
_LINE = 13
_TITLE = 24
_MAX_COLUMNS = 20

_BACKGROUND, _TEXT, _SECONDARY_TEXT, _FRAME, _PLACEHOLDER = "#f4f4f2", "#202020", "#707070", "#c8c8c4", "#dcdcd8"


def contact_sheet(inventory: Inventory, title: str, max_thumbnails: int = MAX_THUMBNAILS) -> Image.Image:
    """An RGB image of at most `max_thumbnails` media in the order of the inventory, numbered from 1.

    The title has the number of media without a thumbnail. A medium that cannot be shown (a video file, damaged data)
    is a tile with the reason.
    """
    media = inventory.media[:max_thumbnails]
    columns = max(4, min(_MAX_COLUMNS, math.ceil(math.sqrt(1.5 * len(media)))))
    rows = math.ceil(len(media) / columns)
    across, down = _SIDE + _MARGIN, _SIDE + _CAPTION + _MARGIN
    sheet = Image.new("RGB", (_MARGIN + columns * across, _TITLE + _MARGIN + rows * down), _BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    count = len(inventory.media)
    more = f"; the first {len(media)} are shown, {count - len(media)} more are not" if len(media) < count else ""
    heading = f"{count} media, {inventory.nbytes:,} bytes{more}: {title}"
    draw.text((_MARGIN, 8), _shortened(draw, heading, sheet.width - 2 * _MARGIN), _TEXT)
    for place, medium in enumerate(media):
        row, column = divmod(place, columns)
        _draw_tile(sheet, draw, _MARGIN + column * across, _TITLE + _MARGIN + row * down, place + 1, medium)
    return sheet


def _draw_tile(sheet: Image.Image, draw: ImageDraw.ImageDraw, left: int, top: int, number: int, medium: Medium) -> None:
    described, image, reason = _described_thumbnail(medium)
    if image is None:
        draw.rectangle((left, top, left + _SIDE - 1, top + _SIDE - 1), _PLACEHOLDER, _FRAME)
        draw.multiline_text((left + _SIDE / 2, top + _SIDE / 2), reason, _SECONDARY_TEXT, anchor="mm", align="center")
    else:
        at = (left + (_SIDE - image.width) // 2, top + (_SIDE - image.height) // 2)
        draw.rectangle((at[0] - 1, at[1] - 1, at[0] + image.width, at[1] + image.height), None, _FRAME)
        sheet.paste(image, at)
    if described is not None and described.is_video:
        draw.rectangle((left + 6, top + 6, left + 25, top + 21), _TEXT)
        draw.polygon(((left + 13, top + 9), (left + 13, top + 18), (left + 20, top + 13.5)), _BACKGROUND)
    kind = "" if described is None else described.format
    if described is not None and described.width is not None:
        kind += f" {described.width}x{described.height}"
    below = top + _SIDE + 3
    draw.text((left, below), _shortened(draw, f"#{number}  {medium.digest[:16]}", _SIDE), _TEXT)
    draw.text((left, below + _LINE), _shortened(draw, kind, _SIDE), _SECONDARY_TEXT)


def _described_thumbnail(medium: Medium) -> tuple[Description | None, Image.Image | None, str]:
    """Its description, its thumbnail, and the reason to show where there is no thumbnail."""
    try:
        source = medium.read()
        source.verify()
        described = describe(medium)
    except OSError:
        return None, None, "unreadable"
    except MediaDigestError:
        return None, None, "damaged"
    image = thumbnail(source)
    if image is not None and (factor := _SIDE // max(image.size)) > 1:  # each pixel of a small image becomes a square
        image = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    return described, image, f"{described.format}\n{'video' if described.is_video else 'not decodable'}"


def thumbnail(source: MediaSource) -> Image.Image | None:
    """RGB, rotated as EXIF data say; of a video the first frame. None if Pillow cannot read the medium."""
    try:
        if is_raw_video(source.data):
            image = Image.fromarray(raw_video_frames(source.data)[0][0])
        elif is_raw(source.data):
            image = to_rgb(raw_to_image(source.data))
        else:
            with Image.open(io.BytesIO(source.data), formats=FORMATS) as file:
                file.draft("RGB", (2 * _SIDE, 2 * _SIDE))  # a JPEG is decoded at a fraction of its size
                image = to_rgb(ImageOps.exif_transpose(file))
        image.thumbnail((_SIDE, _SIDE))
    except (MediaError, Image.DecompressionBombError, *PILLOW_ERRORS):
        return None
    return image


def _shortened(draw: ImageDraw.ImageDraw, text: str, width: int) -> str:
    """`text` cut to `width` pixels; characters that the built-in font may lack are question marks."""
    text = text.encode("ascii", "replace").decode()
    if draw.textlength(text) <= width:
        return text
    while text and draw.textlength(f"{text}...") > width:
        text = text[:-1]
    return f"{text}..."


_DIGITS = 16
# For raw video without a known frame rate: the rate at which vision-language models usually sample, slow enough to see
# each frame.
_DEFAULT_FPS = 2


def export_medium(medium: Medium, directory: Path) -> Path:
    """Write a medium as `<first 16 digits of its digest>.<suffix>`; the file's path.

    Files are written unchanged. Pixels that were never in a file become a PNG of the same pixels, raw video an animated
    PNG, samples a WAV of the same samples. An existing file is never changed. Raises `ExportError` if it has other
    contents or the medium is damaged, `CommandFileError` and `OSError` if the directory cannot be written to.
    """
    try:
        source = medium.read()
        source.verify()
        suffix, data = file_contents(source, medium)
        path = directory / f"{medium.digest[:_DIGITS]}.{suffix}"
        if not _write_new(path, data) and not _has_contents(path, data):
            raise ExportError(
                medium.digest, f"{path} exists with other contents and was not changed; choose another --out"
            )
    except MediaDigestError as error:
        raise ExportError(medium.digest, f"damaged, not exported: it hashes to {error.actual}; restore it") from error
    except MediaError as error:
        raise ExportError(medium.digest, f"not exported: {error.reason}") from error
    return path


def file_contents(source: MediaSource, medium: Medium) -> tuple[str, bytes | memoryview]:
    """The suffix and the bytes of a file: the source, or a PNG or WAV of raw pixels or samples. Raises `MediaError`."""
    if is_raw_audio(source.data):
        return "wav", wav_bytes(*raw_samples(source))
    if is_raw(source.data):
        return "png", _png([raw_to_image(source.data)], None)
    if is_raw_video(source.data):
        frames, fps = raw_video_frames(source.data)
        return "png", _png([Image.fromarray(frame) for frame in frames], fps)
    return describe(medium).suffix, source.data


def _png(frames: list[Image.Image], fps: float | None) -> bytes:
    file = io.BytesIO()
    if len(frames) == 1:
        frames[0].save(file, "PNG")
    else:
        # Pillow merges equal successive frames unless their blend modes differ, which makes no difference for opaque
        # frames.
        blend = [number % 2 for number in range(len(frames))]
        duration = 1000 / (fps or _DEFAULT_FPS)  # milliseconds a frame
        frames[0].save(file, "PNG", save_all=True, append_images=frames[1:], duration=duration, blend=blend, disposal=0)
    return file.getvalue()


def _write_new(path: Path, data: bytes | memoryview) -> bool:
    """Write a new file; returns False if the path exists."""
    if os.path.lexists(path):
        return False
    with new_file(path) as temporary:
        temporary.write_bytes(data)
    return True


def _has_contents(path: Path, data: bytes | memoryview) -> bool:
    """Equal bytes, or PNGs of equal pixels: another Pillow may have compressed them differently."""
    contents = read_bytes(path)
    if contents == data:
        return True
    try:
        return path.suffix == ".png" and _pixels(contents) == _pixels(bytes(data))
    except PILLOW_ERRORS:
        return False


def _pixels(data: bytes) -> list[tuple[str, tuple[int, int], bytes]]:
    found = []
    with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
        for number in range(getattr(image, "n_frames", 1)):
            image.seek(number)
            found.append((image.mode, image.size, np.asarray(image).tobytes()))
    return found


_EPISODES = 3


def media_as_json(inventory: Inventory) -> list[dict[str, Any]]:
    """Plain data, one object a medium; `uses` and `episodes` only for trajectories."""
    listed = []
    for medium in inventory.media:
        try:
            described = describe(medium)
        except OSError:
            described = Description("unreadable", None, None, is_video=False)
        entry = {
            "digest": medium.digest,
            "type": described.format,
            "video": described.is_video,
            "width": described.width,
            "height": described.height,
            "bytes": medium.nbytes,
        }
        if inventory.references is not None:
            entry |= {"uses": medium.uses, "episodes": list(medium.episodes)}
        listed.append(entry)
    return listed


def print_media(inventory: Inventory) -> None:
    """Print a table of media, for trajectories with the number of uses and the episodes that use each."""
    columns = [
        Column("digest", f"{len(inventory.media):,} media"),
        Column("type", drop_order=2),
        Column("size", align_right=True),
        Column("bytes", f"{inventory.nbytes:,}", align_right=True),
    ]
    if inventory.references is not None:
        columns += [
            Column("uses", f"{inventory.references:,}", align_right=True, drop_order=3),
            Column("episodes", wraps=True, drop_order=1),
        ]
    rows = []
    for entry in media_as_json(inventory):
        kind = f"{entry['type']} video" if entry["video"] and not entry["type"].endswith("video") else entry["type"]
        size = "-" if entry["width"] is None else f"{entry['width']}x{entry['height']}"
        row = [entry["digest"][:_DIGITS], kind, size, f"{entry['bytes']:,}"]
        if inventory.references is not None:
            names = ", ".join(map(printable_line, entry["episodes"][:_EPISODES]))
            more = len(entry["episodes"]) - _EPISODES
            row += [f"{entry['uses']:,}", f"{names} and {more} more" if more > 0 else names]
        rows.append(row)
    print_table(columns, rows)


# The program that stored the media has applied its own policy; these limits only protect this machine.
_PERMISSIVE = MediaPolicy(
    max_bytes=2**40,
    max_pixels=2**28,
    max_frames=2**20,
    max_aspect_ratio=float("inf"),
    max_video_pixels=2**40,
    timeout=600,
)
# Videos that are read without PyAV.
_WITHOUT_PYAV = ("raw video", "gif", "webp", "png", "tiff")


class Problem(NamedTuple):
    """A problem of one medium; `fatal` is False if it could not be decoded here because a package is missing."""

    reason: str
    fatal: bool = True


def find_problem(medium: Medium) -> Problem | None:
    """The problem of a medium; None if it matches its digest and decodes completely, every frame of a video."""
    try:
        source = medium.read()
        source.verify()
        described = describe(medium)
        if not described.is_video:
            decode_image(source, _PERMISSIVE)
        elif described.format in _WITHOUT_PYAV or find_spec("av") is not None:
            sample_video(source, _PERMISSIVE, _every_frame)
        else:
            return Problem(f"{described.format} video, not decoded: PyAV is not installed", fatal=False)
    except OSError as error:
        return Problem(f"cannot be read: {error.strerror or error}")
    except MediaDigestError as error:
        return Problem(f"damaged: its {medium.nbytes} bytes hash to {error.actual}")
    except MediaError as error:
        return Problem(f"undecodable: {error.reason}")
    return None


def _every_frame(info: VideoInfo) -> FramePlan:
    """A plan that decodes all frames and keeps one pixel of each."""
    return FramePlan(range(info.frames), lambda planes: planes[:, :1, :1].copy())


# `rollouts media ls|verify|export`: the media of a media store or of a trajectory file.


media_commands = typer.Typer(cls=CommandGroup, **APP_SETTINGS)

Target = Annotated[
    Path,
    typer.Argument(metavar="STORE", help="A trajectory file (.mmr), or the directory of a media store, run or demo."),
]


@media_commands.callback()
def commands() -> None:
    """List, verify and export the media of a store or of a trajectory file."""


@media_commands.command(cls=Command)
def ls(
    target: Target,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with whole digests.")] = False,
) -> None:
    """List each distinct medium: digest, type, size, bytes, and for trajectories its uses and its episodes.

    Exits with 1 if something could not be read and was left out.
    """

    with open_inventory(target) as inventory:
        if as_json:
            print_json(media_as_json(inventory))
        elif inventory.media:
            print_media(inventory)
        else:
            print_line(f"{target} holds no media")
    for problem in inventory.problems:
        print_error(f"not listed: {problem}")
    if inventory.problems:
        raise typer.Exit(1)


@media_commands.command(cls=Command)
def verify(target: Target) -> None:
    """Compare every medium with its digest and decode it. Exits with 1 and names the failures, if there are any."""

    with open_inventory(target) as inventory:
        failed = len(inventory.problems)
        for unreadable in inventory.problems:
            print_line(unreadable)
        for medium in inventory.media:
            if (problem := find_problem(medium)) is not None:
                failed += problem.fatal
                print_line(f"{medium.digest}: {problem.reason}")
    if failed:
        print_line(f"{failed} failed, {len(inventory.media)} media checked")
        raise typer.Exit(1)
    print_line(f"{len(inventory.media)} media match their digests and decode")


@media_commands.command(cls=Command)
def export(
    target: Target,
    out: Annotated[
        Path, typer.Option(metavar="DIRECTORY", help="The directory for the files; made if it does not exist.")
    ],
    contact_sheet: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Also draw all media, at most 400, into this image.")
    ] = None,
) -> None:
    """Write each medium once to a file of its own; pixels that were never in a file become a PNG of the same pixels."""

    with open_inventory(target) as inventory:
        is_new = not out.exists()
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            exit_with_error(f"{out} cannot be created: {error.strerror or error}")
        for problem in inventory.problems:
            print_error(f"not exported: {problem}")
        written = 0
        for medium in inventory.media:
            try:
                export_medium(medium, out)
                written += 1
            except ExportError as error:
                print_error(str(error))
            except CommandFileError as error:
                print_error(f"{medium.digest}: not exported: {error}")
            except OSError as error:
                print_error(f"{medium.digest}: not exported: {error.filename or out}: {error.strerror or error}")
        if is_new and not written:
            out.rmdir()
        print_line(f"{written} media in {out}")
        if contact_sheet is not None:
            _draw_contact_sheet(inventory, contact_sheet, str(target))
        if inventory.problems or written < len(inventory.media):
            raise typer.Exit(1)


def _draw_contact_sheet(inventory: Inventory, path: Path, title: str) -> None:

    png = io.BytesIO()
    contact_sheet(inventory, title).save(png, "PNG")
    try:
        if path.exists() and not path.is_file():
            exit_with_error(f"{path} cannot be written: it exists and is not a file")
        with replaced_file(path) as file:
            file.write(png.getvalue())
    except OSError as error:
        exit_with_error(f"{path} cannot be written: {error.strerror or error}")
    print_line(f"contact sheet in {path}")
