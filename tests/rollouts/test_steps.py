"""Step lists of other libraries as trajectories: the same tokens, log-probabilities and images, or a named error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renderers import MultiModalData, PlaceholderRange, RenderedTokens, TemplateRenderer
from rollouts import FinishReason, InvalidStepError, Trajectory, step_processors, trajectory_from_steps
from rollouts.errors import TrajectoryError
from transport import (
    decode,
    drop_intermediate_multi_modal_data,
    encode,
    restore_multi_modal_data,
    walk_decode_tensors,
    walk_encode_tensors,
)

Step = dict[str, Any]


def text_step(prompt: list[int], sampled: list[int], **more: Any) -> Step:
    logprobs = [-0.25 * (index + 1) for index in range(len(sampled))]
    tokens = {"prompt_ids": prompt, "completion_ids": sampled, "completion_logprobs": logprobs}
    return {"tokens": tokens, **more}


def plain(data: MultiModalData) -> dict[str, Any]:
    """Multi-modal data as another library has them: dicts, and floats."""
    return {
        "mm_hashes": data.mm_hashes,
        "mm_placeholders": {
            modality: [{"offset": where.offset, "length": where.length} for where in ranges]
            for modality, ranges in data.mm_placeholders.items()
        },
        "mm_items": {
            modality: [
                {"pixel_values": item["pixel_values"].astype(np.float32), "image_grid_thw": item["image_grid_thw"]}
                for item in items
            ]
            for modality, items in data.media_items.items()
        },
    }


@pytest.fixture(scope="module")
def prompts(renderer: TemplateRenderer) -> tuple[RenderedTokens, RenderedTokens, list[int]]:
    """A prompt with an image, the next one with two, and the completion between them."""
    red, blue = (np.full((32, 32, 3), colour, np.uint8) for colour in ((255, 0, 0), (0, 0, 255)))
    question = {"role": "user", "content": [{"type": "image", "image": red}, {"type": "text", "text": "Which?"}]}
    following = {"role": "user", "content": [{"type": "image", "image": blue}, {"type": "text", "text": "And?"}]}
    prompt = renderer.render([question], add_generation_prompt=True)
    completion = [*renderer.tokenizer.encode_scaffold("Red."), renderer.get_stop_token_ids()[0]]
    bridged = renderer.bridge_to_next_turn(
        prompt.token_ids,
        completion,
        [following],
        previous_messages=[question],
        previous_multi_modal_data=prompt.multi_modal_data,
    )
    assert bridged is not None
    return prompt, bridged, completion


def steps_with_images(prompts: tuple[RenderedTokens, RenderedTokens, list[int]], *, as_dicts: bool) -> list[Step]:
    first, second, completion = prompts
    steps = []
    for prompt in (first, second):
        step = text_step(prompt.token_ids, completion, reward=0.5)
        data = prompt.multi_modal_data
        assert data is not None
        step["tokens"]["multi_modal_data"] = plain(data) if as_dicts else data
        step["response"] = {"message": {"role": "assistant", "content": "Red.", "tokens": dict(step["tokens"])}}
        steps.append(step)
    return steps


def through_msgpack(steps: list[Any]) -> list[Any]:
    sent: list[Any] = walk_decode_tensors(msgpack.unpackb(msgpack.packb(walk_encode_tensors(steps))))
    return sent


WAYS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "as they are": lambda steps: steps,
    "shortened": drop_intermediate_multi_modal_data,
    "shortened and encoded": lambda steps: decode(encode(drop_intermediate_multi_modal_data(steps))),
    "shortened and through msgpack": lambda steps: through_msgpack(drop_intermediate_multi_modal_data(steps)),
    "through msgpack": through_msgpack,
    "encoded and restored": lambda steps: restore_multi_modal_data(
        decode(encode(drop_intermediate_multi_modal_data(steps)))
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("as_dicts", [False, True], ids=["our objects", "plain dictionaries"])
def test_steps_with_images_become_a_trajectory_and_training_samples(
    as_dicts: bool,
    way: str,
    prompts: tuple[RenderedTokens, RenderedTokens, list[int]],
    renderer: TemplateRenderer,
) -> None:
    samples_from_trajectory = pytest.importorskip("rollouts.training").samples_from_trajectory
    first, second, completion = prompts
    trajectory = trajectory_from_steps(WAYS[way](steps_with_images(prompts, as_dicts=as_dicts)), episode_id="e")
    (leaf,) = trajectory.leaves()
    assert trajectory.token_ids(leaf).tolist() == [*second.token_ids, *completion]
    assert len(trajectory.nodes) == 4  # each token once: prompt, completion, what is new, completion
    assert [len(node.media) for node in trajectory.nodes] == [1, 0, 1, 0]
    assert trajectory.reward == 1.0
    trajectory = decode(encode(trajectory))
    (sample,) = samples_from_trajectory(trajectory, advantage=1.0, processors=step_processors(renderer.processors))
    expected = np.zeros(len(sample), dtype=bool)
    start = len(first.token_ids)
    expected[start : start + len(completion)] = expected[-len(completion) :] = True
    assert sample.loss_mask.tolist() == expected.tolist()
    assert sample.logprobs[expected].tolist() == [-0.25 * (index + 1) for index in range(len(completion))] * 2
    data = second.multi_modal_data
    assert data is not None
    for (item, where), (seen, seen_where) in zip(sample.media, data.items_with_ranges(), strict=True):
        assert (where.offset, where.length, item.mm_hash) == (seen_where.offset, seen_where.length, seen.mm_hash)
        dtype = np.float32 if as_dicts else np.uint8
        np.testing.assert_array_equal(item["pixel_values"], seen["pixel_values"].astype(dtype), strict=True)


def test_the_features_of_a_sound_are_those_of_its_step() -> None:
    features = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
    mask = np.array([1, 1, 1, 1, 0, 0], bool)
    step = text_step([1, 7, 7, 2], [3])
    step["tokens"]["multi_modal_data"] = {
        "mm_hashes": {"audio": ["a"]},
        "mm_placeholders": {"audio": [{"offset": 1, "length": 2}]},
        "mm_items": {"audio": [{"input_features": features, "feature_attention_mask": mask}]},
    }
    trajectory = decode(encode(trajectory_from_steps([step], episode_id="e")))
    (reference,) = trajectory.all_media()
    item = reference.derive(step_processors())
    assert (reference.modality, item.mm_hash, item.num_tokens) == ("audio", "a", 2)
    np.testing.assert_array_equal(item["input_features"], features, strict=True)
    np.testing.assert_array_equal(item["feature_attention_mask"], mask, strict=True)


def test_an_image_that_changed_between_steps_forks() -> None:
    def step(value: float) -> Step:
        made = text_step([1, 7, 7, 2], [3])
        made["tokens"]["multi_modal_data"] = {
            "mm_hashes": {"image": ["a"]},
            "mm_placeholders": {"image": [{"offset": 1, "length": 2}]},
            "mm_items": {"image": [{"pixel_values": np.full((4, 2), value, np.float32)}]},
        }
        return made

    assert len(trajectory_from_steps([step(1), step(1)], episode_id="e").nodes) == 3  # one prompt, sampled twice
    assert len(trajectory_from_steps([step(1), step(2)], episode_id="e").nodes) == 4


@settings(max_examples=50)
@given(st.data())
def test_steps_of_interleaved_agents_hold_each_token_of_each_agent(data: st.DataObject) -> None:
    """Agents whose first tokens differ; every one of them ends in a leaf that is its whole conversation."""
    conversations: list[list[int]] = [[100 + agent] for agent in range(data.draw(st.integers(1, 3)))]
    sampled: list[list[float]] = [[] for _ in conversations]
    steps = []
    for _ in range(data.draw(st.integers(1, 8))):
        agent = data.draw(st.sampled_from(range(len(conversations))))
        ids = st.lists(st.integers(0, 50), min_size=1, max_size=4)
        prompt, completion = conversations[agent] + data.draw(ids), data.draw(ids)
        steps.append(text_step(prompt, completion))
        sampled[agent] += steps[-1]["tokens"]["completion_logprobs"]
        conversations[agent] = prompt + completion
    trajectory = trajectory_from_steps(steps, episode_id="e")
    spoken = {agent: ids for agent, ids in enumerate(conversations) if len(ids) > 1}
    leaves = {tuple(trajectory.token_ids(leaf).tolist()): leaf for leaf in trajectory.leaves()}
    assert set(leaves) == {tuple(ids) for ids in spoken.values()}
    for agent, ids in spoken.items():
        nodes = [trajectory.nodes[index] for index in trajectory.path(leaves[tuple(ids)])]
        assert np.concatenate([node.logprobs for node in nodes]).tolist() == sampled[agent]


def test_what_a_step_says_beside_its_tokens_is_kept() -> None:
    steps: list[Any] = [
        text_step(
            [1],
            [2],
            reward=0.5,
            advantage=0.1,
            trajectory_id="t",
            extras={"tool": "search"},
            completion=[{"role": "assistant", "content": "two"}, {"role": "tool", "content": "x"}],
        ),
        SimpleNamespace(
            tokens=SimpleNamespace(prompt_ids=np.array([1, 2, 3]), completion_ids=(4,), completion_logprobs=[-1.0]),
            reward=None,
            is_truncated=True,
        ),
        text_step(
            [5], [6], response={"message": {"role": "assistant", "content": "six", "finish_reason": "tool_calls"}}
        ),
    ]
    trajectory = trajectory_from_steps(steps, episode_id="e", seed=3, group_id="g")
    assert (trajectory.episode_id, trajectory.seed, trajectory.group_id, trajectory.finished) == ("e", 3, "g", False)
    first, second, third = trajectory.turns
    assert (first.reward, first.info) == (0.5, {"tool": "search", "advantage": 0.1, "trajectory_id": "t"})
    assert first.message == {"role": "assistant", "content": "two"}
    assert [turn.finish_reason for turn in trajectory.turns] == [
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.STOP,
    ]
    assert second.reward == 0.0
    assert third.message["content"] == "six"


def test_the_reward_of_an_episode_goes_to_its_last_turn_where_steps_have_none() -> None:
    steps = [text_step([1], [2]), text_step([1, 2, 3], [4], extras={"kept": 1})]
    trajectory = trajectory_from_steps(steps, episode_id="e", reward=2.0)
    assert [turn.reward for turn in trajectory.turns] == [0.0, 2.0]
    assert trajectory.turns[1].info == {"kept": 1}
    with pytest.raises(InvalidStepError, match=r"steps\[1\]\.reward"):
        trajectory_from_steps([steps[0], {**steps[1], "reward": 1.0}], episode_id="e", reward=2.0)


def test_a_prompt_may_mark_as_trained_what_steps_before_sampled() -> None:
    steps = [text_step([1], [2]), text_step([1, 2, 3], [4])]
    steps[1]["tokens"]["prompt_mask"] = [0, 1, 0]
    assert trajectory_from_steps(steps, episode_id="e").num_turns == 2
    steps[1]["tokens"]["prompt_mask"] = [0, 1, 1]
    with pytest.raises(InvalidStepError, match=r"steps\[1\]\.tokens\.prompt_mask\[2\]"):
        trajectory_from_steps(steps, episode_id="e")


PIXELS = {"pixel_values": np.zeros((4, 2), np.float32)}
MEDIA = {
    "mm_hashes": {"image": ["a"]},
    "mm_placeholders": {"image": [{"offset": 0, "length": 1}]},
    "mm_items": {"image": [PIXELS]},
}
WRONG: dict[str, tuple[str, Any, str]] = {
    "no tokens": ("tokens", None, "tokens: the step has none"),
    "ids of text": ("tokens.prompt_ids", "abc", r"prompt_ids: str where"),
    "float ids": ("tokens.prompt_ids", [1.5], r"prompt_ids: .*float64"),
    "a negative id": ("tokens.completion_ids", [-1, 5], r"completion_ids: "),
    "an empty completion": ("tokens.completion_ids", [], "completion_ids: no tokens"),
    "nested ids": ("tokens.prompt_ids", [[1], [2, 3]], "prompt_ids: "),
    "no log-probabilities": ("tokens.completion_logprobs", None, "completion_logprobs: missing"),
    "too few log-probabilities": ("tokens.completion_logprobs", [-1.0], r"completion_logprobs: .* for 2 completion"),
    "NaN": ("tokens.completion_logprobs", [-1.0, float("nan")], r"completion_logprobs\[1\]: nan"),
    "a positive log-probability": ("tokens.completion_logprobs", [5.0, -1.0], r"completion_logprobs\[0\]: 5"),
    "None among log-probabilities": ("tokens.completion_logprobs", [None, -1.0], r"completion_logprobs: object"),
    "a short mask": ("tokens.completion_mask", [1], r"completion_mask: \(1,\)"),
    "a mask of something else": ("tokens.completion_mask", [1, 7], "completion_mask: "),
    "a token that was not sampled": ("tokens.completion_mask", [1, 0], r"completion_mask\[1\]: is 0"),
    "a reward of text": ("reward", "good", "reward: 'good'"),
    "an infinite reward": ("reward", float("inf"), "reward: inf"),
    "extras that are no dict": ("extras", [1], "extras: list"),
    "extras that cannot be stored": ("extras", {"x": object()}, "extras: cannot be stored"),
    "an unknown finish reason": ("response", {"message": {"finish_reason": "weird"}}, "finish_reason: 'weird'"),
    "experts of another length": ("tokens.routed_experts", np.zeros((9, 1, 1), np.int32), "tokens: routed experts"),
    "encoded experts": ("tokens.routed_experts", "c29tZQ==", "routed_experts: "),
    "media under another name": ("tokens.mm_data", MEDIA, "mm_data"),
    "media beside the tokens": ("multi_modal_data", MEDIA, "multi_modal_data"),
    "columns of other names": ("tokens.multi_modal_data", {"hashes": {"image": ["a"]}}, "mm_hashes"),
    "an image outside the prompt": (
        "tokens.multi_modal_data",
        {**MEDIA, "mm_placeholders": {"image": [{"offset": 9, "length": 1}]}},
        "tokens: image a has a placeholder at 9:10",
    ),
    "no pixels": ("tokens.multi_modal_data", {**MEDIA, "mm_items": {"image": [None]}}, r"mm_items\['image'\]\[0\]"),
    "no names": ("tokens.multi_modal_data", {**MEDIA, "mm_hashes": {"image": [None]}}, r"mm_items\['image'\]\[0\]"),
    "no column of names": ("tokens.multi_modal_data", {**MEDIA, "mm_hashes": {}}, "image columns|mm_hashes"),
    "uint8 pixels": (
        "tokens.multi_modal_data",
        {**MEDIA, "mm_items": {"image": [{"pixel_values": np.zeros((4, 2), np.uint8)}]}},
        r"\['pixel_values'\]: uint8",
    ),
    "payloads": (
        "tokens.multi_modal_data",
        {**MEDIA, "mm_items": {"image": [{"pixel_values": {"__ndarray__": True}}]}},
        "walk_decode_tensors",
    ),
    "unknown modality": (
        "tokens.multi_modal_data",
        {name: {"smell": column["image"]} for name, column in MEDIA.items()},
        "none of image, video, audio",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_in_a_step_is_named_with_its_place(what: str) -> None:
    place, value, named = WRONG[what]
    steps = [text_step([1, 2], [3, 4]), copy.deepcopy(text_step([1, 2, 3, 4, 5], [6, 7]))]
    container: Any = steps[1]
    *path, last = place.split(".")
    for name in path:
        container = container[name]
    container[last] = value
    with pytest.raises(InvalidStepError, match=named) as caught:
        trajectory_from_steps(steps, episode_id="e")
    assert caught.value.step == 1
    assert str(caught.value).startswith("steps[1].")


def test_a_name_that_is_not_the_items_own_is_refused(prompts: tuple[RenderedTokens, RenderedTokens, list[int]]) -> None:
    steps = steps_with_images(prompts, as_dicts=False)
    data = steps[0]["tokens"]["multi_modal_data"]
    steps[0]["tokens"]["multi_modal_data"] = MultiModalData({"image": ["other"]}, data.mm_placeholders, data.mm_items)
    with pytest.raises(InvalidStepError, match="calls it other"):
        trajectory_from_steps(steps[:1], episode_id="e")


def test_no_steps_are_an_empty_episode() -> None:
    trajectory = trajectory_from_steps([], episode_id="e")
    assert isinstance(trajectory, Trajectory)
    assert trajectory.num_turns == 0


def test_placeholders_with_text_between_their_features_are_kept() -> None:
    where = PlaceholderRange(0, 3, ((0, 1), (2, 3)))
    step = text_step([7, 8, 7, 2], [3])
    step["tokens"]["multi_modal_data"] = {**MEDIA, "mm_placeholders": {"image": [where]}}
    trajectory = trajectory_from_steps([step], episode_id="e")
    assert trajectory.media(trajectory.leaves()[0])[0].placeholder == where


@pytest.mark.parametrize("steps", [5, None, "steps", {}])
def test_steps_that_are_not_a_list_are_refused(steps: Any) -> None:
    with pytest.raises(TrajectoryError, match="pass a list of steps"):
        trajectory_from_steps(steps, episode_id="e")
