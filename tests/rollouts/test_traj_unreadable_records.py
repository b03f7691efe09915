"""Invalid and damaged records: `rollouts traj ls` and the other commands name them and read the others."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted_violations import (
    PLANTED_VIOLATIONS,
    exponential_tuple,
    first_turn,
    nested,
    second_node,
)
from trajectory_files import file_of, one_error, run, short

from rollouts.engines.protocol import FinishReason
from rollouts.trajectory.packed_episodes import PackedEpisodes
from transport import wire_type


@pytest.mark.parametrize("violation", PLANTED_VIOLATIONS)
def test_every_planted_violation_is_reported_with_its_record(tmp_path: Path, violation: str) -> None:
    bad = short("bad")
    PLANTED_VIOLATIONS[violation](bad)
    path = file_of(tmp_path / "t.mmr", short("good"), bad)
    listed = run("ls", path)
    assert listed.exit_code == 1, listed.output
    assert "good" in listed.stdout
    assert "not listed: record 1" in listed.stderr
    assert "record 1" in one_error(run("show", path, "1"))
    exported = run("export", path, "--jsonl", tmp_path / "o.jsonl")
    assert (exported.exit_code, exported.stderr.count("not exported: record 1")) == (1, 1)


@pytest.mark.parametrize(
    "held", [exponential_tuple(), PackedEpisodes("source", exponential_tuple()), PackedEpisodes("source", 5)]
)  # type: ignore[arg-type]
@pytest.mark.parametrize("command", ["ls", "show"])
def test_a_record_of_exponential_size_is_reported_at_once(tmp_path: Path, held: Any, command: str) -> None:
    result = run(command, file_of(tmp_path / "t.mmr", short("good"), held))
    assert isinstance(result.exception, SystemExit | None)
    if command == "ls":
        assert "record 1: it holds a" in result.stderr


@pytest.mark.slow
def test_unusual_but_valid_contents_pass(tmp_path: Path) -> None:
    good = short("good")
    shared = ["x"] * 200
    first_turn(
        info={
            "reason": FinishReason.STOP,
            "shared": [shared] * 200,
            "frame": np.zeros((64, 64, 3), np.uint8),
            "empty": np.zeros((3, 0)),
            "when": np.datetime64("NaT"),
            "deep": nested(90),
        }
    )(good)
    second_node(token_ids=np.array([5], ">u8"), logprobs=np.zeros(1, ">f2"), extras={"x": np.zeros((1, 0))})(good)
    path = file_of(tmp_path / "t.mmr", good)
    assert run("ls", path).exit_code == 0
    assert run("export", path, "--jsonl", tmp_path / "o.jsonl").exit_code == 0
    if importlib.util.find_spec("pyarrow"):
        assert run("export", path, "--parquet", tmp_path / "o.parquet").exit_code == 0


def test_an_incomplete_record_is_reported(tmp_path: Path) -> None:
    path = file_of(tmp_path / "t.mmr", short("first"), short("second", 4))
    path.write_bytes(path.read_bytes()[:-64])
    listed = run("ls", path)
    assert (listed.exit_code, "first" in listed.stdout) == (1, True)
    assert "not listed: the last " in listed.stderr
    assert "an incomplete record" in listed.stderr
    exported = run("export", path, "--jsonl", tmp_path / "o.jsonl")
    assert (exported.exit_code, "not exported: the last " in exported.stderr) == (1, True)
    merged = run("merge", path, "--out", tmp_path / "all.mmr")
    assert (merged.exit_code, merged.stdout.startswith("1 record in")) == (1, True)
    assert "not merged: the last " in merged.stderr


@wire_type("test.StrangeRecord")
@dataclass
class Strange:
    name: str


def test_records_without_an_episode_are_reported(tmp_path: Path) -> None:
    result = run("ls", file_of(tmp_path / "t.mmr", [short("a"), Strange("x")], 5, []))
    assert result.exit_code == 1
    assert [line.split(":")[2] for line in result.stderr.splitlines()] == [" record 0", " record 1", " record 2"]
