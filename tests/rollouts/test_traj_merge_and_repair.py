"""`rollouts traj merge` and `repair`: records copied into a new file."""

import os
from pathlib import Path

from trajectory_files import damage, file_of, lines, png, run, short

from transport import RecordReader, read_records


def test_merged_files_hold_all_episodes_in_order_and_each_image_once(tmp_path: Path) -> None:
    one = file_of(tmp_path / "1.mmr", short("a", 1), short("b", 2))
    other = file_of(tmp_path / "2.mmr", short("c", 1))
    (summary,) = lines(run("merge", one, other, "--out", tmp_path / "all.mmr"))
    assert summary.startswith("3 records")
    assert [episode.episode_id for episode in read_records(tmp_path / "all.mmr")] == ["a", "b", "c"]
    assert (tmp_path / "all.mmr").read_bytes().count(png(1)) == 1


def test_repair_copies_undamaged_records_and_leaves_the_damaged_file_unchanged(tmp_path: Path) -> None:
    path = file_of(tmp_path / "t.mmr", short("a", 1), short("b", 2), short("c", 4))
    damage(path, png(2))
    before = path.read_bytes()
    first, last = lines(run("repair", path, "--out", tmp_path / "good.mmr"))
    assert first.startswith("record 1: ")
    assert last.startswith("2 records")
    with RecordReader(tmp_path / "good.mmr") as reader:
        assert [episode.episode_id for episode in reader] == ["a", "c"]
    assert path.read_bytes() == before
    assert run("ls", tmp_path / "good.mmr").exit_code == 0
    assert sorted(os.listdir(tmp_path)) == ["good.mmr", "t.mmr"]
