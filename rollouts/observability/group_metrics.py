"""What a run's directory says of its groups: the lines of `metrics.jsonl`, with the figures of each; `summary.json`."""

import json
import time
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from rollouts.episodes.chat_turns import COMPLETION_TOKENS, PROMPT_TOKENS
from rollouts.errors import CommandFileError, RolloutsError, validation_errors
from rollouts.runner.group import Group
from rollouts.terminal.text import shortened
from rollouts.trajectory.plain_json import plain
from rollouts.trajectory.token_node import TEACHER_KL
from rollouts.trajectory.tree import Trajectory
from rollouts.values import finite_number
from transport.wire.arrays import is_tensor


class GroupMetrics(BaseModel):
    """The figures of a group. Lists have a number for each episode, in the order of the group's record.

    An episode's total reward is its environment reward, the sum over its turns, plus its group reward, which
    is what the group rewards add, with their weights; `reward_parts` has the named rewards of both, without
    their weights. `failed_episodes` are the indices of those with an error. Of an episode on a chat endpoint,
    `tokens` are those that it counted in the prompts of all turns and in their completions. `task_data` is
    that of `stored_task_data`. `time`, when the line was made, is in seconds since the epoch. `group_seconds`
    is the time from the start of the group's first episode to the end of the last, `episode_seconds` the sum
    of the durations of its episodes, `engine_seconds` the part of these that the engine took. `teacher_kl`
    has None for episodes that were not scored, and is None as a whole, and absent in the line, where none
    was.
    """

    model_config = ConfigDict(strict=True)

    task_id: str
    task_data: Any = None
    time: float = 0.0
    group_seconds: float = 0.0
    episode_seconds: float = 0.0
    engine_seconds: float = 0.0
    total_rewards: list[float]
    environment_rewards: list[float]
    group_rewards: list[float]
    reward_parts: dict[str, list[float]]
    attempts: list[int]
    done: int
    truncated: int
    failed: int
    failed_episodes: list[int]
    errors: list[str]
    turns: int
    length_stops: int = 0
    tokens: int
    sampled_tokens: int
    images: int
    sounds: int = 0
    oldest_version: str = ""
    teacher_kl: list[float | None] | None = None

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        columns: dict[str, Sized] = {"attempts": self.attempts}
        columns |= {"environment_rewards": self.environment_rewards, "group_rewards": self.group_rewards}
        columns |= {} if self.teacher_kl is None else {"teacher_kl": self.teacher_kl}
        columns |= {f"reward_parts of {name!r:.80}": values for name, values in self.reward_parts.items()}
        for name, values in columns.items():
            if len(values) != len(self.total_rewards):
                raise ValueError(f"{len(values)} {name} for {len(self.total_rewards)} total rewards")
        return self

    @classmethod
    def of(cls, group: Group) -> Self:
        """The figures of a finished group."""
        episodes = group.episodes
        media = [episode.media_counts() for episode in episodes]
        teacher_kl = [finite_number(episode.metrics.get(TEACHER_KL)) for episode in episodes]
        return cls(
            task_id=group.task.task_id,
            task_data=stored_task_data(group.task.data),
            time=time.time(),
            group_seconds=group.seconds,
            episode_seconds=sum(episode.seconds for episode in episodes),
            engine_seconds=sum(turn.seconds for episode in episodes for turn in episode.turns),
            total_rewards=group.rewards.tolist(),
            environment_rewards=group.environment_rewards.tolist(),
            group_rewards=group.group_rewards.tolist(),
            reward_parts={name: values.tolist() for name, values in group.reward_parts.items()},
            attempts=list(group.attempts),
            done=sum(episode.done for episode in episodes),
            truncated=sum(episode.truncated for episode in episodes),
            failed=group.num_failed,
            failed_episodes=[index for index, episode in enumerate(episodes) if episode.error],
            errors=[episode.error for episode in episodes if episode.error],  # "KindOfError: text"
            turns=sum(episode.num_turns for episode in episodes),
            length_stops=sum(episode.length_stops for episode in episodes),
            tokens=sum(len(node) for episode in episodes for node in episode.nodes)
            + _counted_by_endpoint(episodes, PROMPT_TOKENS)
            + _counted_by_endpoint(episodes, COMPLETION_TOKENS),
            sampled_tokens=sum(len(node.logprobs) for episode in episodes for node in episode.nodes)
            + _counted_by_endpoint(episodes, COMPLETION_TOKENS),
            images=sum(counts["images"] for counts in media),
            sounds=sum(counts["sounds"] for counts in media),
            oldest_version=group.oldest_version,
            teacher_kl=teacher_kl if any(value is not None for value in teacher_kl) else None,
        )

    def line(self) -> str:
        """The line, without a line feed."""
        return json.dumps(self.model_dump(exclude={"teacher_kl"} if self.teacher_kl is None else None))


def line_violation(error: ValidationError) -> str:
    """What is wrong with a line of which `model_validate_json` raises `error`: the place in it, and the reason."""
    first = validation_errors(error)[0]
    return ": ".join([*map(str, first["loc"]), first["msg"]])


def _counted_by_endpoint(episodes: Sequence[Trajectory], name: str) -> int:
    return int(sum(episode.metrics.get(name, 0) for episode in episodes if not episode.has_tokens))


def stored_task_data(data: Any) -> Any:
    """What `metrics.jsonl` has of the data of a task: lists, dicts with text as keys, text, numbers, booleans and None.

    Images, arrays, bytes and other values without a JSON form are None, texts are shortened to 10,000
    characters. None also for data of more than 1,048,576 characters of JSON.
    """
    found = _json_form(data, 0)
    return found if len(json.dumps(found)) <= 1 << 20 else None


def _json_form(value: Any, depth: int) -> Any:
    if depth > 20 or isinstance(value, bytes | bytearray | memoryview | np.ndarray) or is_tensor(value):
        return None
    if isinstance(value, str):
        return shortened(value, 10_000)
    if isinstance(value, Mapping):
        return {str(key): _json_form(each, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_json_form(each, depth + 1) for each in value]
    try:
        return plain(value)
    except RolloutsError:
        return None


def read_summary(path: Path) -> dict[str, Any] | None:
    """The values of a `summary.json`, "complete" among them; None where there is no such file.

    Raises `CommandFileError` for a file that cannot be read, or is no summary.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CommandFileError(path, f"it cannot be read: {error.strerror or error}") from error
    try:
        summary = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CommandFileError(path, f"it is no JSON, or was cut off after {len(content)} bytes: {error}") from error
    if not isinstance(summary, dict) or not isinstance(summary.get("complete"), bool):
        reason = 'it is no object with "complete": true or false, so it does not say whether all tasks were run'
        raise CommandFileError(path, reason)
    return summary
