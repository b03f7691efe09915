"""Episodes for the tests of the viewer, and the reading of what is written for the page."""

import base64
import gzip
import json
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from renderers import MediaSource, PlaceholderRange, TemplateRenderer
from renderers.media.decoding import frames_to_raw
from renderers.media.policy import MediaPolicy
from renderers.media.samples import samples_source
from rollouts import Completion, FinishReason, MediaReference, TokenNode, TopLogprobs, Trajectory, Turn, WeightSpan

RED, BLUE = (np.full((32, 32, 3), colour, np.uint8) for colour in ((255, 0, 0), (0, 0, 255)))


def completion(renderer: TemplateRenderer, text: str, version: str = "0", logprob: float = -0.5) -> Completion:
    """The result of an engine: the ids of `text` with the stop token."""
    ids = [*renderer.tokenizer.encode_scaffold(text), renderer.get_stop_token_ids()[0]]
    logprobs = np.full(len(ids), logprob, np.float32)
    return Completion(
        0, np.array(ids, np.int32), logprobs, FinishReason.STOP, ids[-1], (WeightSpan(version, 0, len(ids)),)
    )


def image_message(image: Any, text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}


def two_turns(renderer: TemplateRenderer, episode_id: str = "two-turns", group: str = "doors") -> Trajectory:
    """An image a turn, the second turn bridged, and a fork: the second question asked without the first."""
    trajectory = Trajectory(episode_id, seed=7, group_id=group)
    first, second = image_message(RED, "Which colour?"), image_message(BLUE, "And this? ✓ 日本")
    prompt = renderer.render([first], add_generation_prompt=True)
    node = trajectory.add_turn(prompt, completion(renderer, "Red. 日本"), {"role": "assistant", "content": "Red. 日本"},
                               messages=[first])  # fmt: skip
    trajectory.record_reward(0.5, {"right": True})
    bridged = renderer.bridge_to_next_turn(
        prompt.token_ids,
        trajectory.nodes[node].token_ids.tolist(),
        [second],
        previous_messages=[first],
        previous_multi_modal_data=prompt.multi_modal_data,
    )
    assert bridged is not None
    answer = {"role": "assistant", "content": "Blue."}
    count = len(completion(renderer, "Blue.").token_ids)
    extras = {
        "entropy": np.linspace(0, 3, count).astype(np.float32),
        "trainer_logprobs": np.full(count, -0.25, np.float32),
        "value": np.arange(count, dtype=np.float64),
    }
    trajectory.add_turn(
        bridged, completion(renderer, "Blue.", "1"), answer, messages=[second], extras=extras, seconds=1.5
    )
    trajectory.record_reward(1.0, {"right": True})
    alone = renderer.render([second], add_generation_prompt=True)
    trajectory.add_turn(
        alone, completion(renderer, "Blue!", "1"), {"role": "assistant", "content": "Blue!"}, messages=[second]
    )
    trajectory.done = True
    trajectory.finish()
    return trajectory


def drifted(renderer: TemplateRenderer) -> Trajectory:
    """An episode whose recorded answer is not the text of its tokens."""
    trajectory = Trajectory("drifted", group_id="doors")
    question = {"role": "user", "content": "Which colour?"}
    prompt = renderer.render([question], add_generation_prompt=True)
    trajectory.add_turn(
        prompt, completion(renderer, "Red."), {"role": "assistant", "content": "Reed."}, messages=[question]
    )
    return trajectory


def called(renderer: TemplateRenderer) -> Trajectory:
    """One tool call that is well formed, and one that is not JSON."""
    trajectory = Trajectory("called", group_id="doors")
    question = {"role": "user", "content": "Look."}
    prompt = renderer.render([question], add_generation_prompt=True)
    calls = ('{"name": "look", "arguments": {"at": "door"}}', '{"name": "l')
    text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    message = renderer.parse_response(completion(renderer, text).token_ids.tolist()).to_message()
    trajectory.add_turn(prompt, completion(renderer, text), message, messages=[question])
    return trajectory


def with_likeliest(renderer: TemplateRenderer, *columns: list[tuple[str, float]]) -> Trajectory:
    """An episode whose answer, "Red.", has the likeliest texts of one token each with their log-probabilities.

    `columns` are those of its first tokens, one length for all; the others have the columns of the last.
    """
    question = {"role": "user", "content": "Which colour?"}
    answer = completion(renderer, "Red.")
    rows = [*columns, *[columns[-1]] * (len(answer.token_ids) - len(columns))]
    ids = [[renderer.tokenizer.encode_scaffold(text)[0] for text, _ in row] for row in rows]
    logprobs = np.array([[logprob for _, logprob in row] for row in rows], np.float32)
    trajectory = Trajectory("likeliest")
    trajectory.add_turn(
        renderer.render([question], add_generation_prompt=True),
        replace(answer, top_logprobs=TopLogprobs(np.array(ids, np.int32), logprobs)),
        {"role": "assistant", "content": "Red."},
        messages=[question],
    )
    return trajectory


