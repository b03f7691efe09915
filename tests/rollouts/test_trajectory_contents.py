"""What a trajectory keeps beside tokens: messages, content, extras, pixels, provenance, and that it ends."""

from __future__ import annotations

import numpy as np
import pytest

from renderers import MediaSource, RenderedTokens
from rollouts import Completion, FinishReason, SamplingParams, StepResult, Trajectory, run_episode
from rollouts.engines.local import LocalEngine
from rollouts.errors import EpisodeError, InvalidTurnError, PixelMismatchError, TrajectoryFinishedError
from transport import decode, encode


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def image(seed: int):
    return {"type": "image", "image": picture(seed)}


def completion(*ids: int) -> Completion:
    return Completion(0, np.array(ids, np.int32), -np.ones(len(ids), np.float32), FinishReason.STOP)


class Gallery:
    """Shows one more picture each turn."""

    def __init__(self, turns: int = 3) -> None:
        self.left = turns
        self.shown: list = []

    def reset(self, seed):
        self.shown = [
            {"role": "system", "content": "Look."},
            {"role": "user", "content": [image(0), {"type": "text", "text": "One?"}]},
        ]
        return self.shown

    def step(self, assistant):
        self.left -= 1
        new = [{"role": "user", "content": [{"type": "text", "text": "More:"}, image(self.left)]}]
        self.shown = [*self.shown, assistant, *new]
        return StepResult(reward=1.0, messages=new, done=not self.left)


@pytest.fixture(scope="module")
def engine(tiny_model_dir):
    return LocalEngine.from_pretrained(tiny_model_dir)


async def played(engine, renderer, environment) -> Trajectory:
    sampling = SamplingParams(max_tokens=6, seed=0)
    return await run_episode(environment, engine=engine, renderer=renderer, sampling=sampling, max_turns=5)


def texts(messages):
    """Messages without their pictures, each of which is named by its place."""
    return [
        (m["role"], m["content"])
        if isinstance(m["content"], str)
        else (m["role"], [part.get("text", "picture") for part in m["content"]])
        for m in messages
    ]


async def test_messages_come_back_along_a_branch_with_the_sources_of_their_pictures(engine, renderer):
    environment = Gallery()
    trajectory = decode(encode(await played(engine, renderer, environment)))
    conversation = environment.shown[:-1]  # the last one was never shown to the model
    leaf = trajectory.turns[-1].node
    back = trajectory.to_messages(leaf)
    assert texts(back) == texts(conversation)
    held = [part["image"] for m in back if isinstance(m["content"], list) for part in m["content"] if "image" in part]
    assert all(isinstance(source, MediaSource) for source in held)
    assert [source.digest for source in held] == [reference.source.digest for reference in trajectory.media(leaf)]
    if trajectory.forks == 0:
        again = renderer.render(back[:-1], add_generation_prompt=True)
        assert again.multi_modal_data.mm_hashes["image"] == [r.mm_hash for r in trajectory.media(leaf)]


async def test_a_rendering_of_the_messages_given_back_is_the_prompt(engine, renderer):
    trajectory = await played(engine, renderer, Gallery(1))
    (turn,) = trajectory.turns
    prompt = renderer.render(trajectory.to_messages(turn.node)[:-1], add_generation_prompt=True)
    (branch,) = trajectory.branches()
    assert branch.nodes == (0, 1)
    assert branch.leaf == turn.node
    assert trajectory.nodes[0].token_ids.tolist() == prompt.token_ids
    assert trajectory.nodes[0].content.tolist() == prompt.is_content


async def test_pixels_are_made_again_with_absolute_ranges(engine, renderer):
    trajectory = await played(engine, renderer, Gallery())
    for leaf in trajectory.leaves():
        data = trajectory.multi_modal_data(leaf, renderer.processors)
        ids = trajectory.token_ids(leaf)
        markers = list(renderer.mm_token_type_id_map)
        for item, where in data.placed():
            assert np.isin(ids[where.offset : where.end], markers).all()
            assert item.num_tokens == where.length
    other = {"image": _Other(renderer.processors["image"])}
    with pytest.raises(PixelMismatchError):
        trajectory.multi_modal_data(trajectory.leaves()[0], other)


