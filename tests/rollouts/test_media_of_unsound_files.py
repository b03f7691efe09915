"""`rollouts media` on files in which something is not what it should be: named, and the rest is listed all the same."""

from __future__ import annotations

import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from planted_violations import PLANTED_VIOLATIONS
from trajectory_files import png, short
from typer.testing import CliRunner

from renderers import MediaSource, PlaceholderRange
from renderers.media.decoding import array_to_raw
from rollouts import MediaReference, TokenNode, Trajectory
from rollouts.cli.main import app
from transport import RecordWriter

GOOD = png(9)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["media", *map(str, arguments)], env={"COLUMNS": "60"})


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
