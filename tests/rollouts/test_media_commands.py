"""`rollouts media`: listing, verifying and exporting the media of a store or a file; contact sheets; damaged files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from media_stores import (
    MEDIA_BY_LISTING,
    NOISE,
    RAW,
    RAW_VIDEO,
    animation,
    encoded,
    encoded_video,
    last_page_broken,
    lines,
    one_error,
    run,
    solid_image,
    store_of,
    stored_file,
    trajectory_file,
)
from PIL import Image
from planted_violations import PLANTED_VIOLATIONS
from trajectory_files import png, short
from typer.testing import CliRunner

from renderers import MediaSource, MediaStore, PlaceholderRange
from renderers.installation import install_command
from renderers.media.decoding import array_to_raw, frames_to_raw
from rollouts import MediaReference, TokenNode, Trajectory
from rollouts.cli.contact_sheet import contact_sheet, thumbnail
from rollouts.cli.main import app
from rollouts.cli.media_inventory import open_inventory
from transport import RecordWriter


def test_a_store_is_listed_by_digest_with_type_size_and_bytes(tmp_path: Path) -> None:
    digests = store_of(tmp_path, *MEDIA_BY_LISTING.values())
    result = run("ls", tmp_path)
    assert result.exit_code == 0
    header, *rows, footer = lines(result)
    assert header == "digest type size bytes"
    expected = [
        f"{digest[:16]} {what} {len(data):,}"
        for digest, (what, data) in zip(digests, MEDIA_BY_LISTING.items(), strict=True)
    ]
    assert rows == sorted(expected)
    assert footer == f"{len(MEDIA_BY_LISTING)} media {sum(map(len, MEDIA_BY_LISTING.values())):,}"


def test_a_trajectory_file_is_listed_with_one_line_per_medium_its_uses_and_episodes(tmp_path: Path) -> None:
    a, b, c = (solid_image((level, 0, 0)) for level in (1, 2, 3))
    path = trajectory_file(tmp_path / "t.mmr", first=[(a, b), (), (a,)], second=[(b, c)], third=[()])
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
    path = trajectory_file(tmp_path / "t.mmr", **{name: [(RAW,)] for name in names})
    assert lines(run("ls", path))[1].endswith(f"5 {', '.join(names[:3])} and 2 more")


def test_json_has_whole_digests_and_everything_else(tmp_path: Path) -> None:
    path = trajectory_file(tmp_path / "t.mmr", e1=[(RAW,), (animation(),)], e2=[(RAW,)])
    first, second = json.loads(run("ls", path, "--json").stdout)
    assert first == {
        "digest": MediaSource.of(RAW).digest,
        "type": "raw",
        "modality": "image",
        "width": 30,
        "height": 20,
        "seconds": None,
        "rate": None,
        "channels": None,
        "bytes": len(RAW),
        "uses": 2,
        "episodes": ["e1", "e2"],
    }
    assert (second["type"], second["modality"]) == ("gif", "video")
    store_of(tmp_path / "store", RAW)
    (only,) = json.loads(run("ls", tmp_path / "store", "--json").stdout)
    assert only == {key: value for key, value in first.items() if key not in ("uses", "episodes")}


def test_listing_reads_headers_and_not_images(tmp_path: Path) -> None:
    (digest,) = store_of(tmp_path, encoded(Image.fromarray(np.tile(NOISE, (20, 20, 1))), "PNG"))
    path = stored_file(tmp_path, digest)
    path.write_bytes(path.read_bytes()[:2000])
    assert lines(run("ls", tmp_path))[1] == f"{digest[:16]} png 600x400 2,000"


def test_a_video_file_is_listed_as_a_video(tmp_path: Path) -> None:
    store_of(tmp_path, encoded_video())
    assert " mp4 video - " in lines(run("ls", tmp_path))[1]


def test_an_empty_store_or_file_is_reported_as_empty(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    for target in (tmp_path / "store", trajectory_file(tmp_path / "t.mmr", e=[()])):
        result = run("ls", target)
        assert (result.exit_code, result.stdout) == (0, f"{target} holds no media\n")


def test_the_directory_of_a_run_is_its_trajectory_file(tmp_path: Path) -> None:
    trajectory_file(tmp_path / "trajectories.mmr", e=[(RAW,)])
    of_directory, of_file = (run("ls", target) for target in (tmp_path, tmp_path / "trajectories.mmr"))
    assert (of_directory.exit_code, of_directory.stdout) == (0, of_file.stdout)
    assert "1 " in of_file.stdout


def test_control_characters_in_a_file_are_escaped_on_the_terminal(tmp_path: Path) -> None:
    path = trajectory_file(tmp_path / "t.mmr", **{"\x1b[31m[bold]loud[/bold]\r": [(RAW,)]})
    out = run("ls", path).stdout
    assert "\x1b" not in out
    assert "[bold]loud[/bold]" in out


def test_every_wrong_target_is_one_error_line(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("hello")
    assert "No such file" in one_error(run("ls", tmp_path / "none"))
    assert "neither a media store nor a trajectory file" in one_error(run("verify", tmp_path / "note.txt"))
    assert "not a media store: it holds files such as note.txt" in one_error(run("ls", tmp_path))
    assert "neither" in one_error(run("export", tmp_path / "note.txt", "--out", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_importing_the_commands_loads_neither_torch_nor_a_decoder() -> None:
    script = (
        "import sys; from rollouts.cli.main import app; from typer.testing import CliRunner\n"
        "assert CliRunner().invoke(app, ['media', '--help']).exit_code == 0\n"
        "print([name for name in ('torch', 'av') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ})
    assert done.stdout == "[]\n", done.stderr


# `rollouts media verify`: media that are damaged or do not decode are reported.


def test_valid_media_pass(tmp_path: Path) -> None:
    valid = [data for what, data in MEDIA_BY_LISTING.items() if what != "unknown -"]
    valid.append(encoded_video())
    store_of(tmp_path / "store", *valid)
    path = trajectory_file(tmp_path / "t.mmr", e=[tuple(valid)])
    for target in (tmp_path / "store", path):
        result = run("verify", target)
        assert result.exit_code == 0, result.output
        assert lines(result) == [f"{len(valid)} media match their digests and decode"]


def test_every_damaged_source_is_reported_and_the_exit_code_is_1(tmp_path: Path) -> None:
    images = [solid_image((level, 0, 0)) for level in range(4)]
    digests = store_of(tmp_path, *images)
    stored_file(tmp_path, digests[0]).write_bytes(images[0][:-1])
    stored_file(tmp_path, digests[1]).write_bytes(b"")
    stored_file(tmp_path, digests[2]).write_bytes(images[3])
    result = run("verify", tmp_path)
    assert result.exit_code == 1
    *found, last = lines(result)
    assert sorted(line.split(": ")[0] for line in found) == sorted(digests[:3])
    assert all(": damaged: " in line for line in found)
    assert f"{digests[2]}: damaged: its {len(images[3])} bytes hash to {digests[3]}" in found
    assert last == "3 failed, 4 media checked"
    assert stored_file(tmp_path, digests[1]).exists(), "verify deletes nothing"


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
def test_media_that_match_their_digest_but_do_not_decode_are_reported(data: bytes, tmp_path: Path) -> None:
    (digest,) = store_of(tmp_path, data)
    result = run("verify", tmp_path)
    assert result.exit_code == 1
    assert lines(result)[0].startswith(f"{digest}: undecodable: ")


def test_a_truncated_video_file_is_reported(tmp_path: Path) -> None:
    whole = encoded_video()
    (digest,) = store_of(tmp_path, whole[: len(whole) // 3])
    assert lines(run("verify", tmp_path))[0].startswith(f"{digest}: undecodable: ")


def test_a_video_file_without_an_installed_decoder_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (digest,) = store_of(tmp_path, encoded_video())
    monkeypatch.setitem(sys.modules, "av", None)
    result = run("verify", tmp_path)
    assert result.exit_code == 0
    first = lines(result)[0]
    assert first.startswith(f"{digest}: not decoded: video {digest[:12]} is a file that PyAV decodes, which is not")
    assert install_command("video") in first


def test_files_that_do_not_belong_to_a_store_are_reported(tmp_path: Path) -> None:
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


def test_a_damaged_record_is_reported_and_the_others_are_still_read(tmp_path: Path) -> None:
    images = [solid_image((level, 0, 0), (60, 60)) for level in (1, 2)]
    path = trajectory_file(tmp_path / "t.mmr", e1=[(images[0],)], e2=[(images[1],)])
    content = path.read_bytes()
    at = content.index(images[0]) + 50
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    result = run("verify", path)
    assert result.exit_code == 1
    first, last = lines(result)
    assert first.startswith("record 0: ")
    assert MediaSource.of(images[0]).digest in first
    assert last == "1 failed, 1 media checked"
    listed = run("ls", path)
    assert MediaSource.of(images[1]).digest[:16] in listed.stdout
    assert "record 0" in listed.stderr


# `rollouts media export`: media written as files.


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def test_encoded_files_are_exported_unchanged_and_once_each(tmp_path: Path) -> None:
    files = {
        "png": solid_image((1, 2, 3)),
        "jpg": solid_image((1, 2, 3), format="JPEG"),
        "webp": solid_image((1, 2, 3), format="WEBP"),
        "gif": animation(),
        "tif": solid_image((1, 2, 3), format="TIFF"),
        "mp4": encoded_video(),
        "bin": b"not an image at all",
    }
    path = trajectory_file(tmp_path / "t.mmr", e1=[tuple(files.values())], e2=[tuple(files.values())])
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
    image_data = solid_image((1, 2, 3))
    digests = store_of(tmp_path / "store", image_data, RAW)
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
    other.write_bytes(solid_image((9, 9, 9)))
    result = run("export", tmp_path / "store", "--out", out)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {digests[0]}: ")
    assert "other contents" in result.stderr
    assert other.read_bytes() == solid_image((9, 9, 9))


def test_damaged_media_are_not_exported(tmp_path: Path) -> None:
    digests = store_of(tmp_path / "store", solid_image((1, 2, 3)), solid_image((4, 5, 6)))
    stored_file(tmp_path / "store", digests[0]).write_bytes(solid_image((7, 8, 9)))
    result = run("export", tmp_path / "store", "--out", tmp_path / "out", "--contact-sheet", tmp_path / "sheet.png")
    assert result.exit_code == 1
    assert digests[0] in result.stderr
    assert [file.name for file in (tmp_path / "out").iterdir()] == [f"{digests[1][:16]}.png"]
    assert (tmp_path / "sheet.png").exists()


@pytest.mark.slow
def test_a_full_disk_leaves_no_partial_file(tmp_path: Path) -> None:
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
    file = tmp_path / "out" / f"{digest[:16]}.bmp"
    assert done.stderr == f"error: {digest}: not exported: {file}: File too large\n"
    assert not (tmp_path / "out").exists()


def test_an_output_path_that_cannot_be_written_is_one_error_line(tmp_path: Path) -> None:
    path = trajectory_file(tmp_path / "t.mmr", e=[(RAW,)])
    assert "cannot be created" in one_error(run("export", path, "--out", path))
    result = run("export", path, "--out", tmp_path / "out", "--contact-sheet", tmp_path / "none" / "sheet.png")
    assert result.exit_code == 2
    assert "sheet.png cannot be written: No such file or directory" in result.stderr


def test_postscript_in_a_store_does_not_start_an_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


# The contact sheet of `rollouts media export`: one image with a thumbnail of every medium.


def sheet_of(directory: Path, *data: bytes, max_thumbnails: int = 400) -> tuple[np.ndarray, list[str]]:
    """The pixels of a contact sheet of a store, and the digests in its order."""
    digests = sorted(store_of(directory, *data))
    with open_inventory(directory) as inventory:
        return np.asarray(contact_sheet(inventory, "title", max_thumbnails)), digests


def pixels_of_colour(sheet: np.ndarray, colour: tuple[int, int, int]) -> int:
    """How many pixels have this colour."""
    return int((sheet == colour).all(axis=2).sum())


COLOURS = [(250, 20, 30), (20, 240, 40), (50, 60, 230), (250, 240, 10), (10, 200, 210)]


def test_the_contact_sheet_shows_every_medium(tmp_path: Path) -> None:
    sheet, _ = sheet_of(tmp_path, *(solid_image(colour, (300, 200)) for colour in COLOURS))
    for colour in COLOURS:
        assert pixels_of_colour(sheet, colour) == 144 * 96


def test_thumbnails_are_in_the_order_of_the_list(tmp_path: Path) -> None:
    by_digest = {MediaSource.of(solid_image(colour)).digest: colour for colour in COLOURS}
    sheet, digests = sheet_of(tmp_path, *map(solid_image, COLOURS))
    places = []
    for digest in digests:
        rows, columns = np.nonzero((sheet == by_digest[digest]).all(axis=2))
        places.append((rows.min(), columns.min()))
    assert places == sorted(places)


def test_a_small_image_is_enlarged(tmp_path: Path) -> None:
    sheet, _ = sheet_of(tmp_path, solid_image(COLOURS[0], (28, 14)), solid_image(COLOURS[1], (100, 50)))
    assert pixels_of_colour(sheet, COLOURS[0]) == 28 * 5 * 14 * 5
    assert pixels_of_colour(sheet, COLOURS[1]) == 100 * 50


def test_exif_rotation_is_applied_and_transparency_becomes_white(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    turned = encoded(Image.new("RGB", (100, 40), (250, 20, 30)), "PNG", exif=exif)
    small = thumbnail(MediaSource.of(turned))
    assert small is not None
    assert small.size == (40, 100)
    clear = thumbnail(MediaSource.of(array_to_raw(np.zeros((9, 9, 4), dtype=np.uint8))))
    assert clear is not None
    assert clear.getpixel((4, 4)) == (255, 255, 255)


def test_a_video_has_its_first_frame_or_a_tile_with_text(tmp_path: Path) -> None:
    red = np.zeros((2, 30, 40, 3), dtype=np.uint8)
    red[0], red[1] = COLOURS[0], COLOURS[1]
    sheet, _ = sheet_of(tmp_path / "raw", frames_to_raw(red))
    assert pixels_of_colour(sheet, COLOURS[0]) > 1000
    assert pixels_of_colour(sheet, COLOURS[1]) == 0
    assert thumbnail(MediaSource.of(encoded_video())) is None
    for name, data in (("encoded_video", encoded_video()), ("text", b"not an image"), ("broken", RAW[:-1])):
        sheet, _ = sheet_of(tmp_path / name, data)
        tile = sheet[34 : 34 + 144, 10 : 10 + 144]
        assert len(np.unique(tile.reshape(-1, 3), axis=0)) > 2, f"{name}: nothing is written on the tile"


def test_the_number_of_thumbnails_is_limited_and_the_title_has_the_rest(tmp_path: Path) -> None:
    images = [array_to_raw(np.full((3, 3, 3), number, dtype=np.uint8)) for number in range(30)]
    few, _ = sheet_of(tmp_path, *images, max_thumbnails=12)
    many, _ = sheet_of(tmp_path, max_thumbnails=30)
    assert few.shape[0] < many.shape[0]
    title = few[:30]
    assert not np.array_equal(title[:, :300], many[:30, :300])
    huge, _ = sheet_of(tmp_path, max_thumbnails=10**6)
    assert np.array_equal(huge, many)


def test_the_sheet_of_no_medium_and_of_one_medium_is_an_image(tmp_path: Path) -> None:
    for target in (trajectory_file(tmp_path / "t.mmr", e=[()]), trajectory_file(tmp_path / "u.mmr", e=[(RAW,)])):
        sheet = tmp_path / f"{target.name}.png"
        result = run("export", target, "--out", tmp_path / "out", "--contact-sheet", sheet)
        assert result.exit_code == 0, result.output
        assert Image.open(sheet).width > 100


# `rollouts media` on files in which something is not what it should be: named, and the rest is listed all the same.

GOOD = png(9)


def file_of(path: Path, *records: Any, compression: Any = None) -> Path:
    with RecordWriter(path, compression=compression) as out:
        for record in records:
            out.append(record)
    return path


@pytest.mark.parametrize("fault", PLANTED_VIOLATIONS)
def test_an_episode_with_a_fault_neither_breaks_the_command_nor_hides_the_others(tmp_path: Path, fault: str) -> None:
    bad = short("bad")
    PLANTED_VIOLATIONS[fault](bad)
    path = file_of(tmp_path / "t.mmr", bad, short("good", 9), 5, [short("grouped", 9), "no episode"])
    digest = MediaSource.of(GOOD).digest
    out = tmp_path / "out"
    for result in (run("ls", path), run("ls", path, "--json"), run("verify", path), run("export", path, "--out", out)):
        assert isinstance(result.exception, SystemExit | None), result.exception
        assert digest[:16] in result.output or result.exit_code == 1
        assert "record 2: it holds a int" in result.output
        assert "record 3: it holds a str among its episodes" in result.output
    (listed,) = [one for one in json.loads(run("ls", path, "--json").stdout) if one["digest"] == digest]
    assert (listed["uses"], listed["episodes"]) == (2, ["good", "grouped"])
    assert (out / f"{digest[:16]}.png").read_bytes() == GOOD


def test_an_episode_with_references_of_the_wrong_type_is_named_as_not_listed(tmp_path: Path) -> None:
    bad = short("bad")
    PLANTED_VIOLATIONS["media that are numbers"](bad)
    result = run("ls", file_of(tmp_path / "t.mmr", bad, short("good", 9)))
    assert result.exit_code == 1
    (error,) = result.stderr.splitlines()
    assert error.startswith("error: not listed: record 0: rollouts.TokenNode")


def showing(name: str, *images: bytes) -> Trajectory:
    media = tuple(
        MediaReference("image", f"{source.digest}-p", source, PlaceholderRange(at, 1))
        for at, source in enumerate(map(MediaSource.of, images))
    )
    ids = np.arange(len(images), dtype=np.int32)
    node = TokenNode(-1, ids, np.zeros(len(ids), bool), np.empty(0, np.float32), (), media)
    return Trajectory(name, nodes=[node])


@pytest.mark.slow
def test_media_of_a_compressed_file_are_read_one_after_the_other_and_not_held(tmp_path: Path) -> None:
    pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    images = [array_to_raw(np.full((600, 600, 3), level, np.uint8)) for level in range(20)]
    episodes = [showing(f"e{level}", image) for level, image in enumerate(images)]
    path = file_of(tmp_path / "t.mmr", *episodes, compression="zstd")
    assert path.stat().st_size < 40_000
    run("ls", path)  # what is imported is imported
    for command in (("ls", path), ("verify", path), ("export", path, "--out", tmp_path / "out")):
        tracemalloc.start()
        result = run(*command)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert result.exit_code == 0, result.output
        assert peak < 10 * len(images[0])
    assert len(list((tmp_path / "out").iterdir())) == 20
