"""What a content part may hold, which paths may be read, and what bytes are told to be."""

from __future__ import annotations

import base64
import contextlib
import io
import math
import os
import struct
import sys
import threading
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from hostile_server import answer, serving
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from renderers import MediaPolicy, MediaSource
from renderers.errors import (
    MediaDecodeError,
    MediaFetchError,
    MediaLimitError,
    MediaPolicyError,
    MediaTypeError,
)
from renderers.media.decoding import decode_image
from renderers.media.raw import array_to_raw
from renderers.media.raw_video import frames_to_raw, is_raw_video, raw_video_frames
from renderers.media.reference import source_of_part
from renderers.media.sniffing import sniff

NOISE = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
FRAMES = np.random.default_rng(1).integers(0, 256, (3, 20, 30, 3), dtype=np.uint8)
POLICY = MediaPolicy()


def encoded(image: Image.Image | np.ndarray, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(buffer, format, **options)
    return buffer.getvalue()


PNG = encoded(NOISE)


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64," + base64.b64encode(data).decode()


def image(value: Any, policy: MediaPolicy = POLICY) -> MediaSource:
    return source_of_part({"type": "image", "image": value}, policy)


def pixels(value: Any, policy: MediaPolicy = POLICY) -> np.ndarray:
    return np.asarray(decode_image(image(value, policy), policy))


def video(value: Any, policy: MediaPolicy = POLICY, **part: Any) -> MediaSource:
    return source_of_part({"type": "video", "video": value, **part}, policy)


def frames(value: Any, policy: MediaPolicy = POLICY, **part: Any) -> np.ndarray:
    return raw_video_frames(video(value, policy, **part).data)[0]


def below(directory: Path, **options: Any) -> MediaPolicy:
    return MediaPolicy(allowed_directories=(directory,), **options)


# Images.


def test_the_same_pixels_come_out_of_every_form(tmp_path: Path) -> None:
    path = tmp_path / "a b%.png"
    path.write_bytes(PNG)
    tensor = torch.from_numpy(NOISE).permute(2, 0, 1)
    with serving() as server:
        url = server.on("/a.png", answer(PNG))
        policy = MediaPolicy(
            allowed_directories=(tmp_path,),
            allowed_schemes=frozenset({"http"}),
            allowed_hosts=("127.0.0.1",),
            allowed_networks=("127.0.0.1/32",),
        )
        files = [PNG, bytearray(PNG), memoryview(PNG), data_url(PNG), f" {data_url(PNG)}\n", MediaSource.of(PNG)]
        files += [path, str(path), path.as_uri(), f"file://localhost{path.as_uri()[7:]}", url, {"url": url}]
        for value in files:
            assert image(value, policy) == MediaSource.of(PNG)
        for value in (*files, Image.open(path), NOISE, tensor, tensor.contiguous(), np.asfortranarray(NOISE)):
            np.testing.assert_array_equal(pixels(value, policy), NOISE)
        raw = [image(value, policy) for value in (Image.open(path), NOISE, tensor, tensor.contiguous())]
        assert len({source.digest for source in raw}) == 1


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_tensor_is_the_array_with_its_channels_first(channels: int) -> None:
    array = np.random.default_rng(2).integers(0, 256, (5, 7, channels), dtype=np.uint8)
    assert image(torch.from_numpy(array).permute(2, 0, 1)).digest == image(array).digest


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (torch.zeros(3, 4, 4), "cast to torch.uint8"),
        (torch.zeros(3, 4, 4, dtype=torch.bfloat16), "cast to torch.uint8"),
        (torch.zeros(5, 6, 3, dtype=torch.uint8), "channels last"),
        (torch.zeros(2, 4, 4, dtype=torch.uint8), "permute"),
        (torch.zeros(4, 4, dtype=torch.uint8), "permute"),
        (torch.zeros(1, 3, 4, 4, dtype=torch.uint8), "permute"),
        (torch.zeros(3, 0, 4, dtype=torch.uint8), "image array"),
    ],
    ids=["float", "bfloat16", "last", "two", "flat", "batch", "empty"],
)
def test_a_tensor_that_is_no_image_is_refused_with_the_cure(tensor: torch.Tensor, word: str) -> None:
    with pytest.raises(MediaDecodeError, match=word):
        image(tensor)


