"""Trajectory files for the tests of `rollouts traj`, and the command run on them."""

from pathlib import Path
from typing import Any

import images
import numpy as np
from typer.testing import CliRunner, Result

from renderers import MediaSource, Message, PlaceholderRange
from rollouts import MediaReference, TokenNode, Trajectory, Turn
from rollouts.cli.main import app
from rollouts.engines.protocol import FinishReason, WeightSpan
from transport import RecordWriter


def png(level: int, size: tuple[int, int] = (9, 7)) -> bytes:
    return images.png((level, 0, 0), size)


def prompt_node(parent: int, *ids: int, images: tuple[bytes, ...] = (), text: str = "") -> TokenNode:
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


def completion_node(parent: int, *ids: int, version: str = "0") -> TokenNode:
    count = len(ids)
    logprobs = -np.arange(1, count + 1, dtype=np.float32) / 10
    return TokenNode(parent, np.array(ids, np.int32), np.ones(count, bool), logprobs, (WeightSpan(version, 0, count),))


def assistant_turn(node: int, text: str, reward: float = 0.0, **info: Any) -> Turn:
    return Turn(node, FinishReason.STOP, {"role": "assistant", "content": text}, reward, info)


def forked(name: str = "forked") -> Trajectory:
    """Two branches that share a prompt of five tokens and a completion of two, and one image shown twice."""
    nodes = [
        prompt_node(-1, 7, 7, 1, 2, 3, images=(png(1), png(2)), text="What is this?"),
        completion_node(0, 10, 11),
        prompt_node(1, 7, 20, images=(png(1),)),
        completion_node(2, 12, 13, 14, version="1"),
        prompt_node(1, 21, 22, 22, 22),
        completion_node(4, 15),
    ]
    turns = [assistant_turn(1, "A door."), assistant_turn(3, "Open.", 0.5), assistant_turn(5, "Shut.", 0.25, steps=3)]
    return Trajectory(name, 11, "group-a", nodes, turns, done=True, forks=1)


def short(name: str, level: int = 3) -> Trajectory:
    return Trajectory(
        name,
        nodes=[prompt_node(-1, 7, images=(png(level),)), completion_node(0, 5)],
        turns=[assistant_turn(1, "x", -1.0)],
        truncated=True,
    )


def file_of(path: Path, *records: Any) -> Path:
    with RecordWriter(path) as out:
        for record in records:
            out.append(record)
    return path


def run(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(app, ["traj", *map(str, arguments)], env={"COLUMNS": "60", **environment})


def lines(result: Result) -> list[str]:
    """The printed lines, each run of spaces as one space."""
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
