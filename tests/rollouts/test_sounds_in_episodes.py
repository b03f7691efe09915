"""Episodes with sounds: of messages and tools, bridged, in files, packed for other processes, shown and checked."""

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from sounds import sound_file
from trajectory_files import file_of, lines, run

from rollouts import Group, Runner, SamplingParams, Task, Trajectory
from rollouts.environments import ToolEnvironment
from rollouts.observability.group_metrics import GroupMetrics
from rollouts.runner.events import TurnFinished
from rollouts.testing import ScriptedEngine
from rollouts.training.trajectory_samples import samples_from_trajectory
from rollouts.trajectory.packed_episodes import AbsentSource, pack_episodes
from transport import decode_frames, encode_frames

sys.path.append(str(Path(__file__).parent / "view"))

from viewer_episodes import read_page, tone

RATE = 16_000
TONE = tone(1.0, RATE)
#: The tokens of a second of sound in the tiny model: 100 frames a second, halved twice.
TOKENS = 25


SOUNDS = {
    "array": {"array": TONE, "sampling_rate": RATE},
    "wav": sound_file(TONE),
    "mp3": sound_file(TONE, format="MP3"),
}


def listen(what: str) -> object:
    """Listen to a sound."""
    return SOUNDS[what]


def question(task: Task) -> list[dict[str, object]]:
    sound = {"type": "audio", "audio": TONE, "sampling_rate": RATE}
    return [{"role": "user", "content": [sound, {"type": "text", "text": "Which?"}]}]


def call(what: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'listen', 'arguments': {'what': what}})}\n</tool_call>"


@pytest.fixture(scope="module")
def played(hearing) -> tuple[Group, list[TurnFinished]]:
    """Three turns: a sound in the question, and the results of three calls; and what the runner reported."""
    events: list[object] = []

    def environment(task: Task) -> ToolEnvironment:
        return ToolEnvironment(task, tools=[listen], messages=question, score=lambda conversation, task: 1.0)

    async def play() -> Group:
        engine = ScriptedEngine([call("array"), "\n".join(map(call, ("wav", "mp3"))), "A tone."], renderer=hearing)
        sampling = SamplingParams(max_tokens=400)
        async with Runner(environment, engine, hearing, sampling=sampling, listeners=[events.append]) as runner:
            (group,) = [group async for group in runner.stream([Task("heard", {})])]
            return group

    return asyncio.run(play()), [event for event in events if isinstance(event, TurnFinished)]


@pytest.fixture(scope="module")
def heard(played) -> Trajectory:
    (trajectory,) = played[0].episodes
    assert (trajectory.error, trajectory.num_turns, trajectory.reward) == ("", 3, 1.0)
    return trajectory


def test_sounds_are_counted_beside_images(played):
    group, turns = played
    assert [(turn.images, turn.sounds) for turn in turns] == [(0, 1), (0, 2), (0, 4)]
    metrics = GroupMetrics.of(group)
    assert (metrics.images, metrics.sounds) == (0, 4)
    assert GroupMetrics.model_validate_json(metrics.line()).sounds == 4
    earlier = {name: value for name, value in json.loads(metrics.line()).items() if name != "sounds"}
    assert GroupMetrics.model_validate_json(json.dumps(earlier)).sounds == 0  # a line of a version without sounds


@pytest.mark.parametrize("form", ["source", "uint8", "float32"])
def test_sounds_are_in_a_message_once_and_samples_have_their_features(heard, hearing, form):
    packed = pack_episodes([heard, heard], pixels=form, processors=hearing.processors)
    frames = encode_frames(packed)
    size = sum(memoryview(frame).nbytes for frame in frames)
    received = decode_frames(frames)
    processors = received.processors(hearing.processors) if form == "source" else received.processors()
    for episode in received.episodes:
        (sample,) = samples_from_trajectory(episode, advantage=1.0, processors=processors)
        (expected,) = samples_from_trajectory(heard, advantage=1.0, processors=hearing.processors)
        for (item, placed), (other, other_placed) in zip(sample.media, expected.media, strict=True):
            assert (placed, item.mm_hash) == (other_placed, other.mm_hash)
            assert np.array_equal(item["input_features"], other["input_features"])
        is_absent = {isinstance(each.source, AbsentSource) for each in episode.all_media()}
        assert is_absent == {form != "source"}
    if form == "source":
        sounds = {each.source.digest: each.source.nbytes for each in heard.all_media()}
        assert size < 1.1 * sum(sounds.values())


def test_the_page_says_that_the_features_are_equal_and_the_terminal_counts_sounds(heard, hearing, tmp_path):
    from rollouts.view import write_html

    write_html([heard], tmp_path / "page.html", renderer=hearing)
    _, [(header, _)] = read_page(tmp_path / "page.html")
    media = [each for node in header["nodes"] for each in node["media"]]
    assert [(each["modality"], each["length"], each["processed"]["pixels"]) for each in media] == [
        ("audio", TOKENS, "equal")
    ] * 4
    path = file_of(tmp_path / "t.mmr", heard)
    assert ", 0 images, 4 sounds (3 distinct), " in lines(run("show", path))[0]
    (row,) = json.loads(run("ls", path, "--json").stdout)
    assert (row["images"], row["sounds"], row["distinct_sounds"]) == (0, 4, 3)