def test_a_tensor_is_not_looked_for_where_torch_was_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert image(NOISE).nbytes > 0
    assert "torch" not in sys.modules


class Unreadable(np.ndarray):
    """An array that must not be copied."""

    def tobytes(self, *args: Any, **options: Any) -> bytes:
        raise AssertionError("copied")


def test_sizes_are_checked_before_anything_is_copied_or_decoded() -> None:
    huge = np.broadcast_to(np.zeros((), dtype=np.uint8), (2**20, 2**20, 3)).view(Unreadable)
    for value in (huge, torch.zeros(1, dtype=torch.uint8).expand(3, 2**20, 2**20)):
        with pytest.raises(MediaLimitError, match="max_pixels"):
            image(value)
    with pytest.raises(MediaLimitError, match="max_pixels"):
        video([huge])
    with pytest.raises(MediaLimitError, match="max_frames=4096"):
        video(np.broadcast_to(np.zeros((), dtype=np.uint8), (5000, 4, 4, 3)).view(Unreadable))
    with pytest.raises(MediaLimitError, match="max_video_pixels"):
        video(torch.zeros(1, dtype=torch.uint8).expand(4000, 3, 4000, 4000))
    with pytest.raises(MediaLimitError, match="max_video_pixels"):
        video([huge[:8000, :8000]] * 17)
    with pytest.raises(MediaLimitError, match="max_frames=2"):
        video(["not read"] * 3, MediaPolicy(max_frames=2))
    with pytest.raises(MediaLimitError, match="max_bytes"):
        image("data:;base64," + "@" * 100, MediaPolicy(max_bytes=9))  # not even looked at
    with pytest.raises(MediaLimitError, match="max_aspect_ratio=200:1"):
        image(np.zeros((1, 201, 3), dtype=np.uint8))
    assert pixels(np.zeros((1, 200, 3), dtype=np.uint8)).shape == (1, 200, 3)


@given(st.binary(min_size=1, max_size=40), st.integers(1, 50), st.booleans(), st.booleans())
def test_a_data_url_is_read_exactly_when_its_bytes_are_within_the_limit(
    data: bytes, limit: int, wrapped: bool, quoted: bool
) -> None:
    picture = b"P6 " + data  # a type that is not mistaken for another
    payload = base64.encodebytes(picture).decode() if wrapped else base64.b64encode(picture).decode()
    if quoted:
        payload = payload.replace("+", "%2B").replace("=", "%3D")
    url = "data:image/x;base64," + payload
    policy = MediaPolicy(max_bytes=limit)
    if len(picture) <= limit:
        assert image(url, policy).data == picture
    else:
        with pytest.raises(MediaLimitError):
            image(url, policy)


@pytest.mark.parametrize("value", ["/etc/passwd", Path("/etc/passwd"), "file:///etc/passwd", "https://example.org/a"])
def test_the_default_policy_follows_nothing(value: Any) -> None:
    for kind in ("image", "video"):
        with pytest.raises(MediaPolicyError, match="media policy"):
            source_of_part({"type": kind, kind: value}, POLICY)


def test_zero_bytes_are_a_decode_error() -> None:
    for value in (b"", bytearray(), memoryview(b""), "data:,", "data:image/png;base64,"):
        with pytest.raises(MediaDecodeError, match="zero bytes"):
            image(value)


# Videos.


def test_frames_come_out_as_they_went_in_whatever_form_they_have() -> None:
    forms: list[Any] = [
        FRAMES,
        list(FRAMES),
        tuple(FRAMES),
        torch.from_numpy(FRAMES).permute(0, 3, 1, 2),
        [torch.from_numpy(frame).permute(2, 0, 1) for frame in FRAMES],
        [Image.fromarray(frame) for frame in FRAMES],
        [encoded(frame) for frame in FRAMES],
        [data_url(encoded(frame)) for frame in FRAMES],
        [{"url": data_url(encoded(frame))} for frame in FRAMES],
        [MediaSource.of(encoded(frame)) for frame in FRAMES],
        [MediaSource.of(array_to_raw(frame)) for frame in FRAMES],
        [FRAMES[0], Image.fromarray(FRAMES[1]), encoded(FRAMES[2])],
    ]
    for value in forms:
        np.testing.assert_array_equal(frames(value), FRAMES)
    assert len({video(value).digest for value in forms}) == 1


