"""`rollouts media verify`: media that are damaged or do not decode are reported."""

from __future__ import annotations

from pathlib import Path

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
    run,
    solid_image,
    store_of,
    stored_file,
    trajectory_file,
)
from PIL import Image

from renderers import MediaSource


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
    monkeypatch.setattr("rollouts.cli.media.find_spec", lambda name: None)
    result = run("verify", tmp_path)
    assert result.exit_code == 0
    assert lines(result)[0] == f"{digest}: mp4 video, not decoded: PyAV is not installed"


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
