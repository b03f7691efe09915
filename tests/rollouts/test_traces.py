"""Traces of verifiers, as dicts, read as trajectories. tests/environments has those that verifiers itself recorded."""

from __future__ import annotations

import json

import msgpack
import numpy as np
import pytest

from renderers import load_renderer
from rollouts import trajectory_from_trace
from rollouts.errors import RolloutsError, TrajectoryError
from rollouts.training import samples_from_trajectory

RED, BLUE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAIAAAD8GO2jAAAAKUlEQVRIx+3NMQEAAAjDMMC/52ECvlRA06nUZ/N6BwAAAAAA"
    "AAAAAIcttVsCPm9Ue3AAAAAASUVORK5CYII=",
    "data:image/gif;base64,R0lGODdhAQABAIAAAP///////ywAAAAAAQABAAACAkQBADs=",
)


def user(url, text="Which colour?"):
    return {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}],
    }


def node(message, parent, token_ids, **fields):
    """A node of a message of the prompt."""
    size = len(token_ids)
    blank = {"sampled": False, "mask": [False] * size, "is_content": [False] * size, "logprobs": []}
    return {"message": message, "parent": parent, "token_ids": token_ids, **blank, **fields}


def answer(renderer, text, parent, scaffold, **fields):
    """A node of a sampled message: the generation prompt, then the completion."""
    ids = [*renderer.tokenizer.encode_scaffold(text), renderer.get_stop_token_ids()[0]]
    mask = [False] * len(scaffold) + [True] * len(ids)
    message = {"role": "assistant", "content": text, "reasoning_content": None, "tool_calls": None}
    own = {"sampled": True, "mask": mask, "is_content": mask, "logprobs": [-0.5] * len(ids)}
    return node(message, parent, [*scaffold, *ids], **{**own, **fields})


@pytest.fixture
def record(renderer):
    """Two turns with an image each, then a second answer to the first image."""
    generation = renderer.tokenizer.encode_scaffold("<|im_start|>assistant\n")
    first = renderer.render([user(RED)]).token_ids
    second = renderer.tokenizer.encode_scaffold("\n") + renderer.render([user(BLUE)]).token_ids
    nodes = [
        node(user(RED), None, first),
        answer(renderer, "red", 0, generation),
        node(user(BLUE), 1, second),
        answer(renderer, "blue", 2, generation),
        answer(renderer, "crimson", 0, generation),
    ]
    calls = [
        {"node": 1, "finish_reason": "stop", "time": {"start": 10.0, "end": 11.5}, "error": None},
        {"node": 3, "finish_reason": "stop", "time": {"start": 12.0, "end": 13.0}, "error": None},
        {"node": 4, "finish_reason": "length", "time": {"start": 14.0, "end": 14.5}, "error": None},
    ]
    return {
        "id": "trace-1",
        "nodes": nodes,
        "calls": calls,
        "mm_token_type_id_map": {str(token): kind for token, kind in renderer.mm_token_type_id_map.items()},
        "rewards": {"right": {"score": 0.5, "weight": 2.0}, "unscored": None},
        "metrics": {"length": 3.0, "unscored": None},
        "ok": True,
        "errors": [],
        "stop_condition": "agent_completed",
        "task": {"key": "k", "data": {"idx": 7}},
        "agent": {"name": "agent", "trainable": True},
        "timing": {"start": 9.0, "agent": {"end": 15.0}, "scoring": {"end": 16.0}},
    }


def test_each_sampled_message_is_a_turn_and_shared_prompts_are_stored_once(renderer, record):
    trajectory = trajectory_from_trace(record, processors=renderer.processors, group_id="g")
    assert [item.parent for item in trajectory.nodes] == [-1, 0, 1, 2, 0]
    assert [turn.message["content"] for turn in trajectory.turns] == ["red", "blue", "crimson"]
    assert [turn.finish_reason.value for turn in trajectory.turns] == ["stop", "stop", "length"]
    assert [turn.seconds for turn in trajectory.turns] == [1.5, 1.0, 0.5]
    assert (trajectory.episode_id, trajectory.seed, trajectory.group_id, trajectory.forks) == ("trace-1", 7, "g", 1)
    for leaf, path in ((3, (0, 1, 2, 3)), (4, (0, 4))):
        expected = [token for index in path for token in record["nodes"][index]["token_ids"]]
        assert trajectory.token_ids(leaf).tolist() == expected
    assert trajectory.to_messages(3)[0]["role"] == "user"
    assert [message["role"] for message in trajectory.to_messages(3)] == ["user", "assistant"] * 2


def test_rewards_metrics_and_times_are_those_of_the_trace(renderer, record):
    trajectory = trajectory_from_trace(record, processors=renderer.processors)
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 1.0]
    info = trajectory.turns[-1].info
    assert info["rewards"] == {"right": {"score": 0.5, "weight": 2.0}}
    assert (info["stop_condition"], info["task"]) == ("agent_completed", {"index": 7, "key": "k"})
    assert trajectory.metrics == {"length": 3.0}
    assert (trajectory.started_at, trajectory.seconds) == (9.0, 7.0)
    assert trajectory.truncated  # the last call was cut off
    assert not trajectory.done