def test_frames_are_shown_upright_and_in_colour() -> None:
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down and mirrored
    turned = encoded(FRAMES[0][::-1, ::-1], exif=exif)
    grey = np.repeat(FRAMES[1][:, :, :1], 3, axis=2)
    np.testing.assert_array_equal(frames([turned, FRAMES[1][:, :, 0]]), [FRAMES[0], grey])


def test_the_rate_of_frames_is_part_of_the_source() -> None:
    assert raw_video_frames(video(FRAMES, fps=2).data)[1] == 2.0
    assert raw_video_frames(video(list(FRAMES), fps=np.float32(0.5)).data)[1] == 0.5
    assert raw_video_frames(video(FRAMES).data)[1] is None
    assert len({video(FRAMES).digest, video(FRAMES, fps=2).digest, video(FRAMES, fps=3).digest}) == 3
    for fps in (0, -1, math.nan, math.inf, "2", True, [2]):
        with pytest.raises(MediaDecodeError, match="fps"):
            video(FRAMES, fps=fps)


@pytest.mark.parametrize(
    "part", [{"type": "video_url", "video_url": {"url": ""}}, {"type": "video", "video": {"url": ""}}]
)
def test_videos_come_in_every_part_shape(part: dict[str, Any]) -> None:
    key = part["type"]
    assert source_of_part({"type": key, key: {"url": data_url(MP4, "video/mp4")}}, POLICY).data == MP4
    assert source_of_part({"type": key, key: data_url(MP4, "video/mp4")}, POLICY).data == MP4


def film(format: str, codec: str) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=format) as container:
        stream = container.add_stream(codec, rate=5)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for _ in range(5):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), "rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


MP4 = film("mp4", "mpeg4")


def animation(format: str) -> bytes:
    first, *rest = [Image.fromarray(frame) for frame in FRAMES]
    return encoded(first, format, save_all=True, append_images=rest)


def test_files_of_videos_and_animations_stay_as_they_are(tmp_path: Path) -> None:
    for data in (MP4, *(animation(format) for format in ("GIF", "PNG", "WEBP"))):
        path = tmp_path / "film"
        path.write_bytes(data)
        for value in (data, bytearray(data), MediaSource.of(data), path, data_url(data)):
            assert video(value, below(tmp_path)) == MediaSource.of(data)


@pytest.mark.parametrize(
    "value",
    [
        PNG,
        encoded(NOISE, "JPEG"),
        encoded(NOISE, "WEBP"),
        encoded(NOISE, "WEBP", lossless=True),
        encoded(NOISE, "BMP"),
        Image.fromarray(NOISE),
        MediaSource.of(array_to_raw(NOISE)),
        data_url(PNG),
    ],
    ids=["PNG", "JPEG", "WEBP", "lossless", "BMP", "PIL", "raw", "data"],
)
def test_one_image_is_no_video(value: Any) -> None:
    with pytest.raises(MediaTypeError, match="one image"):
        video(value)


def test_a_video_is_no_image() -> None:
    for value in (MP4, data_url(MP4), video(FRAMES)):
        with pytest.raises(MediaTypeError, match=r"not an image.*part of type") as caught:
            image(value)
        assert caught.value.digest is not None


def test_frames_of_different_sizes_are_refused_by_number() -> None:
    with pytest.raises(MediaDecodeError, match=r"^frame 2: 30x10 pixels, but frame 0 has 30x20"):
        video([FRAMES[0], FRAMES[1], FRAMES[2][:10]])


