"""`rollouts traj`: the episodes of a file listed, shown, exported, verified, merged and repaired."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from renderers import MediaSource, Message, PlaceholderRange
from rollouts import MediaReference, TokenNode, Trajectory, Turn, trajectory_from_steps
from rollouts.cli.main import app
from rollouts.cli.traj.plain import plain
from rollouts.engines.protocol import FinishReason, WeightSpan
from rollouts.trajectory.pixel_forms import AbsentSource, PackedEpisodes, pack_episodes
from rollouts.trajectory.provenance import Provenance
from transport import RecordReader, RecordWriter, read_records, wire_type


def png(level: int, size: tuple[int, int] = (9, 7)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (level, 0, 0)).save(file, "PNG")
    return file.getvalue()


def asked(parent: int, *ids: int, images: tuple[bytes, ...] = (), text: str = "") -> TokenNode:
    """A prompt node; images take its first tokens, one each."""
    media = []
    for at, data in enumerate(images):
        source = MediaSource.of(data)
        media.append(MediaReference("image", f"{source.digest}-fp", source, PlaceholderRange(at, 1)))
    message: Message = {"role": "user", "content": text}
    return TokenNode(
        parent,
        np.array(ids, np.int32),
        np.zeros(len(ids), bool),
        np.empty(0, np.float32),
        media=tuple(media),
        messages=(message,) if text else (),
    )


def said(parent: int, *ids: int, version: str = "0") -> TokenNode:
    count = len(ids)
    logprobs = -np.arange(1, count + 1, dtype=np.float32) / 10
    return TokenNode(parent, np.array(ids, np.int32), np.ones(count, bool), logprobs, (WeightSpan(version, 0, count),))


def answer(node: int, text: str, reward: float = 0.0, **info: Any) -> Turn:
    return Turn(node, FinishReason.STOP, {"role": "assistant", "content": text}, reward, info)


def forked(name: str = "forked") -> Trajectory:
    """Two branches that share a prompt of five tokens and a completion of two, and one image shown twice."""
    nodes = [
        asked(-1, 7, 7, 1, 2, 3, images=(png(1), png(2)), text="What is this?"),
        said(0, 10, 11),
        asked(1, 7, 20, images=(png(1),)),
        said(2, 12, 13, 14, version="1"),
        asked(1, 21, 22, 22, 22),
        said(4, 15),
    ]
    turns = [answer(1, "A door."), answer(3, "Open.", 0.5), answer(5, "Shut.", 0.25, steps=3)]
    return Trajectory(name, 11, "group-a", nodes, turns, done=True, forks=1)


def short(name: str, level: int = 3) -> Trajectory:
    return Trajectory(
        name, nodes=[asked(-1, 7, images=(png(level),)), said(0, 5)], turns=[answer(1, "x", -1.0)], truncated=True
    )


def file_of(path: Path, *records: Any) -> Path:
    with RecordWriter(path) as out:
        for record in records:
            out.append(record)
    return path


def run(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(app, ["traj", *map(str, arguments)], env={"COLUMNS": "60", **environment})


def lines(result: Result) -> list[str]:
    """With single spaces."""
    assert result.exit_code == 0, result.output
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def one_error(result: Result) -> str:
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def damage(path: Path, needle: bytes) -> None:
    """Flip a bit inside the one place where the file holds these bytes."""
    data = bytearray(path.read_bytes())
    assert data.count(needle) == 1
    data[data.index(needle) + len(needle) // 2] ^= 1
    path.write_bytes(data)


# ls and show


def test_each_episode_is_one_line_and_shared_tokens_count_once(tmp_path: Path) -> None:
    path = file_of(tmp_path / "t.mmr", forked(), short("second"))
    header, first, second, footer = lines(run("ls", path))
    assert header == "# episode group turns branches tokens sampled images reward done"
    assert first == "0 forked group-a 3 2 17 6 2 0.75 done"
    assert second == "1 second - 1 1 2 1 1 -1 truncated"
    assert footer.startswith("2 episodes")


def test_groups_in_one_record_and_packed_episodes_are_listed_one_by_one(tmp_path: Path) -> None:
    path = file_of(tmp_path / "t.mmr", [short("a"), short("b")], pack_episodes([short("c")], pixels="none"))
    described = json.loads(run("ls", path, "--json").stdout)
    assert [one["episode"] for one in described] == ["a", "b", "c"]
    assert [one["number"] for one in described] == [0, 1, 2]


def test_a_tree_is_shown_with_roles_words_media_weights_and_rewards(tmp_path: Path) -> None:
    path = file_of(tmp_path / "t.mmr", short("other"), forked())
    head, *tree = lines(run("show", path, "forked"))
    digests = [hashlib.sha256(png(level)).hexdigest()[:16] for level in (1, 2)]
    assert head == (
        "episode forked of group group-a, seed 11: 3 turns, 2 branches, 17 tokens, 6 sampled, 2 images, reward 0.75, "
        "done"
    )
    assert tree == [
        f"0 user 5 tokens image {digests[0]} at 0+1 image {digests[1]} at 1+1 What is this?",
        "1 assistant 2 sampled weights 0 stop, reward 0 A door.",
        f"├─ 2 prompt 2 tokens image {digests[0]} at 0+1",
        "│ 3 assistant 3 sampled weights 1 stop, reward 0.5 Open.",
        "└─ 4 prompt 4 tokens",
        "5 assistant 1 sampled weights 0 stop, reward 0.25 Shut.",
    ]


def test_trees_with_a_root_each_do_not_look_like_one(tmp_path: Path) -> None:
    nodes = [asked(-1, 1, text="a"), said(0, 2), asked(-1, 3, text="b"), said(2, 4), asked(3, 5, text="c")]
    path = file_of(tmp_path / "t.mmr", Trajectory("two", nodes=nodes))
    shown = run("show", path, "two").stdout.splitlines()[1:]
    assert [line.split("   ")[0] for line in shown] == ["├─ 0 user", "│  1 prompt", "└─ 2 user", "", ""]
    assert [line[:11].rstrip() for line in shown[3:]] == ["   3 prompt", "   4 user"]


def test_ids_are_shown_with_runs_of_one_id_counted(tmp_path: Path) -> None:
    path = file_of(tmp_path / "t.mmr", forked())
    shown = lines(run("show", path, "--ids"))
    assert shown[2] == "7 x2 1 2 3"
    assert "21 22 x3" in shown


def test_an_episode_is_found_by_number_or_id_and_a_missing_one_is_one_line(tmp_path: Path) -> None:
    path = file_of(tmp_path / "t.mmr", short("a"), short("1"), short("b"))
    assert "episode 1 of" in lines(run("show", path, "1"))[0]
    assert "episode b of" in lines(run("show", path, "2"))[0]
    assert "no episode 'c'" in one_error(run("show", path, "c"))


def test_an_episode_of_two_thousand_forks_is_shown_without_recursion(tmp_path: Path) -> None:
    nodes = [asked(-1, 1)]
    for depth in range(0, 4000, 2):
        nodes += [asked(depth, 2), asked(depth, 3)]
        nodes[-1], nodes[-2] = nodes[-2], nodes[-1]
    path = file_of(tmp_path / "t.mmr", Trajectory("deep", nodes=nodes))
    assert len(lines(run("show", path))) == len(nodes) + 1


HOSTILE = "\n\x1b[31mred\x1b]0;title\x07\r\u202e[bold]"


def hostile() -> Trajectory:
    """Escape sequences and markup wherever text can stand."""
    trajectory = short(HOSTILE)
    trajectory.group_id = HOSTILE
    trajectory.error = HOSTILE
    message: Any = {"role": HOSTILE, "content": [HOSTILE, {"text": 3}, 4], "tool_calls": [{"function": HOSTILE}, 5]}
    trajectory.nodes = [
        replace(trajectory.nodes[0], messages=(message,)),
        said(0, 5, version=HOSTILE),
    ]
    trajectory.turns = [answer(1, HOSTILE)]
    return trajectory


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_nothing_in_a_file_reaches_the_terminal_raw(tmp_path: Path, command: str) -> None:
    result = run(command, file_of(tmp_path / "t.mmr", hostile()), FORCE_COLOR="1", TERM="xterm-256color", COLUMNS="300")
    for control in ("\x1b]", "\x1b[31m", "\x07", "\r", "\u202e"):
        assert control not in result.output
    if command != "verify":
        assert "[bold]" in result.output
    if command == "show":
        assert len(result.stdout.splitlines()) == 4, "head, error and two nodes"


def test_names_of_unsound_episodes_reach_the_terminal_written_out(tmp_path: Path) -> None:
    bad = hostile()
    bad.nodes = [altered(bad.nodes[0], parent=5)]
    result = run("verify", file_of(tmp_path / "t.mmr", bad))
    assert result.exit_code == 1
    assert "\x1b" not in result.output


# export


def test_lines_of_json_hold_all_of_an_episode_and_each_image_is_one_file(tmp_path: Path) -> None:
    path = file_of(tmp_path / "t.mmr", forked(), short("second", level=1))
    out = tmp_path / "out" / "episodes.jsonl"
    (words,) = lines(run("export", path, "--jsonl", out))
    assert words.startswith("2 episodes")
    first, second = map(json.loads, out.read_text().splitlines())
    original = forked()
    assert (first["episode_id"], first["group_id"], first["seed"]) == ("forked", "group-a", 11)
    assert (first["reward"], first["done"], first["truncated"]) == (0.75, True, False)
    for node, entry in zip(original.nodes, first["nodes"], strict=True):
        assert entry["parent"] == node.parent
        assert entry["token_ids"] == node.token_ids.tolist()
        assert entry["sampled"] == [int(flag) for flag in node.sampled]
        assert np.array_equal(np.array(entry["logprobs"], np.float32), node.logprobs)
        assert entry["weight_spans"] == [[span.version, span.start, span.end] for span in node.weight_spans]
        for reference, medium in zip(node.media, entry["media"], strict=True):
            assert medium["digest"] == reference.source.digest
            assert (medium["offset"], medium["length"]) == (reference.placeholder.offset, reference.placeholder.length)
            assert (out.parent / medium["file"]).read_bytes() == reference.source.data
    assert first["turns"][2] == {
        "node": 5,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": "Shut."},
        "reward": 0.25,
        "info": {"steps": 3},
        "seconds": 0.0,
    }
    assert second["truncated"]
    assert len(list((out.parent / "episodes-media").iterdir())) == 2, "each distinct image once"
    assert sorted(entry.name for entry in out.parent.iterdir()) == ["episodes-media", "episodes.jsonl"]


def test_parquet_has_one_row_a_node(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    first = forked()
    first.nodes = list(first.nodes)
    extra = np.arange(4, dtype=np.uint8).reshape(2, 2)
    first.nodes[1] = replace(first.nodes[1], extras={"routed_experts": extra}, content=np.array([True, False]))
    path = file_of(tmp_path / "t.mmr", first, short("second"))
    out = tmp_path / "nodes.parquet"
    lines(run("export", path, "--parquet", out))
    rows = parquet.read_table(out).to_pylist()
    assert [(row["episode_id"], row["node"], row["parent"]) for row in rows] == [
        *(("forked", index, node.parent) for index, node in enumerate(first.nodes)),
        ("second", 0, -1),
        ("second", 1, 0),
    ]
    for row, node in zip(rows, first.nodes, strict=False):
        assert row["token_ids"] == node.token_ids.tolist()
        assert row["sampled"] == node.sampled.tolist()
        assert np.array_equal(np.array(row["logprobs"], np.float32), node.logprobs)
        assert [medium["digest"] for medium in row["media"]] == [reference.source.digest for reference in node.media]
    assert rows[0]["turn"] is None
    assert json.loads(rows[0]["messages"]) == [{"role": "user", "content": "What is this?"}]
    assert rows[1]["content"] == [True, False]
    (held,) = rows[1]["extras"]
    read = np.frombuffer(held["data"], held["dtype"]).reshape(held["shape"])
    assert np.array_equal(read, extra)
    assert (rows[3]["turn"], rows[3]["reward"], rows[3]["episode_reward"]) == (1, 0.5, 0.75)
    assert json.loads(rows[5]["message"])["content"] == "Shut."
    assert (tmp_path / rows[0]["media"][0]["file"]).read_bytes() == png(1)


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    error = one_error(run("export", file_of(tmp_path / "t.mmr", short("a")), "--parquet", tmp_path / "o.parquet"))
    assert "mmrollouts[parquet]" in error
    assert os.listdir(tmp_path) == ["t.mmr"]


def test_an_export_replaces_nothing(tmp_path: Path) -> None:
    path = file_of(tmp_path / "t.mmr", short("a"))
    (tmp_path / "o.jsonl").write_text("precious")
    assert "was not changed" in one_error(run("export", path, "--jsonl", tmp_path / "o.jsonl"))
    assert (tmp_path / "o.jsonl").read_text() == "precious"


def test_what_cannot_be_exported_is_named_and_the_rest_is(tmp_path: Path) -> None:
    unsound = short("unsound")
    unsound.nodes = [altered(unsound.nodes[0], parent=0), unsound.nodes[1]]
    path = file_of(tmp_path / "t.mmr", short("a"), unsound, {"no": "episode"}, short("b", 9))
    damage(path, png(9))
    result = run("export", path, "--jsonl", tmp_path / "o.jsonl")
    assert result.exit_code == 1
    troubles = result.stderr.splitlines()
    assert len(troubles) == 3
    assert all(f"record {number}" in words for number, words in zip((1, 2, 3), troubles, strict=True))
    assert [json.loads(line)["episode_id"] for line in (tmp_path / "o.jsonl").read_text().splitlines()] == ["a"]


def test_an_episode_whose_images_did_not_come_is_exported_with_their_names(tmp_path: Path) -> None:
    path = file_of(tmp_path / "t.mmr", pack_episodes([short("a")], pixels="none"))
    result = run("export", path, "--jsonl", tmp_path / "o.jsonl")
    assert result.exit_code == 1
    (medium,) = json.loads((tmp_path / "o.jsonl").read_text())["nodes"][0]["media"]
    assert medium["file"] is None
    assert medium["digest"] in result.stderr


def test_export_without_a_place_says_what_to_pass(tmp_path: Path) -> None:
    assert "--jsonl" in one_error(run("export", file_of(tmp_path / "t.mmr", short("a"))))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(-0.1), -0.1),
        (float("nan"), None),
        (np.array([[1, 2]], np.int16), {"dtype": "int16", "shape": [1, 2], "data": [1, 2]}),
        (np.bool_(True), True),
        ({1: (b"ab", FinishReason.STOP)}, {"1": [{"base64": "YWI="}, "stop"]}),
        (WeightSpan("v", 0, 1), {"version": "v", "start": 0, "end": 1}),
        (MediaSource.of(b"x"), {"digest": MediaSource.of(b"x").digest}),
        (np.datetime64("2024-01-01"), "2024-01-01"),
        (np.array(3.5), {"dtype": "float64", "shape": [], "data": [3.5]}),
        ({1: "a", "1": "b"}, [[1, "a"], ["1", "b"]]),
    ],
)
def test_anything_an_episode_may_hold_becomes_plain_json(value: object, expected: object) -> None:
    assert plain(value) == expected
    json.dumps(plain(value), allow_nan=False)


# verify


def test_a_sound_file_passes(tmp_path: Path) -> None:
    path = file_of(tmp_path / "t.mmr", forked(), [short("a"), short("b", 1)])
    (words,) = lines(run("verify", path))
    assert words.startswith("2 records, 3 episodes, 3 media")


def altered(value: Any, **changes: Any) -> Any:
    """A copy with other values, which its constructor has not seen."""
    other = copy.copy(value)
    for name, changed in changes.items():
        object.__setattr__(other, name, changed)
    return other


def first_node(**changes: Any) -> Callable[[Trajectory], None]:
    def plant(trajectory: Trajectory) -> None:
        trajectory.nodes = [altered(trajectory.nodes[0], **changes), *trajectory.nodes[1:]]

    return plant


def second_node(**changes: Any) -> Callable[[Trajectory], None]:
    def plant(trajectory: Trajectory) -> None:
        trajectory.nodes = [trajectory.nodes[0], altered(trajectory.nodes[1], **changes)]

    return plant


def first_turn(**changes: Any) -> Callable[[Trajectory], None]:
    def plant(trajectory: Trajectory) -> None:
        trajectory.turns = [altered(trajectory.turns[0], **changes)]

    return plant


def whole(**changes: Any) -> Callable[[Trajectory], None]:
    def plant(trajectory: Trajectory) -> None:
        for name, value in changes.items():
            setattr(trajectory, name, value)

    return plant


def moved(offset: int, length: int, *runs: tuple[int, int]) -> tuple[MediaReference, ...]:
    (reference,) = short("a").nodes[0].media
    return (replace(reference, placeholder=PlaceholderRange(offset, length, runs or None)),)


def shown(**changes: Any) -> tuple[MediaReference, ...]:
    (reference,) = short("a").nodes[0].media
    return (replace(reference, **changes),)


def nested(depth: int) -> dict[str, Any]:
    inside: Any = "x"
    for _ in range(depth):
        inside = {"a": inside}
    return {"deep": inside}


def endless() -> tuple[Any, ...]:
    """Sixty tuples on the wire; 2**60 texts for whoever follows every way."""
    inside: tuple[Any, ...] = ("x",)
    for _ in range(60):
        inside = (inside, inside)
    return inside


PLANTED: dict[str, Callable[[Trajectory], None]] = {
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
    "an image whose digest is a list": first_node(media=shown(source=AbsentSource([1]))),  # type: ignore[arg-type]
    "feature tokens that are a number": first_node(media=shown(placeholder=PlaceholderRange(0, 1, 5))),  # type: ignore[arg-type]
    "an image past its node": first_node(media=moved(0, 2)),
    "an image before its node": first_node(media=moved(-1, 1)),
    "two images in one place": first_node(media=moved(0, 1) + moved(0, 1)),
    "feature tokens past the image": first_node(media=moved(0, 1, (0, 2))),
    "media that are numbers": first_node(media=(3,)),
    "a content mask of another length": first_node(content=np.ones(4, bool)),
    "an extra of another length": first_node(extras={"x": np.zeros(4)}),
    "an extra whose name is a number": second_node(extras={5: np.zeros(1)}),
    "an extra of endless rows of nothing": second_node(extras={"x": np.zeros((1, 2**40, 0))}),
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
    "endless rows of nothing": first_turn(info={"x": np.zeros((2**40, 0))}),
    "words a thousand deep": first_turn(info=nested(900)),
    "metrics a thousand deep": whole(metrics=nested(900)),
    **{
        f"a value without end as {place}": plant
        for place, plant in {
            "info": first_turn(info={"x": endless()}),
            "text": first_turn(message={"role": "assistant", "content": [{"type": "text", "text": endless()}]}),
            "a role": first_turn(message={"role": endless()}),
            "a prompt's message": first_node(messages=({"role": "user", "content": endless()},)),
            "the name of a call": first_turn(message={"tool_calls": [{"function": {"name": endless()}}]}),
            "a finish reason": first_turn(finish_reason=endless()),
            "a reward": first_turn(reward=endless()),
            "a node": first_turn(node=endless()),
            "a parent": first_node(parent=endless()),
            "a span": second_node(weight_spans=(WeightSpan("0", endless(), 1),)),  # type: ignore[arg-type]
            "a version": second_node(weight_spans=(WeightSpan(endless(), 0, 1),)),  # type: ignore[arg-type]
            "an id": whole(episode_id=endless()),
            "a metric": whole(metrics={"x": endless()}),
            "provenance": whole(provenance=Provenance(model=endless())),  # type: ignore[arg-type]
        }.items()
    },
}


@pytest.mark.parametrize("fault", PLANTED)
def test_every_planted_fault_is_found_and_named_with_its_record(tmp_path: Path, fault: str) -> None:
    bad = short("bad")
    PLANTED[fault](bad)
    path = file_of(tmp_path / "t.mmr", short("good"), bad)
    result = run("verify", path)
    assert result.exit_code == 1, result.output
    first, *_, last = result.stdout.splitlines()
    assert first.startswith("record 1")
    assert last.startswith("1 failed") or last.startswith("2 failed")
    listed = run("ls", path)
    assert listed.exit_code == 1
    assert "good" in listed.stdout
    assert "not listed: record 1" in listed.stderr
    assert "record 1" in one_error(run("show", path, "1"))
    exported = run("export", path, "--jsonl", tmp_path / "o.jsonl")
    assert (exported.exit_code, exported.stderr.count("not exported: record 1")) == (1, 1)


def test_an_image_under_the_name_of_another_image_is_found(tmp_path: Path) -> None:
    bad = short("bad")
    first_node(media=shown(mm_hash=f"{'0' * 64}-fp"))(bad)
    result = run("verify", file_of(tmp_path / "t.mmr", bad))
    assert result.exit_code == 1
    assert result.stdout.startswith("record 0, episode 'bad': image '0000")


def test_arrays_of_step_lists_may_have_any_name(tmp_path: Path) -> None:
    tokens = {
        "prompt_ids": [1, 7],
        "completion_ids": [2],
        "completion_logprobs": [-1.0],
        "multi_modal_data": {
            "mm_hashes": {"image": ["digest-of-pixels"]},
            "mm_placeholders": {"image": [{"offset": 1, "length": 1}]},
            "mm_items": {"image": [{"pixel_values": np.zeros((4, 3), np.float32)}]},
        },
    }
    trajectory = trajectory_from_steps([{"tokens": tokens}], episode_id="steps")
    assert run("verify", file_of(tmp_path / "t.mmr", trajectory)).exit_code == 0


def test_the_first_wrong_node_of_an_episode_is_named(tmp_path: Path) -> None:
    bad = short("bad")
    second_node(logprobs=np.zeros(2, np.float32))(bad)
    result = run("verify", file_of(tmp_path / "t.mmr", bad))
    assert "record 0: rollouts.TokenNode 1 of 2 refused the values it came with" in result.stdout
    assert "1 tokens and 2 log-probabilities" in result.stdout


@pytest.mark.parametrize("held", [endless(), PackedEpisodes("source", endless()), PackedEpisodes("source", 5)])  # type: ignore[arg-type]
@pytest.mark.parametrize("command", ["ls", "verify", "show"])
def test_a_record_without_end_is_named_at_once(tmp_path: Path, held: Any, command: str) -> None:
    result = run(command, file_of(tmp_path / "t.mmr", short("good"), held))
    assert isinstance(result.exception, SystemExit | None)
    if command == "verify":
        assert "record 1: it holds a" in result.stdout


def test_what_an_episode_may_well_hold_is_no_fault(tmp_path: Path) -> None:
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
    assert run("verify", path).exit_code == 0
    assert run("export", path, "--jsonl", tmp_path / "o.jsonl").exit_code == 0
    if importlib.util.find_spec("pyarrow"):
        assert run("export", path, "--parquet", tmp_path / "o.parquet").exit_code == 0


def test_a_changed_bit_in_a_record_or_an_image_is_found(tmp_path: Path) -> None:
    path = file_of(tmp_path / "t.mmr", short("first", 1), short("second", 2), short("third", 4), short("last"))
    damage(path, png(2))
    damage(path, b"third")
    result = run("verify", path)
    assert result.exit_code == 1
    findings = result.stdout.splitlines()
    assert findings[0].startswith("record 1: media sha256 ")
    assert findings[1].startswith("record 2: ")
    assert findings[2].startswith("2 failed")


def test_a_record_that_was_not_finished_is_found(tmp_path: Path) -> None:
    path = file_of(tmp_path / "t.mmr", short("first"), short("second", 4))
    path.write_bytes(path.read_bytes()[:-64])
    result = run("verify", path)
    assert result.exit_code == 1
    assert "an incomplete record" in result.stdout


@wire_type("test.StrangeRecord")
@dataclass
class Strange:
    name: str


def test_records_that_hold_no_episode_are_named(tmp_path: Path) -> None:
    result = run("verify", file_of(tmp_path / "t.mmr", [short("a"), Strange("x")], 5, []))
    assert result.exit_code == 1
    assert [line.split(":")[0] for line in result.stdout.splitlines()[:3]] == ["record 0", "record 1", "record 2"]


# merge and repair


def test_merged_files_hold_all_episodes_in_order_and_each_image_once(tmp_path: Path) -> None:
    one = file_of(tmp_path / "1.mmr", short("a", 1), short("b", 2))
    other = file_of(tmp_path / "2.mmr", short("c", 1))
    (words,) = lines(run("merge", one, other, "--out", tmp_path / "all.mmr"))
    assert words.startswith("3 records")
    assert [episode.episode_id for episode in read_records(tmp_path / "all.mmr")] == ["a", "b", "c"]
    assert (tmp_path / "all.mmr").read_bytes().count(png(1)) == 1


def test_merging_onto_a_file_that_is_there_replaces_nothing(tmp_path: Path) -> None:
    one = file_of(tmp_path / "1.mmr", short("a", 1))
    other = file_of(tmp_path / "2.mmr", short("c", 2))
    before = other.read_bytes()
    one_error(run("merge", one, "--out", other))
    assert other.read_bytes() == before


def test_a_repaired_file_holds_what_is_whole_and_the_damaged_one_is_left_alone(tmp_path: Path) -> None:
    path = file_of(tmp_path / "t.mmr", short("a", 1), short("b", 2), short("c", 4))
    damage(path, png(2))
    before = path.read_bytes()
    first, last = lines(run("repair", path, "--out", tmp_path / "good.mmr"))
    assert first.startswith("record 1: ")
    assert last.startswith("2 records")
    with RecordReader(tmp_path / "good.mmr") as reader:
        assert [episode.episode_id for episode in reader] == ["a", "c"]
    assert path.read_bytes() == before
    assert run("verify", tmp_path / "good.mmr").exit_code == 0
    assert sorted(os.listdir(tmp_path)) == ["good.mmr", "t.mmr"]


def test_a_repair_replaces_nothing(tmp_path: Path) -> None:
    path = file_of(tmp_path / "t.mmr", short("a"))
    other = file_of(tmp_path / "o.mmr", short("b"))
    before = other.read_bytes()
    assert "was not changed" in one_error(run("repair", path, "--out", other))
    assert other.read_bytes() == before


# Errors


@pytest.mark.parametrize("command", ["ls", "show", "verify", "export", "merge", "repair"])
@pytest.mark.parametrize("what", ["missing", "a directory", "another file"])
def test_what_is_no_trajectory_file_is_one_line(tmp_path: Path, command: str, what: str) -> None:
    path = tmp_path / "x\x1b[31m.mmr"
    if what == "a directory":
        path.mkdir()
    elif what == "another file":
        path.write_bytes(b"hello " * 100)
    options = {
        "export": ("--jsonl", tmp_path / "o"),
        "merge": ("--out", tmp_path / "o"),
        "repair": ("--out", tmp_path / "o"),
    }
    result = run(command, path, *options.get(command, ()))
    one_error(result)
    assert "\x1b" not in result.output
    assert not (tmp_path / "o").exists()


def test_an_empty_file_holds_no_episodes(tmp_path: Path) -> None:
    path = file_of(tmp_path / "t.mmr")
    assert lines(run("ls", path)) == [f"{path} holds no episodes"]
    assert run("verify", path).exit_code == 0
