"""Sampling with top_p, top_k and others: the ids that were kept are recorded, and the trainer computes among them."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from renderers import load_renderer
from rollouts import EpisodeSpec, LocalEngine, SamplingParams, StepResult, run_episodes
from rollouts.engines.kept_ids import LEFT_OUT, with_kept_ids
from rollouts.engines.protocol import Completion, FinishReason, TopLogprobs
from rollouts.errors import SampleError, TrajectoryError
from rollouts.models.loading import load_model
from rollouts.training import (
    TrainingBatch,
    model_inputs,
    replace_tokens,
    samples_from_trajectory,
    token_logprobs,
    token_logprobs_and_entropy,
)
from rollouts.training.adapters import dataset_row, sample_from_row, tinker_datum
from rollouts.training.trainer import Trainer, datum_from_sample

# The ids that were kept, from the likeliest tokens of one place: ids 7, 5, 3 with the probabilities 0.5, 0.25, 0.125.


def kept(sampling, logprobs=(0.5, 0.25, 0.125), *, raw, token=7):
    values = np.array([[np.log(p) if p else LEFT_OUT for p in logprobs]], np.float32)
    top = TopLogprobs(np.array([[7, 5, 3]], np.int32), values)
    own = values[:, [7, 5, 3].index(token)]
    one = Completion(0, np.array([token], np.int32), own, FinishReason.LENGTH, top_logprobs=top)
    masks = with_kept_ids(one, SamplingParams(**sampling), raw=raw).sampling_masks
    return None if masks is None else masks[0].tolist()


@pytest.mark.parametrize(
    ("sampling", "logprobs", "raw", "expected"),
    [
        ({}, (0.5, 0.25, 0.125), True, None),
        ({"top_k": 2}, (0.5, 0.25, 0.125), True, [7, 5]),
        ({"top_k": 3}, (0.5, 0.25, 0.125), False, [7, 5, 3]),
        ({"top_k": 1}, (0.7, 0.3, 0), True, [7]),  # raw: the model itself gave the third nearly nothing
        ({"top_k": 4}, (0.5, 0.25, 0.125), True, []),  # the fourth is not among the likeliest that were asked for
        ({"top_p": 0.6}, (0.5, 0.25, 0.125), True, [7, 5]),
        ({"top_p": 0.8}, (0.5, 0.25, 0.125), True, []),  # more ids behind 3 may be kept
        ({"top_p": 0.6}, (0.5, 0.25, 0.125), False, []),  # of processed log-probabilities, or of raw ones
        ({"top_p": 0.6}, (0.7, 0.3, 0), False, [7, 5]),  # processed: the third was left out
        ({"top_p": 0.6, "top_k": 2}, (0.5, 0.25, 0.125), True, []),  # servers combine them in different orders
        ({"top_p": 0.6, "top_k": 2}, (0.7, 0.3, 0), False, [7, 5]),
        ({"extra": {"min_p": 0.4}}, (0.5, 0.25, 0.125), True, []),
        ({"extra": {"min_p": 0.4}}, (0.7, 0.3, 0), False, [7, 5]),
        ({"top_k": 2, "temperature": 0.5}, (0.5, 0.25, 0.125), True, []),
    ],
)
def test_the_kept_ids_are_known_where_the_likeliest_tokens_show_the_cut(sampling, logprobs, raw, expected):
    assert kept(sampling, logprobs, raw=raw) == expected


def test_a_token_outside_of_the_kept_ids_shows_that_they_are_not_known_unless_it_is_as_likely_as_the_last():
    assert kept({"top_k": 2}, raw=True, token=3) == []
    assert kept({"top_k": 2}, (0.5, 0.25, 0.25), raw=True, token=3) == [7, 3]
    assert kept({"top_p": 0.6}, (0.5, 0.25, 0.25), raw=True, token=3) == [7, 3]


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize(
    ("reported", "temperature", "expected"),
    [([5, 7], 1.0, [5, 7]), ([5, 7, 9], 1.0, []), ([5, 7], 0.5, []), ([5, 3], 1.0, [])],
)
def test_kept_ids_of_a_server_are_taken_where_its_log_probabilities_can_be_made_those_among_them(
    reported, temperature, expected, raw
):
    """vLLM reports them with raw log-probabilities too: all have to be among the likeliest, for their sum."""
    values = np.log(np.array([[0.5, 0.25, 0.125]], np.float32))
    top = TopLogprobs(np.array([[7, 5, 3]], np.int32), values)
    masks = (np.array(reported, np.int32),)
    one = Completion(0, np.array([7], np.int32), values[:, 0], FinishReason.LENGTH, None, (), None, masks, top)
    (found,) = with_kept_ids(one, SamplingParams(top_k=3, top_p=0.8, temperature=temperature), raw=raw).sampling_masks
    assert found.tolist() == expected
    (without,) = with_kept_ids(replace(one, top_logprobs=None), SamplingParams(top_k=3), raw=raw).sampling_masks
    assert without.tolist() == []


# Episodes of a `LocalEngine`, whose log-probabilities are raw.


class Greeting:
    """Two turns about one image."""

    def reset(self, seed):
        self.turns = 0
        image = np.random.default_rng(seed).integers(0, 256, (32, 64, 3), np.uint8)
        return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "Hm?"}]}]

    def step(self, message):
        self.turns += 1
        return StepResult([{"role": "user", "content": "And?"}], reward=0.0, done=self.turns == 2)


def played(directory, model=None, **options):
    renderer = load_renderer(directory)

    async def play():
        async with LocalEngine(model or load_model(directory)) as engine:
            specs = [EpisodeSpec(0, sampling_seed=seed, group_id="g") for seed in range(2)]
            sampling = SamplingParams(max_tokens=7, **options)
            return await run_episodes(Greeting, specs, engine=engine, renderer=renderer, sampling=sampling, max_turns=2)

    return asyncio.run(play()), renderer.processors


CUT = [{"top_k": 5, "top_logprobs": 5}, {"top_p": 0.4, "top_logprobs": 288}]


def samples_of(episodes, processors, **options):
    return [
        sample
        for number, episode in enumerate(episodes)
        for sample in samples_from_trajectory(episode, advantage=0.5 - number, processors=processors, **options)
    ]


@pytest.fixture(scope="module", params=CUT, ids=["top-k", "top-p"])
def samples(request, tiny_model_dir):
    return samples_of(*played(tiny_model_dir, **request.param))


def plain(model, sample):
    """log p of each trained token among the kept ids, from all logits of the model's own forward."""
    logits = model(**model_inputs(TrainingBatch.from_samples([sample], pad_id=0), model), use_cache=False).logits[0]
    found = []
    for place in np.flatnonzero(sample.loss_mask):
        ids = [each for each in sample.sampling_mask[place].tolist() if each >= 0]
        among = torch.log_softmax(logits[place - 1, ids].float(), -1)
        found.append((among[ids.index(sample.token_ids[place])], -(among.exp() * among).sum()))
    return [torch.stack(column) for column in zip(*found, strict=True)]


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("share", [True, False])
def test_the_trainer_s_log_probabilities_are_those_among_the_kept_ids(samples, tiny_model_dir, layout, share):
    model = load_model(tiny_model_dir)
    batch = TrainingBatch.from_samples(samples, pad_id=0, layout=layout)
    with torch.no_grad():
        found = token_logprobs(model, batch, share_prefixes=share)
        whole = [replace(sample, sampling_mask=None) for sample in samples]
        without = token_logprobs(model, TrainingBatch.from_samples(whole, pad_id=0, layout=layout))
    assert (found - batch.logprobs)[batch.loss_mask].abs().max() < 1e-5
    assert (without - batch.logprobs)[batch.loss_mask].abs().min() > 1e-2


