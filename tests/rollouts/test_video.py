"""Videos through rendering, sampling, trajectory, wire and training: what is scored is what was sampled."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForImageTextToText

from renderers import PlaceholderRange
from rollouts import GenerateRequest, SamplingParams, Trajectory
from rollouts.engines.local import LocalEngine
from rollouts.errors import InvalidRequestError
from rollouts.models.positions import mrope_positions
from rollouts.training import TrainingBatch, model_inputs, samples_from_trajectory, token_logprobs
from transport import decode, encode


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return AutoModelForImageTextToText.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(model):
    return LocalEngine(model)


def clip(frames, width=48, height=32, seed=0):
    return np.random.default_rng([frames, seed]).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def conversation(*seeds):
    parts = [{"type": "video", "video": clip(6, seed=seed), "fps": 2.0} for seed in seeds]
    image = {"type": "image", "image": clip(1)[0]}
    return [{"role": "user", "content": [*parts, image, {"type": "text", "text": "What?"}]}]


async def sampled(engine, renderer, seed=0):
    prompt = renderer.render(conversation(seed), add_generation_prompt=True)
    result = await engine.generate(
        GenerateRequest(prompt.token_ids, SamplingParams(max_tokens=8, seed=seed), prompt.multi_modal_data)
    )
    trajectory = Trajectory(f"episode {seed}")
    trajectory.add_turn(prompt, result.completions[0], {"role": "assistant", "content": ""})
    return trajectory


async def test_a_video_is_scored_as_it_was_sampled_and_as_transformers_scores_it(engine, renderer, model):
    trajectories = [decode(encode(await sampled(engine, renderer, seed))) for seed in range(6)]
    samples = []
    for trajectory in trajectories:
        rows = samples_from_trajectory(trajectory, advantage=1.0, processors=renderer.processors)
        # A random model samples literal placeholders too, which transformers cannot be given.
        markers = list(renderer.mm_token_type_id_map)
        samples += [row for row in rows if not np.isin(row.token_ids[row.loss_mask], markers).any()]
    assert len(samples) >= 3
    batch = TrainingBatch.from_samples(samples, pad_id=0)
    with torch.no_grad():
        ours = token_logprobs(model, batch)
        logits = model(**model_inputs(batch, model)).logits
    theirs = logits[:, :-1].log_softmax(-1).gather(2, batch.input_ids[:, 1:, None])[..., 0]
    mask = batch.loss_mask
    assert (ours[mask] - batch.logprobs[mask]).abs().max() < 1e-5
    assert (theirs[mask[:, 1:]] - batch.logprobs[mask]).abs().max() < 1e-5


async def test_another_video_gives_other_log_probabilities(engine, renderer, model):
    """The comparison above can fail: frames matter."""
    trajectory = await sampled(engine, renderer, 0)
    (sample,) = samples_from_trajectory(trajectory, advantage=1.0, processors=renderer.processors)
    other = renderer.render(conversation(5)).multi_modal_data.items_with_ranges()
    batch = TrainingBatch.from_samples([sample], pad_id=0)
    pairs = zip(sample.media, other, strict=True)
    swapped = [(new if new.modality == "video" else old, where) for (old, where), (new, _) in pairs]
    object.__setattr__(sample, "media", tuple(swapped))
    with torch.no_grad():
        ours = token_logprobs(model, batch)
    assert (ours[batch.loss_mask] - batch.logprobs[batch.loss_mask]).abs().max() > 1e-3


async def test_a_range_that_does_not_hold_the_video_is_refused(engine, renderer):
    prompt = renderer.render(conversation(0), add_generation_prompt=True)
    media = prompt.multi_modal_data
    (where,) = media.mm_placeholders["video"]
    media.mm_placeholders["video"] = [PlaceholderRange(where.offset, where.length)]  # takes the time stamps for frames
    with pytest.raises(InvalidRequestError, match="video"):
        await engine.generate(GenerateRequest(prompt.token_ids, SamplingParams(max_tokens=1), media))


class Video:
    modality = "video"

    def __init__(self, frames, height, width):
        self.grid = np.array([frames, 2 * height, 2 * width])
        self.num_tokens = frames * height * width

    def __getitem__(self, name):
        assert name == "video_grid_thw"
        return self.grid


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(0, 4))
def test_positions_of_frames_are_those_of_transformers(model, frames, height, width, stamp, tail):
    """Frames stand between their time stamps."""
    tokens = height * width
    item = Video(frames, height, width)
    runs = tuple((stamp + frame * (stamp + tokens), (frame + 1) * (stamp + tokens)) for frame in range(frames))
    where = PlaceholderRange(2, runs[-1][1], runs)
    types = [0, 0, *([0] * stamp + [2] * tokens) * frames, *[0] * tail]
    expected, deltas = model.model.get_rope_index(
        torch.zeros(1, len(types), dtype=torch.long),
        torch.tensor([types]),
        video_grid_thw=torch.tensor(item.grid[None]),
    )
    positions, following = mrope_positions(len(types), [(item, where)], 2)
    assert positions.tolist() == expected[:, 0].tolist()
    assert following == int(deltas) + len(types)
