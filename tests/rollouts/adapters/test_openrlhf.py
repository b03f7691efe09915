"""OpenRLHF's own Experience, made of our samples, and what its batching makes of it."""

import dataclasses

import numpy as np
import pytest
import torch

from renderers.media.item import TensorField
from renderers.vision.patches import normalised
from rollouts.training.adapters import AdapterError, openrlhf_experience


@pytest.fixture
def experience(load_without_init):
    return load_without_init(
        "openrlhf.trainer.ppo_utils.experience",
        *("openrlhf", "openrlhf.trainer", "openrlhf.trainer.ppo_utils", "openrlhf.utils"),
    )


def test_a_row_survives_its_own_splitting_and_batching(experience, make_sample):
    samples = [make_sample(3), make_sample(8, images=2)]
    whole = experience.Experience(**openrlhf_experience(samples, pad_id=0))
    items = experience.split_experience_batch(whole)
    batch = experience.make_experience_batch(experience.remove_padding_in_sequences(items)[::-1])
    for row, sample in enumerate(samples[::-1]):
        count = len(sample)
        assert batch.sequences[row, :count].tolist() == sample.token_ids.tolist()
        assert batch.attention_mask[row].sum() == count
        assert batch.action_mask[row, : count - 1].tolist() == sample.loss_mask[1:].tolist()
        assert batch.rollout_log_probs[row, : count - 1].tolist() == sample.logprobs[1:].tolist()
        assert batch.advantages[row, : count - 1].tolist() == sample.advantages[1:].tolist()
        assert batch.prompts[row] == sample.name
    assert batch.mm_train_inputs[1] is None
    floats = np.concatenate([normalised(item, "pixel_values") for item, _ in samples[1].media])
    assert torch.equal(batch.mm_train_inputs[0]["pixel_values"], torch.from_numpy(floats))
    assert batch.mm_train_inputs[0]["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 8]]
    assert batch.info["weight_spans"][1][0] == ("3", 0, 2)


def test_log_probabilities_line_up_with_those_that_its_actor_computes(make_sample, model):
    """Its actor takes the log-probabilities of sequences[:, 1:], as many columns as the action mask has."""
    sample = make_sample(2)
    fields = openrlhf_experience([sample, make_sample(6)], pad_id=0)
    with torch.no_grad():
        logits = model(input_ids=fields["sequences"], attention_mask=fields["attention_mask"]).logits
    computed = logits.log_softmax(-1)[:, :-1].gather(2, fields["sequences"][:, 1:, None])[..., 0]
    assert computed.shape == fields["action_mask"].shape == fields["rollout_log_probs"].shape
    trained = fields["sequences"][0, 1:][fields["action_mask"][0].bool()]
    assert trained.tolist() == sample.token_ids[sample.loss_mask].tolist()


def test_media_of_different_processors_and_pixels_without_a_scale_are_refused_by_name(make_sample):
    sample = make_sample(1, images=2)
    (item, first), second = sample.media
    other = dataclasses.replace(item, fields={**item.fields, "image_grid_thw": TensorField("flat")})
    with pytest.raises(AdapterError, match=r"episode-1/0: media: .* different tensors"):
        openrlhf_experience([dataclasses.replace(sample, media=((other, first), second))], pad_id=0)
    raw = dataclasses.replace(item, scale=None)
    with pytest.raises(AdapterError, match="episode-1/0: media: pixel_values: raw uint8 pixels without a scale"):
        openrlhf_experience([dataclasses.replace(sample, media=((raw, first), second))], pad_id=0)


def test_a_sampled_placeholder_token_is_refused_also_in_a_row_of_text(make_sample, literal_placeholder):
    token = literal_placeholder.token_ids[np.flatnonzero(literal_placeholder.loss_mask)[1]]
    text = make_sample(4)
    text.token_ids[np.flatnonzero(text.loss_mask)[0]] = token
    openrlhf_experience([text], pad_id=0)  # alone it has no images that could be misplaced
    with pytest.raises(AdapterError, match="episode-4/0: token_ids"):
        openrlhf_experience([make_sample(2, images=1), text], pad_id=0)
