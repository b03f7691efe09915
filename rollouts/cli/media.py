"""`rollouts media ls|verify|export`: the media of a store's directory or of a trajectory file."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from PIL import Image

from renderers import MediaSource
from renderers.errors import MediaDigestError, MediaError
from renderers.media.audio_decoding import decode_audio
from renderers.media.decoding import (
    PILLOW_ERRORS,
    decode_image,
    is_raw,
    is_raw_video,
    raw_to_image,
    raw_video_frames,
)
from renderers.media.samples import is_raw_audio, raw_samples, wav_bytes
from renderers.media.video_decoding import FramePlan, VideoInfo, sample_video
from renderers.process.files import read_bytes
from rollouts.cli.command_group import APP_SETTINGS, Command, CommandGroup
from rollouts.cli.contact_sheet import contact_sheet as drawn_contact_sheet
from rollouts.cli.media_inventory import (
    DRAWN_RATE,
    PERMISSIVE,
    Description,
    Inventory,
    Medium,
    describe,
    open_inventory,
    waveform,
)
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
from rollouts.view.sounds import waveform_line

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
_WAVEFORM_COLUMNS = 24


def _described(inventory: Inventory) -> Iterator[tuple[Medium, Description]]:
    for medium in inventory.media:
        try:
            yield medium, describe(medium)
        except OSError:
            yield medium, Description("unreadable", medium.modality or "image")


def media_as_json(inventory: Inventory) -> list[dict[str, Any]]:
    """Plain data, one object a medium; `uses` and `episodes` only for trajectories."""
    listed = []
    for medium, described in _described(inventory):
        entry: dict[str, Any] = {
            "digest": medium.digest,
            "type": described.format,
            "modality": described.modality,
            "width": described.width,
            "height": described.height,
            "seconds": described.sound and described.sound.seconds,
            "rate": described.sound and described.sound.sampling_rate,
            "channels": described.sound and described.sound.channels,
            "bytes": medium.nbytes,
        }
        if inventory.references is not None:
            entry |= {"uses": medium.uses, "episodes": list(medium.episodes)}
        listed.append(entry)
    return listed


def print_media(inventory: Inventory, *, waveforms: bool) -> None:
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
    if waveforms:
        columns.append(Column("waveform"))
    rows = []
    for medium, described in _described(inventory):
        row = [medium.digest[:_DIGITS], described.kind, described.size or "-", f"{medium.nbytes:,}"]
        if inventory.references is not None:
            names = ", ".join(map(printable_line, [*medium.episodes][:_EPISODES]))
            more = len(medium.episodes) - _EPISODES
            row += [f"{medium.uses:,}", f"{names} and {more} more" if more > 0 else names]
        if waveforms:
            heights = waveform(medium.read(), _WAVEFORM_COLUMNS) if described.sound else None
            row.append("-" if heights is None else waveform_line(heights))
        rows.append(row)
    print_table(columns, rows)


class Problem(NamedTuple):
    """A problem of one medium; `fatal` is False if it could not be decoded here because a package is missing."""

    reason: str
    fatal: bool = True


def find_problem(medium: Medium) -> Problem | None:
    """The problem of a medium; None if it matches its digest and decodes completely, every frame of a video."""
    try:
        source = medium.read()
        source.verify()
        match describe(medium).modality:
            case "image":
                decode_image(source, PERMISSIVE)
            case "video":
                sample_video(source, PERMISSIVE, _every_frame)
            case "audio":
                decode_audio(source, PERMISSIVE, DRAWN_RATE)
    except OSError as error:
        return Problem(f"cannot be read: {error.strerror or error}")
    except MediaDigestError as error:
        return Problem(f"damaged: its {medium.nbytes} bytes hash to {error.actual}")
    except MediaError as error:
        if isinstance(error.__cause__, ImportError):
            return Problem(f"not decoded: {error.reason}", fatal=False)
        return Problem(f"undecodable: {error.reason}")
    return None


def _every_frame(info: VideoInfo) -> FramePlan:
    """A plan that decodes all frames and keeps one pixel of each."""
    return FramePlan(range(info.frames), lambda planes: planes[:, :1, :1].copy())


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
    waveforms: Annotated[bool, typer.Option("--waveforms", help="Decode sounds, and draw each as a line.")] = False,
) -> None:
    """List each distinct medium: digest, type, size (of a sound seconds, rate and channels), bytes, and for
    trajectories its uses and its episodes.

    Exits with 1 if something could not be read and was left out.
    """
    with open_inventory(target) as inventory:
        if as_json:
            print_json(media_as_json(inventory))
        elif inventory.media:
            print_media(inventory, waveforms=waveforms)
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
    """Write each medium once to a file of its own; pixels that were never in a file become a PNG, samples a WAV."""
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
    drawn_contact_sheet(inventory, title).save(png, "PNG")
    try:
        if path.exists() and not path.is_file():
            exit_with_error(f"{path} cannot be written: it exists and is not a file")
        with replaced_file(path) as file:
            file.write(png.getvalue())
    except OSError as error:
        exit_with_error(f"{path} cannot be written: {error.strerror or error}")
    print_line(f"contact sheet in {path}")
