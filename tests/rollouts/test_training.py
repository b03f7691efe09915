"""Samples, batches, model inputs, log-probabilities: what the trainer sees is what the sampler saw."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForImageTextToText

from renderers import PlaceholderRange, RenderedTokens, build_training_samples, load_renderer
from renderers.vision.qwen_vl import QwenVLProcessor
from rollouts import SamplingParams, StepResult, run_episode
from rollouts.engines.local import LocalEngine
from rollouts.errors import PixelMismatchError, SampleError, UnsupportedModelError
from rollouts.models.qwen3_vl import mrope_positions
from rollouts.training import (
    TensorList,
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
    return sample_from_rendered(renderer.render(conversation(text, images, answer)), name=name)


def row(ids, mask, **columns):
    count = len(ids)
    columns = {"logprobs": np.zeros(count, np.float32), "advantages": np.zeros(count, np.float32), **columns}
    return TrainingSample(np.array(ids, np.int32), np.array(mask, bool), name="r", **columns)


# Samples.


def test_a_supervised_sample_trains_the_answer_and_its_stop_token_only(renderer):
    drawn = sample(renderer, answer="42")
    trained = drawn.token_ids[drawn.loss_mask].tolist()
    assert renderer.tokenizer.decode(trained) == "42<|im_end|>"


def test_trained_messages_can_be_chosen(renderer):
    messages = [*conversation("a", answer="wrong"), *conversation("b", answer="right")]
    drawn = sample_from_rendered(renderer.render(messages), trained_messages={3})
    assert renderer.tokenizer.decode(drawn.token_ids[drawn.loss_mask].tolist()) == "right<|im_end|>"


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


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"logprobs": np.zeros(2, np.float32)}, "logprobs has 2 values for 3 tokens"),
        ({"advantages": np.zeros(4, np.float32)}, "advantages has 4 values for 3 tokens"),
        ({"logprobs": np.array([0, np.nan, 0], np.float32)}, "token 1 is trained and its log-probability nan"),
        (
            {"advantages": np.array([0, 1, np.nan], np.float32)},
            "token 2 is trained and its advantage nan is not a finite number",
        ),
    ],
)
def test_a_sample_that_contradicts_itself_is_refused(columns, words):
    with pytest.raises(SampleError, match=words):
        row([1, 2, 3], [False, True, True], **columns)


def test_the_first_token_cannot_be_trained():
    with pytest.raises(SampleError, match="no token before it predicts it"):
        row([1, 2], [True, True])


def test_an_image_that_does_not_fit_its_range_is_refused(renderer):
    rendered = renderer.render(conversation("x", [random_image(1)]))
    ((item, where),) = rendered.multi_modal_data.items_with_ranges()
    for bad in (PlaceholderRange(where.offset, where.length - 1), PlaceholderRange(len(rendered) - 1, where.length)):
        with pytest.raises(SampleError, match=r"feature tokens at|outside of"):
            row(rendered.token_ids, np.zeros(len(rendered), bool), media=((item, bad),))


# Batches.


def test_rows_with_and_without_images_mix_and_absence_is_explicit(renderer):
    batch = TrainingBatch.from_samples(
        [sample(renderer, "text only"), sample(renderer, "one", [random_image(1)]), sample(renderer, "no")], pad_id=0
    )
    assert batch.has_media.tolist() == [False, True, False]
    pixels = batch.media_tensors("pixel_values")
    assert pixels[0] is None
    assert pixels[2] is None
    assert pixels.cat().shape == (16, 384)
    assert pixels.cat().dtype == torch.uint8


def test_padding_is_masked_and_pixels_are_neither_padded_nor_copied(renderer):
    long, short = sample(renderer, "a long question, and then some"), sample(renderer, "x", [random_image(1)])
    batch = TrainingBatch.from_samples([long, short], pad_id=9)
    padding = ~batch.attention_mask
    assert padding.sum() == len(long) - len(short)
    assert (batch.input_ids[padding] == 9).all()
    assert not batch.loss_mask[padding].any()
    ((item, _),) = short.media
    one = TrainingBatch.from_samples([short], pad_id=9).media_tensors("pixel_values")[0]
    assert one.numel() == item["pixel_values"].size


def test_splitting_pads_each_part_to_its_own_width_and_keeps_order(renderer):
    samples = [sample(renderer, "x" * n, name=str(n)) for n in (1, 2, 50)]
    parts = TrainingBatch.from_samples(samples, pad_id=0).chunk(2)
    assert [[s.name for s in part.samples] for part in parts] == [["1", "2"], ["50"]]
    assert parts[0].input_ids.shape[1] == len(samples[1])


def test_an_empty_batch_is_an_error_with_the_usual_cause():
    with pytest.raises(
        SampleError, match=r"^a batch needs at least one .* episodes .* failed .* look at `episode.error`"
    ):
        TrainingBatch.from_samples([], pad_id=0)
    with pytest.raises(SampleError, match=r"^a batch needs a list of TrainingSample, not None"):
        TrainingBatch.from_samples(None, pad_id=0)


def test_a_tensor_list_slices_and_concatenates_its_tensors():
    rows = TensorList([torch.ones(2, 3, dtype=torch.int64), None, torch.zeros(1, 3, dtype=torch.int64)])
    assert [r is None for r in rows[1:]] == [True, False]
    assert rows.cat().shape == (3, 3)
    assert TensorList([None, None]).cat() is None
    assert len(rows[5:]) == 0
    assert rows[-1].shape == (1, 3)


# Positions.


class Block:
    """As much of a media item as positions need."""

    modality = "image"

    def __init__(self, time, height, width):
        self.grid = np.array([time, height, width])
        self.num_tokens = time * height * width // 4

    def __getitem__(self, name):
        return self.grid


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
        item = Block(1, 2 * height, 2 * width)
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


def test_adjacent_images_are_two_blocks():
    placed = [(Block(1, 4, 4), PlaceholderRange(0, 4)), (Block(1, 4, 4), PlaceholderRange(4, 4))]
    positions, following = mrope_positions(9, placed, 2)
    assert positions.tolist() == [
        [0, 0, 0, 0, 2, 2, 2, 2, 4],
        [0, 0, 1, 1, 2, 2, 3, 3, 4],
        [0, 1, 0, 1, 2, 3, 2, 3, 4],
    ]
    assert following == 5


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


def test_gradients_equal_those_of_transformers_own_forward(model, renderer):
    batch = mixed_batch(renderer)
    gradients = []
    for logprobs in (token_logprobs(model, batch), stock_logprobs(model, batch)):
        model.zero_grad()
        logprobs.sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    model.zero_grad()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-4, rtol=1e-4, msg=name)


def test_an_all_text_batch_needs_no_vision_tower(model, renderer):
    batch = TrainingBatch.from_samples([sample(renderer, "text")], pad_id=256)
    assert "pixel_values" not in model_inputs(batch, model)
    assert (token_logprobs(model, batch)[batch.loss_mask] < 0).all()


def with_sampled_placeholder(renderer, images):
    """A row in which the policy sampled the placeholder token itself."""
    rendered = renderer.render(conversation("x", images)[:1], add_generation_prompt=True)
    said = [next(iter(renderer.mm_token_type_id_map)), 65, renderer.get_stop_token_ids()[0]]
    ids = [*rendered.token_ids, *said]
    mask = np.arange(len(ids)) >= len(rendered)
    return row(ids, mask, media=tuple(rendered.multi_modal_data.items_with_ranges())), len(rendered)


@pytest.mark.parametrize("images", [[], [random_image(1)]])
def test_a_sampled_literal_placeholder_is_scored_as_the_text_token_it_is(model, renderer, images):
    literal, start = with_sampled_placeholder(renderer, images)
    scored = token_logprobs(model, TrainingBatch.from_samples([literal], pad_id=256)).detach()[0]

    # The same prefix without the placeholder gives the same log-probability of sampling it.
    prefix = TrainingBatch.from_samples(
        [row(literal.token_ids[: start + 1], literal.loss_mask[: start + 1], media=literal.media)], pad_id=256
    )
    assert torch.isclose(scored[start], token_logprobs(model, prefix).detach()[0, start], atol=1e-5)
    assert (scored[start:] < 0).all()


def test_model_inputs_refuse_a_sampled_literal_placeholder_and_name_the_token(model, renderer):
    literal, start = with_sampled_placeholder(renderer, [random_image(1)])
    with pytest.raises(SampleError, match=f"position {start} has id 268, a placeholder token outside every image"):
        model_inputs(TrainingBatch.from_samples([literal], pad_id=256), model)


def test_what_is_no_model_of_transformers_is_refused_by_name(renderer):
    batch = TrainingBatch.from_samples([sample(renderer)], pad_id=0)
    for use in (token_logprobs, lambda model, batch: model_inputs(batch, model)):
        with pytest.raises(UnsupportedModelError, match=r"'Linear': it is no model of transformers \(tried: config"):
            use(torch.nn.Linear(1, 1), batch)


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
    assert report.kl < 1e-9


@pytest.mark.slow
def test_swapped_images_show_in_the_mismatch(model, renderer, episodes):
    """The planted fault: right ids, right shapes, wrong pixels."""
    first, second = (samples_from_trajectory(t, advantage=1.0, processors=renderer.processors)[0] for t in episodes[:2])
    swapped = [(other, where) for (_, where), (other, _) in zip(first.media, second.media, strict=True)]
    report = trained(model, [replace(first, media=tuple(swapped))])
    assert report.max_abs > 1e-3
    assert {group.label for group in report.by_modality} == {"image"}
    assert report.worst == first.name


@pytest.mark.slow
def test_pixels_derived_by_another_processor_are_refused(renderer, episodes):
    ours = renderer.processors["image"]
    other = QwenVLProcessor(replace(ours.config, min_pixels=4096), policy=ours.policy, store=ours.store)
    with pytest.raises(PixelMismatchError, match="fingerprint"):
        samples_from_trajectory(episodes[0], advantage=1.0, processors={"image": other})


def test_a_node_shared_by_two_branches_is_trained_once(renderer, episodes):
    finished = decode(encode(episodes[0]))
    trajectory = replace(finished, nodes=list(finished.nodes), turns=list(finished.turns), finished=False)
    first = trajectory.turns[0]
    shared = trajectory.token_ids(first.node).tolist()
    completion = trajectory.nodes[trajectory.turns[1].node]
    from rollouts import Completion, FinishReason

    again = Completion(0, completion.token_ids, completion.logprobs, FinishReason.STOP)
    trajectory.add_turn(RenderedTokens([*shared, 65, 66]), again, {"role": "assistant", "content": "x"})

    samples = samples_from_trajectory(trajectory, advantage=1.0, processors=renderer.processors)
    assert len(samples) == 2
    sampled = sum(len(node.logprobs) for node in trajectory.nodes)
    assert sum(int(s.loss_mask.sum()) for s in samples) == sampled
    assert all((s.advantages[~s.loss_mask] == 0).all() for s in samples)


@pytest.mark.parametrize("samples", [5, [], [5], None])
def test_a_batch_of_other_values_than_samples_is_refused(samples):
    with pytest.raises(SampleError, match="TrainingSample"):
        TrainingBatch.from_samples(samples, pad_id=0)
