"""The contact sheet of `rollouts media export`: one image with a thumbnail of every medium."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from media_stores import RAW, encoded, encoded_video, run, solid_image, store_of, trajectory_file
from PIL import Image

from renderers import MediaSource
from renderers.media.decoding import array_to_raw, frames_to_raw
from rollouts.cli.media import contact_sheet, open_inventory, thumbnail


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
