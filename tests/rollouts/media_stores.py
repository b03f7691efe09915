"""Encoded media, stores and trajectory files for the tests of `rollouts media`, and the command run on them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

from renderers import MediaSource, MediaStore, PlaceholderRange
from renderers.media.decoding import array_to_raw, frames_to_raw
from rollouts import MediaReference, TokenNode, Trajectory
from rollouts.cli.main import app
from transport import RecordWriter

NOISE = np.random.default_rng(7).integers(0, 256, (20, 30, 3), dtype=np.uint8)


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def solid_image(colour: tuple[int, int, int], size: tuple[int, int] = (40, 24), format: str = "PNG") -> bytes:
    return encoded(Image.new("RGB", size, colour), format)


def animation(format: str = "GIF") -> bytes:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    return encoded(frames[0], format, save_all=True, append_images=frames[1:])


def last_page_broken() -> bytes:
    pages = [Image.fromarray(NOISE) for _ in range(3)]
    data = bytearray(encoded(pages[0], "TIFF", save_all=True, append_images=pages[1:], compression="tiff_deflate"))
    with Image.open(io.BytesIO(data)) as image:
        image.seek(2)
        (start,) = image.tag_v2[273]  # type: ignore[attr-defined]
    data[start : start + 40] = bytes(40)
    return bytes(data)


def encoded_video(size: tuple[int, int] = (32, 48)) -> bytes:
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height = size
        for level in range(5):
            pixels = np.full((size[1], size[0], 3), 40 * level, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


RAW = array_to_raw(NOISE)
RAW_VIDEO = frames_to_raw(np.stack([NOISE, NOISE, NOISE[::-1]]), fps=5.0)
#: Type and size as the list prints them, and the data.
MEDIA_BY_LISTING = {
    "png 30x20": encoded(Image.fromarray(NOISE), "PNG"),
    "jpeg 40x24": solid_image((200, 10, 10), format="JPEG"),
    "webp 40x24": solid_image((10, 200, 10), format="WEBP"),
    "raw 30x20": RAW,
    "raw video 30x20": RAW_VIDEO,
    "gif video 8x8": animation(),
    "unknown -": b"not an image at all",
}


def store_of(directory: Path, *data: bytes) -> list[str]:
    """The digests, in the order of the data."""
    store = MediaStore(directory=directory)
    digests = [store.add_source(MediaSource.of(one)).digest for one in data]
    assert store.stats.directory_errors == 0
    return digests


def stored_file(directory: Path, digest: str) -> Path:
    return directory / digest[:2] / digest


def node(parent: int, *data: bytes) -> TokenNode:
    media = tuple(
        MediaReference("image", "hash", MediaSource.of(one), PlaceholderRange(at, 1)) for at, one in enumerate(data)
    )
    ids = np.arange(len(data) + 1, dtype=np.int32)
    return TokenNode(parent, ids, np.zeros(len(ids), dtype=bool), np.empty(0, dtype=np.float32), (), media)


def trajectory_file(path: Path, **episodes: list[tuple[bytes, ...]]) -> Path:
    """A record file of episodes; an episode is a list of nodes, a node the data of its media."""
    with RecordWriter(path) as out:
        for name, nodes in episodes.items():
            out.append(Trajectory(name, nodes=[node(number - 1, *data) for number, data in enumerate(nodes)]))
    return path


def run(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(app, ["media", *map(str, arguments)], env={"COLUMNS": "60", **environment})


def lines(result: Result) -> list[str]:
    """The printed lines, each run of spaces as one space."""
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def one_error(result: Result) -> str:
    """The single line of an expected error."""
    assert result.exit_code == 2, result.output
    assert not result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line