@pytest.mark.parametrize(
    ("value", "error", "word"),
    [
        ([], MediaDecodeError, "without frames"),
        ((), MediaDecodeError, "without frames"),
        ([FRAMES[0], b"\x89PNG\r\n\x1a\n"], MediaDecodeError, "^frame 1: "),
        ([FRAMES[0], b"%PDF-1.7"], MediaTypeError, "^frame 1: this is application/pdf"),
        ([FRAMES[0], MP4], MediaTypeError, "^frame 1: "),
        ([FRAMES[0], "/etc/passwd"], MediaPolicyError, "^frame 1: "),
        ([FRAMES[0], FRAMES[0].astype(np.float32)], MediaDecodeError, "^frame 1: .*uint8"),
        ([None], MediaDecodeError, "^frame 0: "),
        (NOISE, MediaDecodeError, "uint8 .time, height, width, 3"),
        (FRAMES.astype(np.float32), MediaDecodeError, "uint8"),
        (FRAMES[..., :2], MediaDecodeError, "uint8"),
        (FRAMES[:0], MediaDecodeError, "uint8"),
        (torch.zeros(2, 3, 4, 4), MediaDecodeError, "cast to torch.uint8"),
        (torch.zeros(2, 4, 4, 3, dtype=torch.uint8), MediaDecodeError, "permute"),
        (torch.zeros(3, 4, 4, dtype=torch.uint8), MediaDecodeError, "permute"),
        (None, MediaDecodeError, "a video is"),
        ({"url": None}, MediaDecodeError, "a video is"),
        (7, MediaDecodeError, "a video is"),
        (b"", MediaDecodeError, "zero bytes"),
        (b"<html>", MediaTypeError, "text/html.*not a video"),
    ],
)
def test_what_is_no_video_is_refused_and_says_why(value: Any, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        video(value)


def test_raw_video_is_a_read_only_view_of_its_bytes() -> None:
    data = frames_to_raw(FRAMES, 2.5)
    assert is_raw_video(data)
    assert not is_raw_video(array_to_raw(NOISE))
    assert (len(data) - FRAMES.nbytes) % 8 == 0
    assert struct.unpack_from("<4sIIId", data) == (b"mmpv", 3, 30, 20, 2.5)
    for held in (data, memoryview(data), memoryview(bytearray(data))):
        view, fps = raw_video_frames(held)
        np.testing.assert_array_equal(view, FRAMES)
        assert fps == 2.5
        assert not view.flags.owndata
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 0
    np.testing.assert_array_equal(raw_video_frames(frames_to_raw(FRAMES[::-1, ::2, ::-1]))[0], FRAMES[::-1, ::2, ::-1])


def header(magic: bytes = b"mmpv", frames: int = 1, width: int = 1, height: int = 1, fps: float = 0.0) -> bytes:
    return struct.pack("<4sIIId", magic, frames, width, height, fps)


@pytest.mark.parametrize(
    "data",
    [
        b"mmpv",
        header(),
        header() + bytes(2),
        header() + bytes(4),
        header(frames=0),
        header(width=0),
        header(frames=2**32 - 1, width=2**32 - 1, height=2**32 - 1) + bytes(3),
        header(fps=math.nan) + bytes(3),
        header(fps=-1.0) + bytes(3),
        header(fps=math.inf) + bytes(3),
    ],
)
def test_raw_video_that_does_not_hold_what_its_header_says_is_a_decode_error(data: bytes) -> None:
    assert raw_video_frames(header() + bytes(3))[0].shape == (1, 1, 1, 3)
    for read in (raw_video_frames, video):
        with pytest.raises(MediaDecodeError):
            read(data)


def test_raw_video_is_bounded_by_its_pixels_and_not_by_the_bytes_of_a_file() -> None:
    source = video(FRAMES)
    assert video(source, MediaPolicy(max_bytes=10)) is source
    with pytest.raises(MediaLimitError, match="max_frames=2"):
        video(source, MediaPolicy(max_frames=2))
    with pytest.raises(MediaLimitError, match="max_pixels=599"):
        video(source, MediaPolicy(max_pixels=599))


# Paths.


def test_a_path_below_an_allowed_directory_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / "real" / "deep"
    deep.mkdir(parents=True)
    (deep / "a.png").write_bytes(PNG)
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    (deep / "link.png").symlink_to("a.png")
    monkeypatch.chdir(tmp_path)
    for allowed in (tmp_path, tmp_path / "real", tmp_path / "alias", deep, Path("."), Path("/")):
        for path in ("real/deep/a.png", "alias/deep/a.png", "real/deep/../deep/a.png", "real/deep/link.png"):
            for value in (path, Path(path), str(tmp_path / path), (tmp_path / "x" / ".." / path).as_uri()):
                assert image(value, MediaPolicy(allowed_directories=("/nowhere", allowed))).data == PNG


@pytest.fixture
def closet(tmp_path: Path) -> tuple[Path, Path]:
    """An allowed directory, and a file beside it that is not to be read."""
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    secret = tmp_path / "secret.png"
    secret.write_bytes(PNG)
    return allowed, secret


@pytest.mark.parametrize(
    "reference",
    [
        "{allowed}/../secret.png",
        "{allowed}/x/../../secret.png",
        "{secret}",
        "{allowed}",
        "{allowed}-not/a.png",
        "{allowed}/out.png",
        "{allowed}/outdir/secret.png",
        "file://{allowed}/../secret.png",
        "file://{allowed}/%2e%2e/secret.png",
        "/proc/self/environ",
        "/proc/self/root{secret}",
        "~/secret.png",
    ],
)
def test_a_path_that_leads_elsewhere_is_refused_alike_whether_or_not_it_exists(
    closet: tuple[Path, Path], reference: str
) -> None:
    allowed, secret = closet
    (allowed / "out.png").symlink_to(secret)
    (allowed / "outdir").symlink_to(secret.parent)
    policy = below(allowed)
    messages = []
    for present in (True, False):
        if not present:
            secret.unlink()
        with pytest.raises(MediaPolicyError, match="allowed_directories") as caught:
            image(reference.format(allowed=allowed, secret=secret), policy)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_a_file_url_of_another_machine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    with pytest.raises(MediaPolicyError, match="another machine"):
        image(f"file://elsewhere.test{tmp_path}/a.png", below(tmp_path))


@pytest.mark.parametrize("swapped", ["file", "directory"])
def test_a_link_put_in_place_between_check_and_opening_leads_nowhere(
    closet: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, swapped: str
) -> None:
    allowed, secret = closet
    inner = allowed / "inner"
    inner.mkdir()
    honest = inner / secret.name
    honest.write_bytes(encoded(NOISE[:5]))
    assert pixels(honest, below(allowed)).shape == (5, 30, 3)
    real = os.path.realpath

    def swap(path: Any, **options: Any) -> str:
        resolved = real(path, **options)
        if resolved == str(honest):
            honest.unlink()
            if swapped == "file":
                honest.symlink_to(secret)
            else:
                inner.rmdir()
                inner.symlink_to(secret.parent)
        return resolved

    monkeypatch.setattr(os.path, "realpath", swap)
    with pytest.raises((MediaPolicyError, MediaFetchError)) as caught:
        image(honest, below(allowed))
    assert "symbolic link" in str(caught.value) or "Not a directory" in str(caught.value)
    assert honest.read_bytes() == PNG  # who opens by name now gets the other file


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    done: list[str] = []

    def read() -> None:
        for name in ("fifo", "directory"):
            with pytest.raises(MediaFetchError, match=f"{name}.*not a regular file"):
                image(tmp_path / name, below(tmp_path))
            done.append(name)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(10)
    assert done == ["fifo", "directory"]
    with pytest.raises(MediaFetchError, match="not a regular file"):
        image("/dev/zero", below(Path("/dev")))


def test_a_file_that_cannot_be_read_is_a_fetch_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(PNG)
    (tmp_path / "circle").symlink_to("circle")
    policy = below(tmp_path)
    for name, error in (("missing.png", "No such file"), ("file/a.png", "Not a directory"), ("x" * 300, "too long")):
        with pytest.raises(MediaFetchError, match=error):
            image(tmp_path / name, policy)
    with pytest.raises(MediaPolicyError, match="circle"):
        image(tmp_path / "circle", policy)
    for odd in ("", "a\0b", "x" * 5000):
        with pytest.raises(MediaDecodeError, match="neither a URL nor a path"):
            image(odd, policy)


def test_files_are_bounded_in_size_even_those_that_announce_none(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    assert image(path, below(tmp_path, max_bytes=len(PNG))).data == PNG
    with pytest.raises(MediaLimitError, match=f"{len(PNG)} bytes"):
        image(path, below(tmp_path, max_bytes=len(PNG) - 1))
    assert os.stat("/proc/self/maps").st_size == 0
    with pytest.raises(MediaLimitError, match="more than max_bytes=10"):
        image("/proc/self/maps", below(Path("/proc"), max_bytes=10))
    path.write_bytes(b"")
    with pytest.raises(MediaDecodeError, match="empty"):
        image(path, below(tmp_path))


# Types.


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        ("PNG", "image/png"),
        ("JPEG", "image/jpeg"),
        ("WEBP", "image/webp"),
        ("GIF", "image/gif"),
        ("BMP", "image/bmp"),
        ("TIFF", "image/tiff"),
        ("PPM", "image/x-portable-anymap"),
        ("ICO", "image/x-icon"),
        ("JPEG2000", "image/jp2"),
        ("AVIF", "image/avif"),
        ("PDF", "application/pdf"),
        ("EPS", "application/postscript"),
        ("TGA", None),
    ],
)
def test_what_pillow_writes_is_recognised(format: str, expected: str | None) -> None:
    assert sniff(encoded(NOISE, format)) == expected


