"""`rollouts traj export --level episode|turn|node`: tables of typed values, of a file and of a run's directory."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from evaluation.compared_runs import line
from trajectory_files import (
    file_of,
    forked,
    lines,
    one_error,
    run,
    short,
)

from rollouts import Provenance, Trajectory
from rollouts.engines.protocol import FinishReason

parquet = pytest.importorskip("pyarrow.parquet")
pyarrow = pytest.importorskip("pyarrow")


def rows_of(path: Path, level: str, out: Path, *options: str) -> list[dict[str, Any]]:
    """The rows of both forms, which are equal but for their times."""
    lines(run("export", path, "--level", level, "--parquet", out.with_suffix(".parquet"), *options))
    rows = parquet.read_table(out.with_suffix(".parquet")).to_pylist()
    if not options:
        lines(run("export", path, "--level", level, "--jsonl", out.with_suffix(".jsonl")))
        written = [json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()]
        assert [list(row) for row in written] == [list(row) for row in rows]
    return rows


def group_line(task_id: str, *rewards: float, **values: Any) -> str:
    totals = {"total_rewards": [reward + 1 for reward in rewards], "group_rewards": [1.0] * len(rewards)}
    attempts = list(range(1, len(rewards) + 1))
    return json.dumps(line(task_id, rewards, **{**totals, "attempts": attempts, "reward_parts": {}, **values}))


def run_directory(directory: Path, groups: dict[str, list[Trajectory]], metrics: list[str]) -> Path:
    directory.mkdir()
    for task_id, episodes in groups.items():
        for episode in episodes:
            episode.group_id = task_id
    file_of(directory / "trajectories.mmr", *groups.values())
    (directory / "metrics.jsonl").write_text("".join(f"{line}\n" for line in metrics))
    return directory


# Episodes.


def test_a_row_of_a_file_has_the_figures_of_its_episode(tmp_path: Path) -> None:
    first, second = forked(), short("second")
    first.started_at, first.seconds = 1.5, 2.25
    first.metrics = {"right": 1.0}
    first.provenance = Provenance(model="tiny", engine="ScriptedEngine")
    turns = list(first.turns)
    turns[0] = replace(turns[0], finish_reason=FinishReason.LENGTH, seconds=0.5)
    turns[1] = replace(turns[1], info={"rewards": {"right": {"score": 2.0, "weight": 0.25}}}, seconds=1.0)
    first.turns = turns
    second.error, second.truncation_reason = "ServerTimeoutError: no answer", "max_turns"
    found = rows_of(file_of(tmp_path / "t.mmr", first, second), "episode", tmp_path / "o")
    figures = {
        "reward_parts": {"right": 2.0},
        "turns": 3,
        "length_stops": 1,
        "started_at": datetime(1970, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC),
        "engine_seconds": 1.5,
        "weight_versions": ["0", "1"],
        "model": "tiny",
    }
    assert {name: found[0][name] for name in figures} == figures
    assert (found[1]["error_kind"], found[1]["error"]) == ("ServerTimeoutError", "ServerTimeoutError: no answer")
    assert (found[1]["truncated"], found[1]["truncation_reason"]) == (True, "max_turns")
    assert (found[1]["started_at"], found[1]["reward_parts"]) == (None, None)


def test_a_row_of_a_run_has_the_rewards_of_its_group_and_the_data_of_its_task(tmp_path: Path) -> None:
    groups = {"a": [short("a/0"), short("a/1")], "b": [short("b/0")], "without": [short("w/0")]}
    metrics = [
        group_line("b", -1.0, task_data={"level": 1.5, "place": {"room": "x"}}),
        "no line of a group",
        group_line("a", -1.0, -1.0, task_data={"level": 2, "tags": ["u"]}, reward_parts={"rank": [0.0, 1.0]}),
    ]
    directory = run_directory(tmp_path / "run", groups, metrics)
    result = run("export", directory, "--parquet", tmp_path / "o.parquet")
    assert result.exit_code == 1
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == ["error"]
    assert "metrics.jsonl, line 2: no line of a group" in result.stderr
    found = parquet.read_table(tmp_path / "o.parquet").to_pylist()
    named = {row["episode_id"]: row for row in found}
    assert list(named) == ["a/0", "a/1", "b/0", "w/0"]
    for name, attempts, rank in (("a/0", 1, 0.0), ("a/1", 2, 1.0)):
        row = named[name]
        rewards = tuple(row[f"{kind}_reward"] for kind in ("environment", "group", "total"))
        assert rewards == (-1.0, 1.0, 0.0)
        assert row["reward_parts"] == {"rank": rank}
        assert row["attempts"] == attempts
        assert row["task_data"] == {"level": 2.0, "place": None, "tags": ["u"]}
    assert named["b/0"]["task_data"] == {"level": 1.5, "place": {"room": "x"}, "tags": None}
    assert (named["w/0"]["task_data"], named["w/0"]["total_reward"]) == (None, None)


def test_values_of_several_types_are_text_of_json_and_a_note_names_them(tmp_path: Path) -> None:
    groups = {name: [short(name)] for name in ("a", "b")}
    data = ({"answer": 1, "level": 1}, {"answer": "one", "level": 2})
    metrics = [group_line(name, 0.0, task_data=one) for name, one in zip("ab", data, strict=True)]
    result = run("export", run_directory(tmp_path / "run", groups, metrics), "--parquet", tmp_path / "o.parquet")
    assert result.exit_code == 0, result.output
    (note,) = result.stderr.splitlines()
    assert "task_data.answer: integer, text" in note
    found = parquet.read_table(tmp_path / "o.parquet").to_pylist()
    assert [row["task_data"] for row in found] == [{"answer": "1", "level": 1}, {"answer": '"one"', "level": 2}]


def test_an_episode_of_a_chat_endpoint_has_the_numbers_of_tokens_that_it_counted(tmp_path: Path) -> None:
    chat = Trajectory("chat")
    chat.add_message_turn(
        {"role": "assistant", "content": "Hi."}, FinishReason.STOP, [{"role": "user", "content": "?"}]
    )
    path = file_of(tmp_path / "t.mmr", chat)
    (row,) = rows_of(path, "episode", tmp_path / "e")
    assert (row["turns"], row["tokens"], row["sampled_tokens"]) == (1, None, None)
    chat.metrics = {"endpoint_prompt_tokens": 30.0, "endpoint_completion_tokens": 4.0}
    (counted,) = rows_of(file_of(tmp_path / "counted.mmr", chat), "episode", tmp_path / "c")
    assert (counted["tokens"], counted["sampled_tokens"]) == (34, 4)
    (turn,) = rows_of(path, "turn", tmp_path / "t")
    assert (turn["prompt_tokens"], turn["completion_tokens"]) == (None, None)
    assert ([one["content"] for one in turn["prompt"]], turn["message"]["content"]) == (["?"], "Hi.")


# Turns and nodes.


def test_a_row_of_a_turn_has_its_message_and_what_its_prompt_added(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"x": 1}}}
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    episode = forked()
    message = {"role": "assistant", "content": parts, "reasoning_content": "Hm.", "tool_calls": [call]}
    episode.turns = [replace(episode.turns[0], message=message, agent="critic"), *episode.turns[1:]]
    first, second, third = rows_of(file_of(tmp_path / "t.mmr", episode), "turn", tmp_path / "o")
    assert (first["episode_id"], first["turn"], first["agent"], first["node"]) == ("forked", 0, "critic", 1)
    assert first["message"] == {
        "role": "assistant",
        "content": "A\nB",
        "reasoning": "Hm.",
        "tool_calls": [{"id": "c1", "name": "look", "arguments": '{"x": 1}'}],
    }
    assert [one["content"] for one in first["prompt"]] == ["What is this?"]
    assert (first["prompt_tokens"], first["completion_tokens"]) == (5, 2)
    assert (second["prompt_tokens"], second["completion_tokens"], second["reward"]) == (9, 3, 0.5)
    assert (third["info"], second["info"]) == ({"steps": 3}, None)
    assert [row["finish_reason"] for row in (first, second, third)] == ["stop"] * 3


# Images.


def test_datasets_loads_the_images_of_each_level_as_images(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    path = file_of(tmp_path / "t.mmr", forked(), short("second"))
    for level, counts in (("episode", [3, 1]), ("turn", [2, 1, 0, 1]), ("node", [2, 0, 1, 0, 0, 0, 1, 0])):
        out = tmp_path / f"{level}.parquet"
        lines(run("export", path, "--level", level, "--images", "--parquet", out))
        for streaming in (False, True):
            cache = str(tmp_path / "cache")
            loaded = datasets.load_dataset(
                "parquet", data_files=str(out), split="train", streaming=streaming, cache_dir=cache
            )
            assert loaded.features["image_files"].feature == datasets.Image()
            rows = list(loaded)
            assert [len(row["image_files"]) for row in rows] == counts
            assert (rows[0]["image_files"][1].size, rows[0]["image_files"][1].getpixel((0, 0))) == ((9, 7), (2, 0, 0))


def test_images_are_for_parquet_alone(tmp_path: Path) -> None:
    path = file_of(tmp_path / "t.mmr", short("a"))
    for option in ("--images", "--sounds"):
        error = one_error(run("export", path, option, "--jsonl", tmp_path / "o.jsonl"))
        assert f"{option} is for --parquet alone" in error
    assert [each.name for each in tmp_path.iterdir()] == ["t.mmr"]
