"""What one sampling request gives: where its sequences end, how many there are, seeds, the likeliest tokens."""

import numpy as np
import pytest
from family_rows import loaded_family

from rollouts.engines.local.batch import Batch
from rollouts.errors import ArgumentError, ContextLengthError
from rollouts.tinker.local_sampler import LocalSampler
from rollouts.tinker.requests import ModelInput, SampleRequest
from rollouts.tinker.sampler import Endings
from rollouts.training.trainer import Trainer

TEXT = ModelInput(np.arange(70, 90), ())


@pytest.fixture(scope="module")
def family():
    return loaded_family("qwen3_vl")


@pytest.fixture(scope="module")
def trainer(family):
    return Trainer.from_pretrained(family.directory, device="cpu")


@pytest.fixture
async def sampler(trainer):
    sampler = LocalSampler(trainer)
    sampler._endings = Endings((), sampler._endings.decode)  # each test says what ends a sequence
    yield sampler
    await sampler.close()


async def sampled(sampler, **options):
    request = SampleRequest(TEXT, **{"max_tokens": 40, "seed": 1, **options})
    (sequence,) = (await sampler.sample(None, request)).sequences
    return sequence


@pytest.mark.slow
async def test_the_end_tokens_of_the_model_end_a_sequence_beside_a_stop_and_with_an_empty_one_nothing(trainer, sampler):
    plain = await sampled(sampler, stop=())
    assert (len(plain.token_ids), plain.stopped) == (40, False)
    ids = plain.token_ids.tolist()
    end = ids[11]
    first = ids.index(end)
    sampler = LocalSampler(trainer)
    sampler._endings = Endings((end,), sampler._endings.decode)
    for stop in (None, (ids[20],), ("no such text",)):
        sequence = await sampled(sampler, stop=stop)
        expected = min(first, ids.index(ids[20]) if stop == (ids[20],) else first)
        assert sequence.token_ids.tolist() == ids[: expected + 1]
        assert sequence.stopped
    assert (await sampled(sampler, stop=())).token_ids.tolist() == ids
    np.testing.assert_array_equal(sequence.logprobs, plain.logprobs[: len(sequence.logprobs)])
    await sampler.close()


@pytest.mark.slow
async def test_a_stop_text_ends_a_sequence_with_the_token_that_completes_it(sampler, family, monkeypatch):
    decode = family.renderer.tokenizer.decode
    plain = (await sampled(sampler, stop=(), max_tokens=120)).token_ids.tolist()
    text = decode(plain[30:32])
    length = next(count for count in range(1, 121) if text in decode(plain[:count]))
    steps = []
    report = Batch._report
    monkeypatch.setattr(Batch, "_report", lambda self, *args: (steps.append(1), report(self, *args))[1])
    for prompt_logprobs in (False, True):
        steps.clear()
        sequence = await sampled(sampler, stop=(text, "never"), max_tokens=120, prompt_logprobs=prompt_logprobs)
        assert sequence.token_ids.tolist() == plain[:length]
        assert sequence.stopped
        assert len(sequence.logprobs) == length
        if not prompt_logprobs:
            assert len(steps) < 120, "sampling ended early"
    with pytest.raises(ArgumentError, match="leave out the empty text"):
        await sampled(sampler, stop=("",))


async def test_each_of_several_sequences_has_an_end_of_its_own(sampler, family):
    plain = (await sampler.sample(None, SampleRequest(TEXT, num_samples=4, max_tokens=40, seed=1, stop=()))).sequences
    assert len({tuple(each.token_ids.tolist()) for each in plain}) == 4
    text = family.renderer.tokenizer.decode(plain[2].token_ids[5:7].tolist())
    cut = (
        await sampler.sample(None, SampleRequest(TEXT, num_samples=4, max_tokens=40, seed=1, stop=(text,)))
    ).sequences
    for one, other in zip(plain, cut, strict=True):
        assert one.token_ids.tolist()[: len(other.token_ids)] == other.token_ids.tolist()
    assert len(cut[2].token_ids) <= 7
    assert cut[2].stopped


@pytest.mark.slow
async def test_greedy_sequences_are_equal_and_a_seed_gives_the_same_ones_again(sampler):
    greedy = (await sampler.sample(None, SampleRequest(TEXT, num_samples=3, max_tokens=8, temperature=0))).sequences
    assert len(greedy) == 3
    assert len({tuple(each.token_ids.tolist()) for each in greedy}) == 1
    one, other = await sampled(sampler, stop=()), await sampled(sampler, stop=())
    assert one.token_ids.tolist() == other.token_ids.tolist()
    only = await sampled(sampler, top_k=1, stop=())
    best = await sampled(sampler, temperature=0.0, stop=())
    assert only.token_ids.tolist() == best.token_ids.tolist() != one.token_ids.tolist()
    off = await sampled(sampler, top_k=-1, stop=())
    assert off.token_ids.tolist() == one.token_ids.tolist()


async def test_without_max_tokens_a_sequence_fills_the_length_of_the_model(sampler, trainer):
    length = trainer.model.config.get_text_config().max_position_embeddings
    prompt = ModelInput(np.resize(TEXT.token_ids, length - 5), ())
    (sequence,) = (await sampler.sample(None, SampleRequest(prompt, stop=()))).sequences
    assert (len(sequence.token_ids), sequence.stopped) == (5, False)
    with pytest.raises(ContextLengthError, match=str(length)):
        await sampler.sample(None, SampleRequest(ModelInput(np.resize(TEXT.token_ids, length), ())))


async def test_the_likeliest_tokens_of_a_prompt_begin_with_an_empty_row(sampler):
    result = await sampler.sample(None, SampleRequest(TEXT, max_tokens=1, topk_prompt=3, prompt_logprobs=True))
    assert result.topk_prompt.token_ids.shape == result.topk_prompt.logprobs.shape == (len(TEXT.token_ids), 3)
    assert result.topk_prompt.token_ids[0].tolist() == [0, 0, 0]
    assert result.topk_prompt.logprobs[0].tolist() == [-99999.0] * 3
    at = np.argwhere(result.topk_prompt.token_ids[1:] == TEXT.token_ids[1:, None])
    np.testing.assert_allclose(result.topk_prompt.logprobs[1:][tuple(at.T)], result.prompt_logprobs[1:][at[:, 0]])
