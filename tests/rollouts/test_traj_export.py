"""`rollouts traj export`: episodes as JSON lines with image files, and nodes as Parquet rows."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from trajectory_files import file_of, forked, lines, one_error, run, short

from renderers.installation import install_command
from rollouts.trajectory.packed_episodes import AbsentSource


def test_jsonl_holds_the_whole_episode_and_each_image_is_one_file(tmp_path: Path) -> None:
    path = file_of(tmp_path / "t.mmr", forked(), short("second", level=1))
    lines(run("export", path, "--level", "full", "--jsonl", tmp_path / "out/episodes.jsonl"))
    first, _ = map(json.loads, (tmp_path / "out/episodes.jsonl").read_text().splitlines())
    for node, entry in zip(forked().nodes, first["nodes"], strict=True):
        assert entry["token_ids"] == node.token_ids.tolist()
        assert np.array_equal(np.array(entry["logprobs"], np.float32), node.logprobs)
    assert (first["turns"][2]["node"], first["turns"][2]["info"]) == (5, {"steps": 3})
    assert len(list((tmp_path / "out/episodes-media").iterdir())) == 2, "each distinct image once"


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


def test_whole_episodes_are_for_jsonl_alone(tmp_path: Path) -> None:
    error = one_error(
        run("export", file_of(tmp_path / "t.mmr", short("a")), "--level", "full", "--parquet", tmp_path / "o.parquet")
    )
    assert "--level full is for --jsonl alone" in error
    assert os.listdir(tmp_path) == ["t.mmr"]


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    error = one_error(run("export", file_of(tmp_path / "t.mmr", short("a")), "--parquet", tmp_path / "o.parquet"))
    assert install_command("parquet") in error
    assert os.listdir(tmp_path) == ["t.mmr"]


def test_an_episode_without_image_data_is_exported_with_the_digests(tmp_path: Path) -> None:
    episode = short("a")
    prompt, completion = episode.nodes
    absent = [replace(each, source=AbsentSource(each.source.digest)) for each in prompt.media]
    path = file_of(tmp_path / "t.mmr", replace(episode, nodes=[replace(prompt, media=tuple(absent)), completion]))
    result = run("export", path, "--level", "full", "--jsonl", tmp_path / "o.jsonl")
    assert result.exit_code == 1
    (medium,) = json.loads((tmp_path / "o.jsonl").read_text())["nodes"][0]["media"]
    assert medium["file"] is None
    assert medium["digest"] in result.stderr
