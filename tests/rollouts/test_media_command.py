"""`rollouts media`: what a store or a trajectory file holds, checked, and as files and one image."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

from renderers import MediaSource, MediaStore, PlaceholderRange
from renderers.media.raw import array_to_raw
from renderers.media.raw_video import frames_to_raw
from rollouts import MediaReference, TokenNode, Trajectory
from rollouts.cli.main import app
from rollouts.cli.media.contact_sheet import contact_sheet
from rollouts.cli.media.inventory import read_inventory
from rollouts.cli.media.thumbnail import thumbnail
from transport import RecordWriter

NOISE = np.random.default_rng(7).integers(0, 256, (20, 30, 3), dtype=np.uint8)


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def plain(colour: tuple[int, int, int], size: tuple[int, int] = (40, 24), format: str = "PNG") -> bytes:
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


def film(size: tuple[int, int] = (32, 48)) -> bytes:
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
#: What, and the line that lists it.
LISTED = {
    "png 30x20": encoded(Image.fromarray(NOISE), "PNG"),
    "jpeg 40x24": plain((200, 10, 10), format="JPEG"),
    "webp 40x24": plain((10, 200, 10), format="WEBP"),
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


def file_of(directory: Path, digest: str) -> Path:
    return directory / digest[:2] / digest


def node(parent: int, *data: bytes) -> TokenNode:
    media = tuple(
        MediaReference("image", "hash", MediaSource.of(one), PlaceholderRange(at, 1)) for at, one in enumerate(data)
    )
    ids = np.arange(len(data) + 1, dtype=np.int32)
    return TokenNode(parent, ids, np.zeros(len(ids), dtype=bool), np.empty(0, dtype=np.float32), (), media)


def trajectories(path: Path, **episodes: list[tuple[bytes, ...]]) -> Path:
    """A record file of episodes; an episode is a list of nodes, a node the data of its media."""
    with RecordWriter(path) as out:
        for name, nodes in episodes.items():
            out.append(Trajectory(name, nodes=[node(number - 1, *data) for number, data in enumerate(nodes)]))
    return path


def run(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(app, ["media", *map(str, arguments)], env={"COLUMNS": "60", **environment})


def lines(result: Result) -> list[str]:
    """With single spaces."""
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def one_error(result: Result) -> str:
    """The single line of an error that was foreseen."""
    assert result.exit_code == 2, result.output
    assert not result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


# ls


def test_a_store_is_listed_by_digest_with_type_size_and_bytes(tmp_path: Path) -> None:
    digests = store_of(tmp_path, *LISTED.values())
    result = run("ls", tmp_path)
    assert result.exit_code == 0
    header, *rows, footer = lines(result)
    assert header == "digest type size bytes"
    expected = [
        f"{digest[:16]} {what} {len(data):,}" for digest, (what, data) in zip(digests, LISTED.items(), strict=True)
    ]
    assert rows == sorted(expected)
    assert footer == f"{len(LISTED)} media {sum(map(len, LISTED.values())):,}"


def test_trajectories_are_listed_once_a_medium_with_uses_and_episodes(tmp_path: Path) -> None:
    a, b, c = (plain((level, 0, 0)) for level in (1, 2, 3))
    path = trajectories(tmp_path / "t.mmr", first=[(a, b), (), (a,)], second=[(b, c)], third=[()])
    header, *rows, footer = lines(run("ls", path))
    assert header == "digest type size bytes uses episodes"
    digests = [MediaSource.of(data).digest[:16] for data in (a, b, c)]
    assert rows == [
        f"{digests[0]} png 40x24 {len(a)} 2 first",
        f"{digests[1]} png 40x24 {len(b)} 2 first, second",
        f"{digests[2]} png 40x24 {len(c)} 1 second",
    ]
    assert footer == f"3 media {len(a + b + c)} 5"


def test_many_episodes_are_counted_and_a_pipe_loses_nothing(tmp_path: Path) -> None:
    names = [f"episode-{number}-{'x' * 60}" for number in range(5)]
    path = trajectories(tmp_path / "t.mmr", **{name: [(RAW,)] for name in names})
    assert lines(run("ls", path))[1].endswith(f"5 {', '.join(names[:3])} and 2 more")


def test_json_has_whole_digests_and_everything_else(tmp_path: Path) -> None:
    path = trajectories(tmp_path / "t.mmr", e1=[(RAW,), (animation(),)], e2=[(RAW,)])
    first, second = json.loads(run("ls", path, "--json").stdout)
    assert first == {
        "digest": MediaSource.of(RAW).digest,
        "type": "raw",
        "video": False,
        "width": 30,
        "height": 20,
        "bytes": len(RAW),
        "uses": 2,
        "episodes": ["e1", "e2"],
    }
    assert (second["type"], second["video"]) == ("gif", True)
    store_of(tmp_path / "store", RAW)
    (only,) = json.loads(run("ls", tmp_path / "store", "--json").stdout)
    assert only == {key: value for key, value in first.items() if key not in ("uses", "episodes")}


def test_listing_reads_headers_and_not_images(tmp_path: Path) -> None:
    (digest,) = store_of(tmp_path, encoded(Image.fromarray(np.tile(NOISE, (20, 20, 1))), "PNG"))
    path = file_of(tmp_path, digest)
    path.write_bytes(path.read_bytes()[:2000])
    assert lines(run("ls", tmp_path))[1] == f"{digest[:16]} png 600x400 2,000"


def test_a_video_file_is_listed_as_one(tmp_path: Path) -> None:
    store_of(tmp_path, film())
    assert " mp4 video - " in lines(run("ls", tmp_path))[1]


def test_nothing_is_said_to_be_nothing(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    for target in (tmp_path / "store", trajectories(tmp_path / "t.mmr", e=[()])):
        result = run("ls", target)
        assert (result.exit_code, result.stdout) == (0, f"{target} holds no media\n")


def test_what_a_file_says_never_reaches_the_terminal_raw(tmp_path: Path) -> None:
    path = trajectories(tmp_path / "t.mmr", **{"\x1b[31m[bold]loud[/bold]\r": [(RAW,)]})
    out = run("ls", path).stdout
    assert "\x1b" not in out
    assert "[bold]loud[/bold]" in out


# verify


def test_sound_media_verify(tmp_path: Path) -> None:
    sound = [data for what, data in LISTED.items() if what != "unknown -"]
    sound.append(film())
    store_of(tmp_path / "store", *sound)
    path = trajectories(tmp_path / "t.mmr", e=[tuple(sound)])
    for target in (tmp_path / "store", path):
        result = run("verify", target)
        assert result.exit_code == 0, result.output
        assert lines(result) == [f"{len(sound)} media match their digests and decode"]


def test_every_damaged_source_is_named_and_the_exit_code_is_1(tmp_path: Path) -> None:
    pictures = [plain((level, 0, 0)) for level in range(4)]
    digests = store_of(tmp_path, *pictures)
    file_of(tmp_path, digests[0]).write_bytes(pictures[0][:-1])
    file_of(tmp_path, digests[1]).write_bytes(b"")
    file_of(tmp_path, digests[2]).write_bytes(pictures[3])
    result = run("verify", tmp_path)
    assert result.exit_code == 1
    *found, last = lines(result)
    assert sorted(line.split(": ")[0] for line in found) == sorted(digests[:3])
    assert all(": damaged: " in line for line in found)
    assert f"{digests[2]}: damaged: its {len(pictures[3])} bytes hash to {digests[3]}" in found
    assert last == "3 failed, 4 media checked"
    assert file_of(tmp_path, digests[1]).exists(), "looking changes nothing"


@pytest.mark.parametrize(
    "data",
    [
        b"not an image",
        encoded(Image.fromarray(NOISE), "PNG")[:-300],
        RAW[:-1],
        RAW_VIDEO[:-1],
        animation("PNG")[:-120],
        last_page_broken(),
        b"%PDF-1.4",
    ],
    ids=["text", "png", "raw", "raw video", "animation", "last frame", "pdf"],
)
def test_what_matches_its_digest_but_does_not_decode_is_named_too(data: bytes, tmp_path: Path) -> None:
    (digest,) = store_of(tmp_path, data)
    result = run("verify", tmp_path)
    assert result.exit_code == 1
    assert lines(result)[0].startswith(f"{digest}: undecodable: ")


def test_a_broken_video_file_is_named(tmp_path: Path) -> None:
    whole = film()
    (digest,) = store_of(tmp_path, whole[: len(whole) // 3])
    assert lines(run("verify", tmp_path))[0].startswith(f"{digest}: undecodable: ")


def test_a_video_file_that_cannot_be_decoded_here_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (digest,) = store_of(tmp_path, film())
    monkeypatch.setattr("rollouts.cli.media.verification.find_spec", lambda name: None)
    result = run("verify", tmp_path)
    assert result.exit_code == 0
    assert lines(result)[0] == f"{digest}: mp4 video, not decoded: PyAV is not installed"


def test_files_that_no_store_would_serve_are_named(tmp_path: Path) -> None:
    (digest,) = store_of(tmp_path, RAW)
    for name in ("note.txt", f"zz/{digest}", f"{digest[:2]}/{digest[:-1]}"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(RAW)
    (tmp_path / digest[:2] / ".abc.tmp").write_bytes(b"being written")
    result = run("verify", tmp_path)
    assert result.exit_code == 1
    assert sorted(line.split(": ")[0] for line in lines(result)[:-1]) == sorted(
        ["note.txt", f"zz/{digest}", f"{digest[:2]}/{digest[:-1]}"]
    )


def test_a_damaged_record_is_named_and_the_others_are_still_read(tmp_path: Path) -> None:
    pictures = [plain((level, 0, 0), (60, 60)) for level in (1, 2)]
    path = trajectories(tmp_path / "t.mmr", e1=[(pictures[0],)], e2=[(pictures[1],)])
    content = path.read_bytes()
    at = content.index(pictures[0]) + 50
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    result = run("verify", path)
    assert result.exit_code == 1
    first, last = lines(result)
    assert first.startswith("record 0: ")
    assert MediaSource.of(pictures[0]).digest in first
    assert last == "1 failed, 1 media checked"
    listed = run("ls", path)
    assert MediaSource.of(pictures[1]).digest[:16] in listed.stdout
    assert "record 0" in listed.stderr


# export


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def test_files_are_exported_as_they_came_each_once(tmp_path: Path) -> None:
    files = {
        "png": plain((1, 2, 3)),
        "jpg": plain((1, 2, 3), format="JPEG"),
        "webp": plain((1, 2, 3), format="WEBP"),
        "gif": animation(),
        "tif": plain((1, 2, 3), format="TIFF"),
        "mp4": film(),
        "bin": b"not an image at all",
    }
    path = trajectories(tmp_path / "t.mmr", e1=[tuple(files.values())], e2=[tuple(files.values())])
    result = run("export", path, "--out", tmp_path / "new" / "out")
    assert result.exit_code == 0, result.output
    written = {file.name: file.read_bytes() for file in (tmp_path / "new" / "out").iterdir()}
    assert written == {f"{MediaSource.of(data).digest[:16]}.{suffix}": data for suffix, data in files.items()}


@pytest.mark.parametrize("shape", [(5, 7, 3), (5, 7, 4), (5, 7)])
def test_raw_pixels_become_a_png_of_the_same_pixels(shape: tuple[int, ...], tmp_path: Path) -> None:
    array = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    (digest,) = store_of(tmp_path / "store", array_to_raw(array))
    run("export", tmp_path / "store", "--out", tmp_path)
    np.testing.assert_array_equal(pixels(tmp_path / f"{digest[:16]}.png"), array)


def test_raw_video_becomes_an_animated_png_of_the_same_frames(tmp_path: Path) -> None:
    frames = np.stack([NOISE, NOISE, NOISE, NOISE[::-1], NOISE])
    (digest,) = store_of(tmp_path / "store", frames_to_raw(frames, fps=4.0))
    run("export", tmp_path / "store", "--out", tmp_path)
    with Image.open(tmp_path / f"{digest[:16]}.png") as image:
        assert image.n_frames == len(frames)  # type: ignore[attr-defined]
        for number, frame in enumerate(frames):
            image.seek(number)
            np.testing.assert_array_equal(np.asarray(image.convert("RGB")), frame)
            assert image.info["duration"] == 250


def test_exporting_again_changes_nothing_and_another_file_is_never_overwritten(tmp_path: Path) -> None:
    picture = plain((1, 2, 3))
    digests = store_of(tmp_path / "store", picture, RAW)
    out = tmp_path / "out"
    assert run("export", tmp_path / "store", "--out", out).exit_code == 0
    recompressed = out / f"{digests[1][:16]}.png"
    with Image.open(recompressed) as image:
        image.load()
    image.save(recompressed, compress_level=0)
    held = recompressed.read_bytes()
    assert run("export", tmp_path / "store", "--out", out).exit_code == 0
    assert recompressed.read_bytes() == held, "the same pixels are the same image"

    other = out / f"{digests[0][:16]}.png"
    other.write_bytes(plain((9, 9, 9)))
    result = run("export", tmp_path / "store", "--out", out)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {digests[0]}: ")
    assert "other contents" in result.stderr
    assert other.read_bytes() == plain((9, 9, 9))


def test_damaged_media_are_not_exported(tmp_path: Path) -> None:
    digests = store_of(tmp_path / "store", plain((1, 2, 3)), plain((4, 5, 6)))
    file_of(tmp_path / "store", digests[0]).write_bytes(plain((7, 8, 9)))
    result = run("export", tmp_path / "store", "--out", tmp_path / "out", "--contact-sheet", tmp_path / "sheet.png")
    assert result.exit_code == 1
    assert digests[0] in result.stderr
    assert [file.name for file in (tmp_path / "out").iterdir()] == [f"{digests[1][:16]}.png"]
    assert (tmp_path / "sheet.png").exists()


def test_a_disk_that_is_full_leaves_no_half_file(tmp_path: Path) -> None:
    (digest,) = store_of(tmp_path / "store", encoded(Image.fromarray(np.tile(NOISE, (20, 20, 1))), "BMP"))
    script = (
        "import resource, sys\n"
        "from rollouts.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        f"sys.argv = ['rollouts', 'media', 'export', {str(tmp_path / 'store')!r}, '--out', {str(tmp_path / 'out')!r}]\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"error: {digest}: not exported: File too large\n"
    assert not list((tmp_path / "out").iterdir())


# The contact sheet.


def sheet_of(directory: Path, *data: bytes, max_thumbnails: int = 400) -> tuple[np.ndarray, list[str]]:
    """The pixels of a contact sheet of a store, and the digests in its order."""
    digests = sorted(store_of(directory, *data))
    return np.asarray(contact_sheet(read_inventory(directory), "title", max_thumbnails)), digests


def holds(sheet: np.ndarray, colour: tuple[int, int, int]) -> int:
    """How many pixels have this colour."""
    return int((sheet == colour).all(axis=2).sum())


COLOURS = [(250, 20, 30), (20, 240, 40), (50, 60, 230), (250, 240, 10), (10, 200, 210)]


def test_the_contact_sheet_shows_every_medium(tmp_path: Path) -> None:
    sheet, _ = sheet_of(tmp_path, *(plain(colour, (300, 200)) for colour in COLOURS))
    for colour in COLOURS:
        assert holds(sheet, colour) == 144 * 96


def test_media_stand_in_the_order_of_the_list(tmp_path: Path) -> None:
    by_digest = {MediaSource.of(plain(colour)).digest: colour for colour in COLOURS}
    sheet, digests = sheet_of(tmp_path, *map(plain, COLOURS))
    places = []
    for digest in digests:
        rows, columns = np.nonzero((sheet == by_digest[digest]).all(axis=2))
        places.append((rows.min(), columns.min()))
    assert places == sorted(places)


def test_an_image_of_a_few_pixels_is_enlarged_to_be_seen(tmp_path: Path) -> None:
    sheet, _ = sheet_of(tmp_path, plain(COLOURS[0], (28, 14)), plain(COLOURS[1], (100, 50)))
    assert holds(sheet, COLOURS[0]) == 28 * 5 * 14 * 5
    assert holds(sheet, COLOURS[1]) == 100 * 50


def test_an_image_is_shown_upright_and_its_transparency_on_white(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    turned = encoded(Image.new("RGB", (100, 40), (250, 20, 30)), "PNG", exif=exif)
    small = thumbnail(MediaSource.of(turned), 144)
    assert small is not None
    assert small.size == (40, 100)
    clear = thumbnail(MediaSource.of(array_to_raw(np.zeros((9, 9, 4), dtype=np.uint8))), 144)
    assert clear is not None
    assert clear.getpixel((4, 4)) == (255, 255, 255)


def test_videos_show_their_first_frame_or_a_tile_that_says_what_they_are(tmp_path: Path) -> None:
    red = np.zeros((2, 30, 40, 3), dtype=np.uint8)
    red[0], red[1] = COLOURS[0], COLOURS[1]
    sheet, _ = sheet_of(tmp_path / "raw", frames_to_raw(red))
    assert holds(sheet, COLOURS[0]) > 1000
    assert holds(sheet, COLOURS[1]) == 0
    assert thumbnail(MediaSource.of(film()), 144) is None
    for name, data in (("film", film()), ("text", b"not an image"), ("broken", RAW[:-1])):
        sheet, _ = sheet_of(tmp_path / name, data)
        tile = sheet[34 : 34 + 144, 10 : 10 + 144]
        assert len(np.unique(tile.reshape(-1, 3), axis=0)) > 2, f"{name}: nothing is written on the tile"


def test_the_sheet_is_bounded_and_says_how_many_more_there_are(tmp_path: Path) -> None:
    pictures = [array_to_raw(np.full((3, 3, 3), number, dtype=np.uint8)) for number in range(30)]
    few, _ = sheet_of(tmp_path, *pictures, max_thumbnails=12)
    many, _ = sheet_of(tmp_path, max_thumbnails=30)
    assert few.shape[0] < many.shape[0]
    title = few[:30]
    assert not np.array_equal(title[:, :300], many[:30, :300])
    huge, _ = sheet_of(tmp_path, max_thumbnails=10**6)
    assert np.array_equal(huge, many)


def test_the_sheet_of_nothing_and_of_one_is_an_image(tmp_path: Path) -> None:
    for target in (trajectories(tmp_path / "t.mmr", e=[()]), trajectories(tmp_path / "u.mmr", e=[(RAW,)])):
        sheet = tmp_path / f"{target.name}.png"
        result = run("export", target, "--out", tmp_path / "out", "--contact-sheet", sheet)
        assert result.exit_code == 0, result.output
        assert Image.open(sheet).width > 100


# Errors.


def test_every_wrong_target_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("hello")
    assert "No such file" in one_error(run("ls", tmp_path / "none"))
    assert "neither a media store nor a trajectory file" in one_error(run("verify", tmp_path / "note.txt"))
    assert "not a media store: it holds files such as note.txt" in one_error(run("ls", tmp_path))
    assert "neither" in one_error(run("export", tmp_path / "note.txt", "--out", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_to_is_one_clear_line(tmp_path: Path) -> None:
    path = trajectories(tmp_path / "t.mmr", e=[(RAW,)])
    assert "cannot be created" in one_error(run("export", path, "--out", path))
    result = run("export", path, "--out", tmp_path / "out", "--contact-sheet", tmp_path / "none" / "sheet.png")
    assert result.exit_code == 2
    assert "sheet.png cannot be written: No such file or directory" in result.stderr


def test_the_commands_load_no_torch_and_the_others_no_decoder() -> None:
    script = (
        "import sys; from rollouts.cli.main import app; from typer.testing import CliRunner\n"
        "assert CliRunner().invoke(app, ['media', '--help']).exit_code == 0\n"
        "print([name for name in ('torch', 'av', 'rollouts.cli.media.description') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ})
    assert done.stdout == "[]\n", done.stderr


def test_postscript_in_a_store_is_not_handed_to_an_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called, bin_dir = tmp_path / "called", tmp_path / "bin"
    bin_dir.mkdir()
    ghostscript = bin_dir / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {called}\nexit 1\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_dir}:{os.environ['PATH']}")
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    store = MediaStore(directory=tmp_path / "store")
    store.add_source(MediaSource.of(postscript))
    out, sheet = tmp_path / "out", tmp_path / "sheet.png"
    CliRunner().invoke(
        app, ["media", "export", str(tmp_path / "store"), "--out", str(out), "--contact-sheet", str(sheet)]
    )
    CliRunner().invoke(app, ["media", "ls", str(tmp_path / "store")])
    assert sheet.is_file()
    assert not called.exists()
