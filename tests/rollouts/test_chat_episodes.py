"""Episodes on a chat endpoint: their messages are stored as they were sent, and they have no tokens to train on."""

from typing import Any

import pytest
from PIL import Image
from scripted_chat import ScriptedChat

from renderers import Message
from rollouts.engines.protocol import SamplingParams
from rollouts.environments import ScoredPrompt
from rollouts.episodes.environment import StepResult
from rollouts.episodes.episode import run_episode
from rollouts.episodes.errors import EpisodeError
from rollouts.episodes.limits import EpisodeLimits
from rollouts.errors import TrajectoryError
from rollouts.runner import Runner
from rollouts.task import Task
from rollouts.trajectory.tree import Trajectory
from transport import decode, encode

SAMPLING = SamplingParams(max_tokens=16, temperature=0.5)


class Counting:
    """Asks for the next number until 3, each time with a picture."""

    def __init__(self) -> None:
        self.seen: list[Message] = []

    def reset(self, seed: int) -> list[Message]:
        return [{"role": "user", "content": [{"type": "text", "text": "count"}, picture(0)]}]

    def step(self, assistant: Message) -> StepResult:
        self.seen.append(assistant)
        number = int(str(assistant["content"]))
        done = number == 3
        return StepResult([] if done else [{"role": "user", "content": [picture(number)]}], float(number), done)


def picture(shade: int) -> dict[str, Any]:
    return {"type": "image", "image": Image.new("RGB", (8, 8), (shade, 0, 0))}


async def play(environment: Any, engine: Any, **options: Any) -> Trajectory:
    options = {"max_turns": 8, **options}
    return await run_episode(environment, engine=engine, renderer=None, sampling=SAMPLING, **options)


async def test_each_call_has_the_whole_conversation_and_the_trajectory_has_its_messages_and_pictures() -> None:
    engine = ScriptedChat("1", "2", "3")
    episode = await play(Counting(), engine)
    assert episode.done
    assert [turn.reward for turn in episode.turns] == [1, 2, 3]
    assert [len(call["messages"]) for call in engine.calls] == [1, 3, 5]
    assert [message.get("content") for message in engine.calls[2]["messages"] if message["role"] == "assistant"] == [
        "1",
        "2",
    ]
    (leaf,) = episode.leaves()
    messages = episode.to_messages(leaf)
    assert [message["role"] for message in messages] == ["user", "assistant"] * 3
    assert messages[:5] == engine.calls[2]["messages"]
    assert len({reference.source.digest for reference in episode.media(leaf)}) == 3
    assert episode.metrics == {"endpoint_prompt_tokens": 90, "endpoint_completion_tokens": 9}


async def test_such_an_episode_survives_storage_and_cannot_be_trained_on() -> None:
    from rollouts.training import samples_from_trajectory

    episode = await play(Counting(), ScriptedChat("1", "2", "3"))
    stored = decode(encode(episode))
    assert not stored.has_tokens
    assert stored.to_messages(stored.leaves()[0]) == episode.to_messages(episode.leaves()[0])
    assert len(list(stored.all_media())) == 3
    with pytest.raises(TrajectoryError, match=r"messages without tokens.*VLLMEngine or LocalEngine"):
        samples_from_trajectory(stored, advantage=1.0, processors={})


async def test_limits_of_pictures_hold_for_the_whole_conversation() -> None:
    engine = ScriptedChat("1", "2", "3")
    async with Runner(
        lambda task: Counting(), engine, None, sampling=SAMPLING, limits=EpisodeLimits(max_turns=8, max_images=2)
    ) as runner:
        (group,) = [group async for group in runner.stream([Task("0")])]
    (episode,) = group.episodes
    assert (
        episode.truncation_reason == "max_images: the prompt of turn 2 has 3 images, videos and sounds, the limit is 2"
    )
    assert episode.num_turns == 2


async def test_a_path_in_a_message_is_refused_without_a_policy_that_allows_it(tmp_path: Any) -> None:
    path = tmp_path / "secret.png"
    Image.new("RGB", (8, 8)).save(path)

    def messages(task: Task) -> list[Message]:
        return [{"role": "user", "content": [{"type": "image", "image": str(path)}]}]

    engine = ScriptedChat("1")
    with pytest.raises(EpisodeError, match=r"message 0.*policy|policy.*message 0|allowed"):
        await play(ScoredPrompt(Task("0"), messages, lambda c, t: 1.0), engine)
    assert engine.calls == []