def test_gradients_and_entropy_are_those_of_the_distribution_among_the_kept_ids(samples, tiny_model_dir):
    model = load_model(tiny_model_dir)
    batch = TrainingBatch.from_samples(samples, pad_id=0)
    found = token_logprobs_and_entropy(model, batch)
    weights = torch.linspace(-1, 1, int(batch.loss_mask.sum()))
    gradients, values = [], []
    for logprobs, entropy in (
        (found.logprobs[batch.loss_mask], found.entropy[batch.loss_mask]),
        map(torch.cat, zip(*(plain(model, sample) for sample in samples), strict=True)),
    ):
        model.zero_grad()
        (weights * logprobs + weights.flip(0) * entropy).sum().backward()
        gradients.append({name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None})
        values.append(torch.stack([logprobs, entropy]).detach())
    torch.testing.assert_close(*values, atol=1e-5, rtol=1e-5)
    for name, value in gradients[0].items():
        torch.testing.assert_close(value, gradients[1][name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo"])
def test_a_trainer_computes_among_the_kept_ids_of_samples_beside_others(samples, tiny_model_dir, loss):
    trainer = Trainer.from_pretrained(tiny_model_dir, device="cpu")
    trainer.create_model("policy", lora=None)
    other = replace(samples[0], sampling_mask=None)
    data = [datum_from_sample(sample, loss) for sample in (*samples, other)]
    result = trainer.forward_backward("policy", data, loss)
    for sample, logprobs in zip(samples, result.logprobs, strict=False):
        np.testing.assert_allclose(logprobs[sample.loss_mask[1:]], sample.logprobs[sample.loss_mask], atol=1e-5)
    assert np.abs(result.logprobs[-1] - other.logprobs[1:])[other.loss_mask[1:]].min() > 1e-2
    wrong = replace(data[0], inputs={**data[0].inputs, "sampling_mask": data[0].inputs["sampling_mask"] + 9999})
    with pytest.raises(SampleError, match=r"data\[0\]: sampling_mask has \d+; the ids of the model are from 0 to 287"):
        trainer.forward("policy", [wrong], loss)


@pytest.mark.parametrize(
    ("change", "reason"), [(lambda ids, own: [own, own], "has an id twice"), (lambda ids, own: [7, -1], "lacks its id")]
)
def test_kept_ids_that_lack_the_token_or_name_one_twice_are_refused(samples, tiny_model_dir, change, reason):
    sample = samples[0]
    place = int(np.flatnonzero(sample.loss_mask & (sample.token_ids != 7))[0])
    mask = np.full((len(sample), 2), -1, np.int32)
    mask[place] = change(mask, sample.token_ids[place])
    with pytest.raises(SampleError, match=f"the sampling_mask of token {place} {reason}"):
        replace(sample, sampling_mask=mask)
    trainer = Trainer.from_pretrained(tiny_model_dir, device="cpu")
    trainer.create_model("policy", lora=None)
    datum = datum_from_sample(sample, "ppo")
    wrong = replace(datum, inputs={**datum.inputs, "sampling_mask": mask[1:]})
    with pytest.raises(SampleError, match=rf"data\[0\]: the sampling_mask of token {place - 1} {reason}"):
        trainer.forward("policy", [wrong], "ppo")


def test_episodes_whose_kept_ids_are_not_known_are_refused_or_marked(tiny_model_dir):
    episodes, processors = played(tiny_model_dir, top_p=0.4)
    with pytest.raises(TrajectoryError, match=r"token 0 of node 1 was sampled with .* pass unknown_kept='keep'"):
        samples_of(episodes, processors)
    (sample, _) = samples_of(episodes, processors, unknown_kept="keep")
    assert sample.sampling_mask.shape == (len(sample), 0)
    batch = TrainingBatch.from_samples([sample], pad_id=0)
    with torch.no_grad():
        difference = token_logprobs(load_model(tiny_model_dir), batch) - batch.logprobs
    assert difference[batch.loss_mask].abs().max() < 1e-5  # both among all ids


def test_of_tokens_that_are_as_likely_as_the_last_that_is_kept_any_may_be_sampled(tiny_model_dir):
    """As often with logits of bfloat16, of which many are equal."""
    model = load_model(tiny_model_dir)
    head = model.get_output_embeddings().weight.data
    head[1::2] = head[::2]
    samples = samples_of(*played(tiny_model_dir, model, top_k=3, top_logprobs=3))
    batch = TrainingBatch.from_samples(samples, pad_id=0)
    with torch.no_grad():
        found = token_logprobs(model, batch)
    assert (found - batch.logprobs)[batch.loss_mask].abs().max() < 1e-5


def test_tokens_put_before_a_sample_move_its_kept_ids(samples):
    sample = samples[0]
    longer = replace_tokens(sample, 0, 0, [7, 8])
    np.testing.assert_array_equal(longer.sampling_mask[2:], sample.sampling_mask)
    assert (longer.sampling_mask[:2] == -1).all()


def test_other_trainers_take_no_sample_with_kept_ids_and_rows_of_datasets_keep_them(samples, tiny_model_dir):
    with pytest.raises(SampleError, match="take no sampling_mask; sample without top_p"):
        tinker_datum(samples[0], omit=("top_logprobs", "weight_spans"))
    again = sample_from_row(dataset_row(samples[0]), load_renderer(tiny_model_dir).processors)
    np.testing.assert_array_equal(again.sampling_mask, samples[0].sampling_mask)