def failed() -> Trajectory:
    return Trajectory("failed", group_id="windows", error="EngineFailedError: the server went away")


def media_episode(*sources: tuple[str, bytes], episode_id: str = "media") -> Trajectory:
    """One prompt with a medium at each of its first tokens; pairs are modality and source bytes."""
    references = []
    for at, (modality, data) in enumerate(sources):
        source = MediaSource.of(data)
        references.append(MediaReference(modality, f"{source.digest}-fp", source, PlaceholderRange(at, 1)))  # type: ignore[arg-type]
    count = len(sources) + 2
    parts = [{"type": one.modality, one.modality: one.source} for one in references]
    node = TokenNode(
        -1,
        np.arange(count, dtype=np.int32),
        np.zeros(count, bool),
        np.empty(0, np.float32),
        media=tuple(references),
        messages=({"role": "user", "content": parts},),
    )
    return Trajectory(episode_id, nodes=[node])


def video(frames: int = 40) -> bytes:
    shades = np.linspace(0, 255, frames).astype(np.uint8)
    return frames_to_raw(np.broadcast_to(shades[:, None, None, None], (frames, 24, 32, 3)).copy(), fps=10.0)


def tone(seconds: float = 2.0, rate: int = 44_100, hertz: float = 440.0) -> np.ndarray:
    """float32 (samples,): a tone that becomes quieter, from 0.8 to 0."""
    time = np.arange(round(seconds * rate)) / rate
    return (0.8 * (1 - time / seconds) * np.sin(2 * np.pi * hertz * time)).astype(np.float32)


def sound_source(samples: np.ndarray, rate: int) -> bytes:
    """The source of a sound that was given as an array."""
    return bytes(samples_source(samples, rate, MediaPolicy(max_audio_seconds=1e9)).data)


def long_episode(number: int, tokens: int = 30_000, turns: int = 10) -> Trajectory:
    """An episode of `tokens` tokens in `turns` turns, a third of them sampled."""
    generator = np.random.default_rng(number)
    nodes: list[TokenNode] = []
    found: list[Turn] = []
    of_prompt, of_completion = tokens // turns * 2 // 3, tokens // turns - tokens // turns * 2 // 3
    for turn in range(turns):
        text = f"Question {turn} of episode {number}. " + "The door is closed. " * 60
        ids = generator.integers(0, 50_000, of_prompt).astype(np.int32)
        message = {"role": "user", "content": text}
        nodes.append(
            TokenNode(len(nodes) - 1, ids, np.zeros(of_prompt, bool), np.empty(0, np.float32), messages=(message,))
        )
        sampled = generator.integers(0, 50_000, of_completion).astype(np.int32)
        logprobs = -generator.exponential(1.0, of_completion).astype(np.float32)
        version = str(number // 50)
        trainer = logprobs + generator.normal(0, 1e-4, of_completion).astype(np.float32)
        nodes.append(
            TokenNode(
                len(nodes) - 1,
                sampled,
                np.ones(of_completion, bool),
                logprobs,
                (WeightSpan(version, 0, of_completion),),
                extras={"trainer_logprobs": trainer},
            )
        )
        answer = {"role": "assistant", "content": f"Answer {turn}. " + "It opens slowly. " * 40}
        found.append(Turn(len(nodes) - 1, FinishReason.STOP, answer, float(generator.integers(0, 2)), {}, 0.5))
    return Trajectory(f"long-{number}", number, f"task-{number // 4}", nodes, found, done=True)


def read_payload(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The header and the columns of a payload."""
    raw = gzip.decompress(data)
    (length,) = struct.unpack_from("<I", raw)
    header = json.loads(raw[4 : 4 + length])
    columns = {
        name: np.frombuffer(raw, np.dtype(at["type"]).newbyteorder("<"), at["length"], 4 + length + at["offset"])
        for name, at in header["columns"].items()
    }
    return header, columns


def read_blocks(path: Path) -> dict[str, str]:
    """The blocks of data of a page, by their names."""
    return dict(re.findall(r'<script type="[^"]+" id="([^"]+)">(.*?)</script>', path.read_text("utf-8"), re.DOTALL))


def read_page(path: Path) -> tuple[dict[str, Any], list[tuple[dict[str, Any], dict[str, np.ndarray]]]]:
    """The index of a page, and its payloads."""
    blocks = read_blocks(path)
    index = json.loads(blocks["index"])
    return index, [read_payload(base64.b64decode(blocks[f"episode-{one['number']}"])) for one in index["episodes"]]