def test_images_are_found_by_their_placeholder_tokens(renderer, record):
    trajectory = trajectory_from_trace(record, processors=renderer.processors)
    prompt = renderer.render([user(RED)])
    (reference,) = trajectory.nodes[0].media
    assert [reference.placeholder] == prompt.multi_modal_data.mm_placeholders["image"]
    assert [reference.mm_hash] == prompt.multi_modal_data.mm_hashes["image"]
    assert len(trajectory.media(3)) == 2
    assert len(samples_from_trajectory(trajectory, advantage=1.0, processors=renderer.processors)) == 2


def test_json_and_msgpack_give_the_same_trajectory(renderer, record):
    for form in (json.loads(json.dumps(record)), msgpack.unpackb(msgpack.packb(record))):
        read = trajectory_from_trace(form, processors=renderer.processors)
        assert (
            read.token_ids(3).tolist()
            == trajectory_from_trace(record, processors=renderer.processors).token_ids(3).tolist()
        )


def test_experts_masks_and_advantages_become_extras(renderer, record):
    def packed(array):
        return {"__nd__": True, "dtype": str(array.dtype), "shape": list(array.shape), "data": array.tobytes()}

    record["nodes"] = record["nodes"][:2]
    for number, entry in enumerate(record["nodes"]):
        rows = np.full((len(entry["token_ids"]), 2, 1), number, np.uint8)
        entry["routed_experts"] = packed(rows)
    sampled = len(record["nodes"][1]["logprobs"])
    record["nodes"][1]["sampling_mask"] = {
        "ids": packed(np.arange(2 * sampled, dtype=np.int32)),
        "counts": packed(np.full(sampled, 2, np.int32)),
    }
    record["nodes"][1]["advantages"] = [0.25] * sampled
    trajectory = trajectory_from_trace(record, processors=renderer.processors)
    assert trajectory.extra(1, "routed_experts").shape == (len(trajectory.token_ids(1)), 2, 1)
    assert trajectory.nodes[1].extras["sampling_mask"].tolist() == [[2 * at, 2 * at + 1] for at in range(sampled)]
    assert trajectory.nodes[1].extras["advantages"].tolist() == [0.25] * sampled


def test_a_failed_rollout_keeps_its_turns_and_its_last_error(renderer, record):
    record |= {"ok": False, "errors": [{"type": "TaskError", "message": "scoring failed"}], "rewards": {"right": None}}
    trajectory = trajectory_from_trace(record, processors=renderer.processors)
    assert (trajectory.num_turns, trajectory.reward) == (3, 0.0)
    assert trajectory.error == "TaskError: scoring failed"
    assert not trajectory.done


def test_a_trace_without_attribution_has_tokens_and_no_messages(renderer, record):
    for entry in record["nodes"]:
        entry["is_content"] = []
    trajectory = trajectory_from_trace(record, processors=renderer.processors)
    assert trajectory.nodes[0].content is None
    assert trajectory.nodes[0].messages == ()
    assert len(trajectory.media(3)) == 2


def test_a_trace_with_images_needs_processors(record):
    with pytest.raises(RolloutsError, match=r"renderer\.processors"):
        trajectory_from_trace(record)


def test_processors_of_another_model_are_noticed(tmp_path, renderer, record):
    from rollouts.testing import tiny_qwen3_vl

    directory = tiny_qwen3_vl(tmp_path, weights=False)
    path = directory / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    settings["size"] = {"shortest_edge": 128 * 128, "longest_edge": 256 * 256}
    path.write_text(json.dumps(settings))
    with pytest.raises(TrajectoryError, match=r"nodes\[0\].message.content\[0\].*placeholder tokens"):
        trajectory_from_trace(record, processors=load_renderer(directory).processors)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda nodes: nodes[1].update(logprobs=[]), "nodes[1].tokens"),
        (lambda nodes: nodes[1].update(logprobs=["x"]), "nodes[1].logprobs"),
        (lambda nodes: nodes[1].update(mask=[*nodes[1]["mask"][:-1], False]), "nodes[1].mask"),
        (lambda nodes: nodes[1].update(mask=[True]), "nodes[1].mask"),
        (lambda nodes: nodes[1].update(token_ids=[[1]]), "nodes[1].token_ids"),
        (lambda nodes: nodes[1].update(parent=1), "nodes[1].parent"),
        (lambda nodes: nodes[1].update(parent="0"), "nodes[1].parent"),
        (lambda nodes: nodes.__setitem__(0, "x"), "nodes[0]"),
        (lambda nodes: nodes[0].update(message=None), "nodes[0]"),
        (lambda nodes: [each.update(token_ids=[], mask=[]) for each in nodes], "nodes"),
    ],
)
def test_what_contradicts_itself_is_named(renderer, record, change, place):
    change(record["nodes"])
    with pytest.raises(TrajectoryError) as caught:
        trajectory_from_trace(record, processors=renderer.processors)
    assert f": {place}: " in str(caught.value)


def test_something_else_than_a_trace_is_refused():
    with pytest.raises(TrajectoryError, match="not a trace"):
        trajectory_from_trace({"steps": []})
