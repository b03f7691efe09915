"""`rollouts media ls`: the media of a store or a trajectory file, listed from their headers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from media_stores import (
    MEDIA_BY_LISTING,
    NOISE,
    RAW,
    animation,
    encoded,
    encoded_video,
    lines,
    one_error,
    run,
    solid_image,
    store_of,
    stored_file,
    trajectory_file,
)
from PIL import Image

from renderers import MediaSource


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


def test_importing_the_commands_loads_neither_torch_nor_a_decoder() -> None:
    script = (
        "import sys; from rollouts.cli.main import app; from typer.testing import CliRunner\n"
        "assert CliRunner().invoke(app, ['media', '--help']).exit_code == 0\n"
        "print([name for name in ('torch', 'av') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ})
    assert done.stdout == "[]\n", done.stderr
