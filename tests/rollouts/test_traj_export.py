"""`rollouts traj export`: nodes as Parquet rows, and what cannot be exported."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from trajectory_files import file_of, forked, lines, one_error, run, short

from renderers.installation import install_command
from rollouts.trajectory.packed_episodes import AbsentSource


def test_parquet_has_one_row_per_node(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    first = forked()
    first.nodes = list(first.nodes)
    first.nodes[1] = replace(first.nodes[1], content=np.array([True, False]))
    path = file_of(tmp_path / "t.mmr", first, short("second"))
    out = tmp_path / "nodes.parquet"
    lines(run("export", path, "--level", "node", "--parquet", out))
    rows = parquet.read_table(out).to_pylist()
    assert [(row["episode_id"], row["node"], row["parent"]) for row in rows] == [
        *(("forked", index, node.parent) for index, node in enumerate(first.nodes)),
        ("second", 0, -1),
        ("second", 1, 0),
    ]
    for row, node in zip(rows, first.nodes, strict=False):
        assert row["token_ids"] == node.token_ids.tolist()
        assert row["sampled"] == node.sampled.tolist()
        sampled_logprobs = [logprob for logprob in row["logprobs"] if logprob is not None]
        assert np.array_equal(np.array(sampled_logprobs, np.float32), node.logprobs)
        assert [medium["digest"] for medium in row["media"]] == [reference.source.digest for reference in node.media]
    assert rows[1]["content"] == [True, False]
    assert (rows[0]["turn"], rows[3]["turn"]) == (None, 1)
    assert (rows[0]["agent"], rows[3]["agent"]) == (None, "")


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    error = one_error(run("export", file_of(tmp_path / "t.mmr", short("a")), "--parquet", tmp_path / "o.parquet"))
    assert install_command("parquet") in error
    assert os.listdir(tmp_path) == ["t.mmr"]


def test_an_image_whose_bytes_are_not_in_the_file_is_named_and_left_out(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    episode = short("a")
    (digest,) = (reference.source.digest for reference in episode.all_media())
    prompt, completion = episode.nodes
    absent = [replace(each, source=AbsentSource(each.source.digest)) for each in prompt.media]
    path = file_of(tmp_path / "t.mmr", replace(episode, nodes=[replace(prompt, media=tuple(absent)), completion]))
    result = run("export", path, "--images", "--parquet", tmp_path / "o.parquet")
    assert result.exit_code == 1
    assert f"image {digest[:16]}: its bytes are not in this file" in result.stderr
