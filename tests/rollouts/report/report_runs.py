"""Directories of runs for the tests of reports."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from images import png

from renderers import MediaSource, PlaceholderRange
from rollouts import FinishReason, MediaReference, TokenNode, Trajectory, Turn, WeightSpan
from rollouts.observability import JsonLinesSink, TrainingLog
from rollouts.training.mismatch import ComparedTokens, MismatchReport
from transport import RecordWriter


class Hostile(NamedTuple):
    text: str
    invisible: str


INVISIBLE = "\u202e\u2066\u200b\x00\x1b\x7f\u3164\ufeff"
HOSTILE = Hostile(
    '</title></style><script>window.attacked = 1</script><img src=x onerror="window.attacked = 2">'
    '<a href="javascript:window.attacked=3">x</a><iframe src="https://attacker.example/"></iframe>' + INVISIBLE,
    INVISIBLE,
)


def episode(
    number: int, *, reward: float = 0.0, version: str = "0", error: str = "", text: str = "Look."
) -> Trajectory:
    """An image and a question of three tokens, and an answer of two."""
    source = MediaSource.of(png((number * 37 % 256, 90, 200), (16, 12)))
    prompt = TokenNode(
        -1,
        np.arange(3, dtype=np.int32),
        np.zeros(3, bool),
        np.empty(0, np.float32),
        media=(MediaReference("image", f"{source.digest}-fp", source, PlaceholderRange(0, 1)),),
        messages=({"role": "user", "content": [{"type": "image", "image": source}, {"type": "text", "text": text}]},),
    )
    sampled = TokenNode(
        0,
        np.arange(2, dtype=np.int32),
        np.ones(2, bool),
        np.array([-0.5, -1.0], np.float32),
        (WeightSpan(version, 0, 2),),
    )
    turn = Turn(1, FinishReason.STOP, {"role": "assistant", "content": text}, reward)
    return Trajectory(
        f"episode-{number}",
        group_id=f"group-{number // 4}",
        nodes=[prompt, sampled],
        turns=[turn],
        done=not error,
        error=error,
        started_at=1e9 + number,
        seconds=1.5,
        metrics={"right": reward},
    )


def compared(numbers: range, versions: tuple[str, str]) -> ComparedTokens:
    """The answers of episodes: the first half sampled by the older of two versions."""
    count = len(numbers)
    sampler = np.tile(np.array([-0.5, -1.0], np.float32), count)
    older = np.repeat(np.arange(count) < count // 2, 2) & (versions[0] != versions[1])
    return ComparedTokens(
        sampler=sampler,
        trainer=sampler - np.where(older, 1e-3, 1e-6).astype(np.float32),
        sample=np.repeat(np.arange(count, dtype=np.int32), 2),
        position=np.tile(np.array([3, 4], np.int32), count),
        turn=np.zeros(2 * count, np.int32),
        item=np.zeros(2 * count, np.int32),
        version=(~older).astype(np.int32),
        names=tuple(f"episode-{number}/1" for number in numbers),
        media_hashes=("hash",),
        media_modalities=("image",),
        versions=versions,
    )


def trained_run(directory: Path, episodes: int = 24) -> Path:
    """Groups of 4 episodes, three training steps, and readings of a runner."""
    directory.mkdir(parents=True)
    with RecordWriter(directory / "trajectories.mmr") as writer:
        for first in range(0, episodes, 4):
            writer.append([episode(first + index, reward=float(index % 2)) for index in range(4)])
    with TrainingLog(directory) as log:
        share = episodes // 3
        for step in range(3):
            numbers = range(step * share, (step + 1) * share)
            versions = (str(max(step - 1, 0)), str(step))
            report = MismatchReport(compared(numbers, versions), trainer_version=str(step))
            log.write(step + 1, {"loss": 0.5 / (step + 1), "accuracy": step / 3}, mismatch=report)
    sink = JsonLinesSink(directory / "runner_metrics.jsonl")
    for second in range(0, 30, 10):
        sink.write("runner", second, {"staleness_mean": second / 20, "staleness_max": 2, "groups_queued": second})
    sink.close()
    (directory / "summary.json").write_text(json.dumps({"complete": True}))
    return directory


def group_line(parts: dict[str, list[float]], *rewards: float) -> dict[str, Any]:
    """A line of metrics.jsonl of a group whose episodes have these rewards of their environment and no others."""
    counts = dict.fromkeys(("done", "truncated", "failed", "turns", "tokens", "sampled_tokens", "images"), 0)
    zeros = [0.0] * len(rewards)
    line = {"task_id": "t", "total_rewards": rewards, "environment_rewards": rewards, "group_rewards": zeros}
    return {**line, "reward_parts": parts, "attempts": [1] * len(rewards), "errors": [], **counts}


def failing_run(directory: Path) -> Path:
    """Five episodes: two that timed out, one with an error of its environment, one truncated and one done."""
    directory.mkdir(parents=True)
    truncated = episode(3, reward=1.0)
    truncated.done, truncated.truncated, truncated.truncation_reason = False, True, "max_turns"
    with RecordWriter(directory / "trajectories.mmr") as writer:
        writer.append([episode(number, error="ServerTimeoutError: no response after 3 s") for number in range(2)])
        writer.append([episode(2, error="MyError: the door is locked"), truncated, episode(4)])
    return directory


def hostile_run(directory: Path) -> Path:
    """Every text of the episodes, and the names of the trainer's figures, are hostile."""
    directory.mkdir(parents=True)
    text = HOSTILE.text
    found = [episode(number, reward=float(number), text=text) for number in range(3)]
    found.append(episode(3, error=f"{text}: {text}"))
    truncated = episode(4)
    truncated.truncated, truncated.truncation_reason = True, text
    for one in (*found, truncated):
        one.episode_id, one.group_id, one.metrics = one.episode_id + text, text, {text: 1.0}
    with RecordWriter(directory / "trajectories.mmr") as writer:
        writer.append([*found, truncated])
    with TrainingLog(directory) as log:
        log.write(1, {text: 1.0})
    row = group_line({text: [1.0]}, 1.0)
    (directory / "metrics.jsonl").write_text(json.dumps(row) + "\n" + text.replace("\x00", "") + "\n")
    return directory
