"""Invalid and damaged records: `rollouts traj ls` and the other commands name them and read the others."""

import copy
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trajectory_files import file_of, one_error, run, short

from renderers import PlaceholderRange
from rollouts import MediaReference, Trajectory
from rollouts.engines.protocol import FinishReason, WeightSpan
from rollouts.trajectory.packed_episodes import AbsentSource, PackedEpisodes
from rollouts.trajectory.provenance import Provenance
from transport import wire_type


def without_validation(value: Any, **changes: Any) -> Any:
    """A copy with other values, which its constructor has not seen."""
    other = copy.copy(value)
    for name, changed in changes.items():
        object.__setattr__(other, name, changed)
    return other


def first_node(**changes: Any) -> Callable[[Trajectory], None]:
    def plant(trajectory: Trajectory) -> None:
        trajectory.nodes = [without_validation(trajectory.nodes[0], **changes), *trajectory.nodes[1:]]

    return plant


def second_node(**changes: Any) -> Callable[[Trajectory], None]:
    def plant(trajectory: Trajectory) -> None:
        trajectory.nodes = [trajectory.nodes[0], without_validation(trajectory.nodes[1], **changes)]

    return plant


def first_turn(**changes: Any) -> Callable[[Trajectory], None]:
    def plant(trajectory: Trajectory) -> None:
        trajectory.turns = [without_validation(trajectory.turns[0], **changes)]

    return plant


def whole(**changes: Any) -> Callable[[Trajectory], None]:
    def plant(trajectory: Trajectory) -> None:
        for name, value in changes.items():
            setattr(trajectory, name, value)

    return plant


def media_at(offset: int, length: int, *runs: tuple[int, int]) -> tuple[MediaReference, ...]:
    (reference,) = short("a").nodes[0].media
    return (replace(reference, placeholder=PlaceholderRange(offset, length, runs or None)),)


def changed_media(**changes: Any) -> tuple[MediaReference, ...]:
    (reference,) = short("a").nodes[0].media
    return (replace(reference, **changes),)


def nested(depth: int) -> dict[str, Any]:
    inside: Any = "x"
    for _ in range(depth):
        inside = {"a": inside}
    return {"deep": inside}


def exponential_tuple() -> tuple[Any, ...]:
    """Sixty tuples on the wire; expanded, 2**60 strings."""
    inside: tuple[Any, ...] = ("x",)
    for _ in range(60):
        inside = (inside, inside)
    return inside


PLANTED_VIOLATIONS: dict[str, Callable[[Trajectory], None]] = {
    "a parent behind its child": first_node(parent=1),
    "a parent that is itself": first_node(parent=0),
    "a parent that is no number": first_node(parent="0"),
    "more flags than tokens": second_node(sampled=np.ones(2, bool), logprobs=np.zeros(2, np.float32)),
    "a log-prob too many": second_node(logprobs=np.zeros(2, np.float32)),
    "a log-prob too few": second_node(logprobs=np.zeros(0, np.float32)),
    "a log-prob that is no number": second_node(logprobs=np.full(1, np.nan, np.float32)),
    "ids that are floats": second_node(token_ids=np.zeros(1)),
    "a negative id": second_node(token_ids=np.array([-5], np.int32)),
    "ids beyond int32": second_node(token_ids=np.array([2**31])),
    "ids in a list": second_node(token_ids=[1]),
    "a span past the sampled tokens": second_node(weight_spans=(WeightSpan("0", 0, 2),)),
    "spans that overlap": second_node(weight_spans=(WeightSpan("0", 0, 1), WeightSpan("1", 0, 1))),
    "a weight version that is no text": second_node(weight_spans=(WeightSpan(b"0", 0, 1),)),  # type: ignore[arg-type]
    "an image whose digest is a list": first_node(media=changed_media(source=AbsentSource([1]))),  # type: ignore[arg-type]
    "feature tokens that are a number": first_node(media=changed_media(placeholder=PlaceholderRange(0, 1, 5))),  # type: ignore[arg-type]
    "an image past its node": first_node(media=media_at(0, 2)),
    "an image before its node": first_node(media=media_at(-1, 1)),
    "two images in one place": first_node(media=media_at(0, 1) + media_at(0, 1)),
    "feature tokens past the image": first_node(media=media_at(0, 1, (0, 2))),
    "media that are numbers": first_node(media=(3,)),
    "a content mask of another length": first_node(content=np.ones(4, bool)),
    "an extra of another length": first_node(extras={"x": np.zeros(4)}),
    "an extra whose name is a number": second_node(extras={5: np.zeros(1)}),
    "an extra of 2**40 rows of nothing": second_node(extras={"x": np.zeros((1, 2**40, 0))}),
    "a turn without its node": first_turn(node=2),
    "a reward that is no number": first_turn(reward=float("nan")),
    "a reward that no float holds": first_turn(reward=10**400),
    "a reward that is a flag": first_turn(reward=True),
    "seconds that no float holds": first_turn(seconds=10**400),
    "a message that is text": first_turn(message="hello"),
    "nodes that are text": whole(nodes="nodes"),
    "a node that is a number": whole(nodes=[3]),
    "an id that is a number": whole(episode_id=3),
    "a beginning that is a flag": whole(started_at=True),
    "a duration that is no number": whole(seconds=float("nan")),
    "a seed beyond 64 bits": whole(seed=2**63),
    "a seed that is a flag": whole(seed=True),
    "an integer that cannot be written out": first_turn(info={"x": 10**6000}),
    "2**40 rows of nothing": first_turn(info={"x": np.zeros((2**40, 0))}),
    "words a thousand deep": first_turn(info=nested(900)),
    "metrics a thousand deep": whole(metrics=nested(900)),
    **{
        f"a value without end as {place}": plant
        for place, plant in {
            "info": first_turn(info={"x": exponential_tuple()}),
            "text": first_turn(
                message={"role": "assistant", "content": [{"type": "text", "text": exponential_tuple()}]}
            ),
            "a role": first_turn(message={"role": exponential_tuple()}),
            "a prompt's message": first_node(messages=({"role": "user", "content": exponential_tuple()},)),
            "the name of a call": first_turn(message={"tool_calls": [{"function": {"name": exponential_tuple()}}]}),
            "a finish reason": first_turn(finish_reason=exponential_tuple()),
            "a reward": first_turn(reward=exponential_tuple()),
            "a node": first_turn(node=exponential_tuple()),
            "a parent": first_node(parent=exponential_tuple()),
            "a span": second_node(weight_spans=(WeightSpan("0", exponential_tuple(), 1),)),  # type: ignore[arg-type]
            "a version": second_node(weight_spans=(WeightSpan(exponential_tuple(), 0, 1),)),  # type: ignore[arg-type]
            "an id": whole(episode_id=exponential_tuple()),
            "a metric": whole(metrics={"x": exponential_tuple()}),
            "provenance": whole(provenance=Provenance(model=exponential_tuple())),  # type: ignore[arg-type]
        }.items()
    },
}


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