class _Other:
    """A processor with other numbers: the same source gets another name."""

    def __init__(self, processor):
        from dataclasses import replace

        from renderers import MediaStore
        from renderers.vision.qwen_vl import QwenVLProcessor

        config = replace(processor.config, min_pixels=4096)
        self.process = QwenVLProcessor(config, policy=processor.policy, store=MediaStore()).process


async def test_an_episode_says_what_made_it_and_how_long_it_took(engine, renderer):
    trajectory = decode(encode(await played(engine, renderer, Gallery())))
    made = trajectory.provenance
    assert made.engine == "LocalEngine"
    assert len(made.template) == 64
    assert made.processors == {kind: p.fingerprint for kind, p in renderer.processors.items()}
    assert {"mmrollouts", "pillow", "torch", "transformers"} <= made.packages.keys()
    assert trajectory.started_at > 1.7e9
    assert trajectory.seconds >= sum(turn.seconds for turn in trajectory.turns) > 0


async def test_a_finished_episode_cannot_change(engine, renderer):
    trajectory = await played(engine, renderer, Gallery(1))
    for change in (
        lambda: trajectory.add_turn(RenderedTokens([1]), completion(2), {"role": "assistant", "content": ""}),
        lambda: trajectory.pay(1.0, {}),
        lambda: setattr(trajectory, "done", False),
        lambda: setattr(trajectory, "finished", False),
    ):
        with pytest.raises(TrajectoryFinishedError, match=trajectory.episode_id):
            change()
    for node in trajectory.nodes:
        for column in (node.token_ids, node.sampled, node.logprobs):
            assert not column.flags.writeable
    assert decode(encode(trajectory)).finished
    trajectory.finish()


async def test_an_episode_that_breaks_off_says_why_and_keeps_its_turns(engine, renderer):
    class Breaking(Gallery):
        def step(self, assistant):
            if self.left == 2:
                return "no step result"
            return super().step(assistant)

    with pytest.raises(EpisodeError, match="StepResult") as caught:
        await played(engine, renderer, Breaking())
    assert caught.value.trajectory.finished
    assert "StepResult" in caught.value.trajectory.error
    assert len(caught.value.trajectory.turns) == 2


def test_extras_have_one_row_a_sampled_token():
    trajectory = Trajectory("e")
    experts = np.arange(12, dtype=np.uint16).reshape(3, 2, 2)
    extras = {"routed_experts": experts}
    say = {"role": "assistant", "content": ""}
    node = trajectory.add_turn(RenderedTokens([1, 2]), completion(3, 4, 5), say, extras=extras)
    back = decode(encode(trajectory)).nodes[node].extras["routed_experts"]
    assert back.dtype == np.uint16
    np.testing.assert_array_equal(back, experts)
    with pytest.raises(InvalidTurnError, match="routed_experts"):
        trajectory.add_turn(RenderedTokens([1]), completion(3), say, extras=extras)


def test_messages_that_are_not_the_prompts_are_refused(renderer):
    messages = [{"role": "user", "content": [image(1), {"type": "text", "text": "?"}]}]
    prompt = renderer.render(messages, add_generation_prompt=True)
    say = {"role": "assistant", "content": ""}
    with pytest.raises(InvalidTurnError, match="2 messages"):
        Trajectory("e").add_turn(prompt, completion(1), say, messages=[*messages, *messages])
    with pytest.raises(InvalidTurnError, match="more media than its messages"):
        Trajectory("e").add_turn(prompt, completion(1), say, messages=[{"role": "user", "content": "no picture"}])


def test_after_compaction_each_branch_has_its_own_messages(renderer):
    a, b = image(1), image(2)
    first = [{"role": "system", "content": "S"}, {"role": "user", "content": [a]}]
    compacted = [{"role": "system", "content": "S"}, {"role": "user", "content": [a, b]}]
    trajectory = Trajectory("e")
    for messages in (first, compacted):
        prompt = renderer.render(messages, add_generation_prompt=True)
        trajectory.add_turn(prompt, completion(5), {"role": "assistant", "content": "x"}, messages=messages)
    found = [texts(trajectory.to_messages(leaf)) for leaf in trajectory.leaves()]
    assert found == [texts([*messages, {"role": "assistant", "content": "x"}]) for messages in (first, compacted)]
