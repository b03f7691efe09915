"""Samples, batches, model inputs, log-probabilities: what the trainer sees is what the sampler saw."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_samples import Block
from transformers import AutoModelForImageTextToText

from renderers import PlaceholderRange, build_training_sample, build_training_samples, load_renderer
from rollouts import SamplingParams, StepResult, run_episode
from rollouts.engines.local import LocalEngine
from rollouts.errors import ArgumentError
from rollouts.models.positions import mrope_positions
from rollouts.training import (
    TrainingBatch,
    TrainingSample,
    mismatch_report,
    model_inputs,
    sample_from_rendered,
    samples_from_trajectory,
    token_logprobs,
)
from transport import decode, encode


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return AutoModelForImageTextToText.from_pretrained(tiny_model_dir, dtype=torch.float32)


def random_image(seed: int, height: int = 32, width: int = 32) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def conversation(text: str, images=(), answer="7"):
    parts = [{"type": "image", "image": image} for image in images] + [{"type": "text", "text": text}]
    return [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]


def sample(renderer, text="Which?", images=(), answer="7", name="s"):
    return sample_from_rendered(build_training_sample(renderer, conversation(text, images, answer)), name=name)


def row(ids, mask, **columns):
    count = len(ids)
    columns = {"logprobs": np.zeros(count, np.float32), "advantages": np.zeros(count, np.float32), **columns}
    return TrainingSample(np.array(ids, np.int32), np.array(mask, bool), name="r", **columns)


# Samples.


def test_a_supervised_sample_is_made_of_a_built_one_alone(renderer):
    rendered = renderer.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    for other in (rendered, [rendered]):
        with pytest.raises(ArgumentError, match="pass a sample of build_training_sample"):
            sample_from_rendered(other)


def test_a_supervised_sample_has_the_loss_mask_of_a_training_sample_of_the_renderer(renderer):
    grey = np.full((32, 32, 3), 90, np.uint8)
    messages = [*conversation("a", [grey], answer="wrong"), *conversation("b", answer="right")]
    (built,) = build_training_samples(renderer, messages, message_loss_mask=[True, False, True, True])
    drawn = sample_from_rendered(built, name="row 1")
    assert drawn.token_ids.tolist() == built.token_ids
    assert drawn.loss_mask.tolist() == built.loss_mask
    assert renderer.tokenizer.decode(drawn.token_ids[drawn.loss_mask].tolist()) == "right<|im_end|>"
    assert [(item.mm_hash, at.offset) for item, at in drawn.media] == [
        (item.mm_hash, at.offset) for item, at in built.multi_modal_data.items_with_ranges()
    ]
    assert drawn.name == "row 1"


# Positions.


LAYOUTS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4)), min_size=0, max_size=4).flatmap(
    lambda blocks: st.tuples(st.just(blocks), st.integers(0, 5))
)


@settings(max_examples=60, deadline=None)
@given(LAYOUTS)
def test_positions_are_those_of_transformers(model, layout):
    """Between two images there is always text here: transformers groups by token type and would merge neighbours."""
    blocks, tail = layout
    placed, length = [], 0
    types: list[int] = []
    for gap, height, width in blocks:
        item = Block(2 * height, 2 * width)
        placed.append((item, PlaceholderRange(length + gap, item.num_tokens)))
        types += [0] * gap + [1] * item.num_tokens
        length += gap + item.num_tokens
    types += [0] * tail
    if not types:
        return
    grids = torch.tensor(np.array([item.grid for item, _ in placed])) if placed else None
    expected, deltas = model.model.get_rope_index(
        torch.zeros(1, len(types), dtype=torch.long), torch.tensor([types]), image_grid_thw=grids
    )
    positions, following = mrope_positions(len(types), placed, 2)
    assert positions.tolist() == expected[:, 0].tolist()
    assert following == int(deltas) + len(types)


# Model inputs and log-probabilities.


def mixed_batch(renderer):
    return TrainingBatch.from_samples(
        [
            sample(renderer, "just text", answer="a longer answer"),
            sample(renderer, "one", [random_image(1)]),
            sample(renderer, "two", [random_image(2, 48, 64), random_image(1)], answer="12"),
            sample(renderer, "one", [random_image(1)]),
        ],
        pad_id=256,
    )


def stock_logprobs(model, batch):
    """By transformers' own forward on `model_inputs`."""
    logits = model(**model_inputs(batch, model), use_cache=False).logits
    scored = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    return torch.where(batch.loss_mask[:, 1:], scored, 0.0)


def test_logprobs_equal_those_of_transformers_own_forward_on_model_inputs(model, renderer):
    batch = mixed_batch(renderer)
    with torch.no_grad():
        ours, theirs = token_logprobs(model, batch), stock_logprobs(model, batch)
    assert (ours[:, 1:] - theirs).abs().max() < 1e-5
    assert (ours[batch.loss_mask] < 0).all()
    assert (ours[~batch.loss_mask] == 0).all()


# Sampler to trainer, over the wire.


class TwoLooks:
    """Two turns, an image each."""

    def __init__(self, index):
        self.index = index

    def reset(self, seed):
        return conversation("Which?", [random_image(self.index)])[:1]

    def step(self, assistant):
        return StepResult(conversation("Again?", [random_image(self.index + 100, 48, 32)])[:1])


@pytest.fixture(scope="module")
def episodes(tiny_model_dir):
    engine, renderer = LocalEngine.from_pretrained(tiny_model_dir), load_renderer(tiny_model_dir)

    async def play():
        sampling = SamplingParams(max_tokens=6)
        return await asyncio.gather(
            *(
                run_episode(
                    TwoLooks(i),
                    engine=engine,
                    renderer=renderer,
                    sampling=replace(sampling, seed=i),
                    max_turns=2,
                    episode_id=f"e{i}",
                )
                for i in range(6)
            )
        )

    return decode(encode(asyncio.run(play())))


def trained(model, samples):
    batch = TrainingBatch.from_samples(samples, pad_id=256)
    with torch.no_grad():
        logprobs = token_logprobs(model, batch)
    return mismatch_report(batch, logprobs)


def test_sampler_and_trainer_agree_on_multi_turn_image_episodes_that_crossed_the_wire(model, renderer, episodes):
    samples = [s for t in episodes for s in samples_from_trajectory(t, advantage=1.0, processors=renderer.processors)]
    report = trained(model, samples)
    assert report.tokens == sum(len(node.logprobs) for t in episodes for node in t.nodes)
    assert report.max_abs < 1e-5
    assert report.statistics.k3 < 1e-9


@pytest.mark.slow
def test_swapped_images_show_in_the_mismatch(model, renderer, episodes):
    """The planted fault: right ids, right shapes, wrong pixels."""
    first, second = (samples_from_trajectory(t, advantage=1.0, processors=renderer.processors)[0] for t in episodes[:2])
    swapped = [(other, where) for (_, where), (other, _) in zip(first.media, second.media, strict=True)]
    report = trained(model, [replace(first, media=tuple(swapped))])
    assert report.max_abs > 1e-3
    assert {group.label for group in report.by_modality} == {"image"}
    assert report.outliers[0].sample == first.name