@pytest.mark.parametrize(
    ("format", "codec", "expected"),
    [
        ("mp4", "mpeg4", "video/mp4"),
        ("mov", "mpeg4", "video/quicktime"),
        ("webm", "libvpx", "video/webm"),
        ("matroska", "mpeg4", "video/x-matroska"),
        ("avi", "mpeg4", "video/x-msvideo"),
        ("mpegts", "mpeg2video", "video/mp2t"),
        ("mpeg", "mpeg2video", "video/mpeg"),
        ("flv", "flv1", "video/x-flv"),
        ("asf", "mpeg4", "video/x-ms-asf"),
    ],
)
def test_what_ffmpeg_writes_is_recognised(format: str, codec: str, expected: str) -> None:
    data = film(format, codec)
    assert sniff(data) == expected
    assert video(data).data == data


@pytest.mark.parametrize(
    "data", [b"", b"hello", bytes(2000), b"RIFF", b"\0\0\0\x20ftyp", b"{picture}", b"P7\n", b"BM!"]
)
def test_what_is_not_known_has_no_name(data: bytes) -> None:
    assert sniff(data) in (None, "video/mp4" if b"ftyp" in data else None)


@pytest.mark.parametrize(
    "format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "JPEG2000", "AVIF", "TGA"]
)
def test_whatever_the_decoder_reads_passes(format: str) -> None:
    small = encoded(NOISE[:16, :16], format)
    assert pixels(small).shape == (16, 16, 3)
    assert pixels(data_url(small, "text/html")).shape == (16, 16, 3)


def branded(brand: bytes, *others: bytes) -> bytes:
    """The first box of an ISO base media file."""
    body = b"ftyp" + brand + bytes(4) + b"".join(others)
    return struct.pack(">I", 4 + len(body)) + body


def test_images_that_no_decoder_here_reads_are_named() -> None:
    assert sniff(branded(b"mif1", b"miaf", b"avif")) == "image/avif"
    for data, name in ((branded(b"heic", b"mif1", b"heic"), "heic"), (b"<svg>", "svg"), (b"\xff\x0a", "jxl")):
        with pytest.raises(MediaTypeError, match=f"image/{name}.*convert it to PNG"):
            image(data)


STARTS = [
    b"",
    b"RIFF",
    b"\0\0\0\x18ftyp",
    b"<?xml",
    b"BM",
    b"G" * 20,
    b"{",
    b"\x1aE\xdf\xa3",
    b"GIF89a",
    b"mmpx",
    b"mmpv",
]


@given(st.binary(max_size=64), st.sampled_from([*STARTS, b"RIFF\0\0\0\0WEBPVP8X", b"\x89PNG\r\n\x1a\n"]))
def test_any_bytes_can_be_looked_at(data: bytes, start: bytes) -> None:
    named = sniff(start + data)
    assert named is None or named.count("/") == 1
    assert sniff(memoryview(start + data)) == named
    for kind in (image, video):
        with contextlib.suppress(MediaDecodeError):  # whatever else is raised fails the test
            assert kind(start + data).data == start + data
