"""`VLLMSampler` on a real server: adapters of a trainer saved and replaced while sampling runs, each with its own
log-probabilities; ends of sequences; sleep."""

import asyncio

import numpy as np
import pytest
from trainer_checks import random_weights, with_nonzero_adapter

from renderers import load_renderer
from rollouts.engines.vllm import VLLMEngine
from rollouts.errors import EngineError
from rollouts.models.lora_modules import LoraOptions
from rollouts.tinker.local_sampler import LocalSampler
from rollouts.tinker.requests import ModelInput, SampleRequest
from rollouts.tinker.vllm_sampler import VLLMSampler
from rollouts.training import TrainingSample
from rollouts.training.trainer import AdamParams, Datum, Trainer

LORA = LoraOptions(rank=4, alpha=8, seed=1)  # of the output layer too
VERSIONS = 4


def prompts(directory):
    """Text and images, with the media of a renderer."""
    renderer, random = load_renderer(directory), np.random.default_rng(0)
    found = []
    for shapes in ((), ((32, 48),), ((40, 40), (24, 64))):
        images = [random.integers(0, 256, (*shape, 3), dtype=np.uint8) for shape in shapes]
        parts = [{"type": "image", "image": image} for image in images] + [{"type": "text", "text": "What is it?"}]
        rendered = renderer.render([{"role": "user", "content": parts}], add_generation_prompt=True)
        media = rendered.multi_modal_data.items_with_ranges() if rendered.multi_modal_data else []
        found.append(ModelInput(np.array(rendered.token_ids, np.int64), media))
    return found


def data_of(prompts):
    rows = []
    for seed, prompt in enumerate(prompts):
        ids = np.concatenate([prompt.token_ids, [65, 66, 67]]).astype(np.int32)
        mask = np.arange(len(ids)) >= len(prompt.token_ids)
        zeros = np.zeros(len(ids), np.float32)
        rows.append(random_weights(TrainingSample(ids, mask, zeros, zeros, tuple(prompt.media), name="row"), seed))
    return rows


def mismatch(trainer, model_id, prompt, sequence):
    """The largest difference of sampled log-probabilities from those of the trainer."""
    ids = np.concatenate([prompt.token_ids, sequence.token_ids])
    datum = Datum(ids[:-1], ids[1:], {}, list(prompt.media))
    scored = trainer.forward(model_id, [datum], "cross_entropy").logprobs[0]
    return float(np.abs(scored[-len(sequence.logprobs) :] - sequence.logprobs).max())


@pytest.mark.parametrize("vllm_server", ["lora"], indirect=True)
async def test_adapters_of_a_trainer_are_replaced_while_sampling_runs_and_each_has_its_own_log_probabilities(
    vllm_server, tmp_path
):
    trainer = Trainer.from_pretrained(vllm_server.model_dir, device="cpu")
    sampler = VLLMSampler([vllm_server.base_url], vllm_server.model_dir, max_adapters=2)  # fewer than there are
    asked = prompts(vllm_server.model_dir)
    data = data_of(asked)
    with_nonzero_adapter(trainer, "policy", data, LORA)
    running = []
    for version in range(VERSIONS):
        trainer.save_for_sampler("policy", tmp_path / str(version))
        trainer.save("policy", tmp_path / f"state-{version}")
        running += [
            asyncio.ensure_future(
                sampler.sample(
                    tmp_path / str(version), SampleRequest(prompt, num_samples=2, max_tokens=200, seed=version, stop=())
                )
            )
            for prompt in asked
        ]
        await asyncio.to_thread(trainer.forward_backward, "policy", data, "cross_entropy")
        await asyncio.to_thread(trainer.optim_step, "policy", AdamParams(learning_rate=0.05))
    results = await asyncio.gather(*running)
    for version in range(VERSIONS):
        trainer.load("policy", tmp_path / f"state-{version}")
        for prompt, result in zip(asked, results[version * len(asked) :], strict=False):
            for sequence in result.sequences:
                assert (len(sequence.token_ids), sequence.stopped) == (200, False)
                assert mismatch(trainer, "policy", prompt, sequence) < 1e-4
    assert mismatch(trainer, "policy", asked[0], results[0].sequences[0]) > 1e-2, "the detector"
    await sampler.close()
    async with VLLMEngine(vllm_server.base_url) as engine:
        assert not await engine.adapters()


@pytest.mark.parametrize("vllm_server", ["lora"], indirect=True)
async def test_what_a_killed_program_has_left_in_the_server_is_replaced(vllm_server, tmp_path):
    trainer = Trainer.from_pretrained(vllm_server.model_dir, device="cpu")
    (prompt, *_) = asked = prompts(vllm_server.model_dir)
    with_nonzero_adapter(trainer, "policy", data_of(asked), LORA)
    trainer.save_for_sampler("policy", tmp_path / "1")
    request = SampleRequest(prompt, max_tokens=20, stop=())
    killed = VLLMSampler([vllm_server.base_url], vllm_server.model_dir)
    await killed.sample(tmp_path / "1", request)
    sampler = VLLMSampler([vllm_server.base_url], vllm_server.model_dir)
    (sequence,) = (await sampler.sample(tmp_path / "1", request)).sequences
    assert mismatch(trainer, "policy", prompt, sequence) < 1e-4
    await sampler.close()
    await killed.close()


@pytest.mark.parametrize("vllm_server", ["lora"], indirect=True)
async def test_the_likeliest_tokens_are_those_of_the_model_of_the_trainer(vllm_server, tmp_path):
    trainer = Trainer.from_pretrained(vllm_server.model_dir, device="cpu")
    local = LocalSampler(trainer)
    sampler = VLLMSampler([vllm_server.base_url], vllm_server.model_dir)
    asked = prompts(vllm_server.model_dir)
    with_nonzero_adapter(trainer, "policy", data_of(asked), LORA)
    trainer.save_for_sampler("policy", tmp_path / "1")
    for prompt in asked:
        options = {"temperature": 0.0, "max_tokens": 3, "stop": (), "topk_prompt": 2, "topk_sample": 4}
        one, other = [await each.sample(tmp_path / "1", SampleRequest(prompt, **options)) for each in (sampler, local)]
        assert one.sequences[0].token_ids.tolist() == other.sequences[0].token_ids.tolist()
        for top, expected in ((one.topk_prompt, other.topk_prompt), (one.sequences[0].topk, other.sequences[0].topk)):
            assert top.token_ids.shape == expected.token_ids.shape
            np.testing.assert_allclose(top.logprobs, expected.logprobs, atol=1e-4)
        same = one.topk_prompt.token_ids == other.topk_prompt.token_ids
        assert same.mean() > 0.95, "but for ties"
    with pytest.raises(EngineError, match="20"):
        await sampler.sample(None, SampleRequest(asked[0], max_tokens=1, topk_prompt=21))
    await sampler.close()
    await local.close()


async def test_sequences_of_the_base_model_end_where_requests_say(vllm_server):
    trainer = Trainer.from_pretrained(vllm_server.model_dir, device="cpu")
    trainer.create_model("base", lora=LORA)
    sampler = VLLMSampler([vllm_server.base_url], vllm_server.model_dir)
    decode = load_renderer(vllm_server.model_dir).tokenizer.decode
    for prompt in prompts(vllm_server.model_dir):

        async def sampled(**options):
            return await sampler.sample(None, SampleRequest(prompt, **{"seed": 5, "max_tokens": 60, **options}))  # noqa: B023

        result = await sampled(stop=(), prompt_logprobs=True)
        (whole,) = result.sequences
        assert len(whole.token_ids) == 60
        assert mismatch(trainer, "base", prompt, whole) < 1e-4
        assert len(result.prompt_logprobs) == len(prompt.token_ids)
        ids = whole.token_ids.tolist()
        (at_id,) = (await sampled(stop=(ids[20],))).sequences
        assert at_id.token_ids.tolist() == ids[: ids.index(ids[20]) + 1]
        assert at_id.stopped
        text = decode(ids[30:33])
        length = next(count for count in range(1, 61) if text in decode(ids[:count]))
        (at_text,) = (await sampled(stop=(text,))).sequences
        ends = [ids.index(each) + 1 for each in sampler._endings.end_ids if each in ids]
        assert at_text.token_ids.tolist() == ids[: min(length, *ends, 60)]
        greedy = (await sampled(temperature=0.0, num_samples=3, max_tokens=5)).sequences
        assert len(greedy) == 3
    room = ModelInput(np.resize(prompt.token_ids, 4090) * 0 + 70, ())
    (rest,) = (await sampler.sample(None, SampleRequest(room, stop=()))).sequences
    assert len(rest.token_ids) == 6
    await sampler.close()


async def test_servers_sleep_during_training_steps_and_wake_up_for_the_next_request(vllm_server):
    sampler = VLLMSampler([vllm_server.base_url], vllm_server.model_dir, sleep=True)
    (prompt, *_) = prompts(vllm_server.model_dir)
    request = SampleRequest(prompt, max_tokens=1500, seed=1, stop=())

    def is_asleep():
        return vllm_server.http.get("/is_sleeping").json()["is_sleeping"]

    running = await vllm_server.in_flight(lambda: sampler.sample(None, request))
    async with sampler.asleep():
        assert running.done(), "what runs ends first"
        assert await asyncio.to_thread(is_asleep)
        waiting = asyncio.ensure_future(sampler.sample(None, request))
        await vllm_server.generates_nothing(waiting)
    async with sampler.asleep():
        assert waiting.done(), "it came before this step"
    assert (await waiting).sequences[0].token_ids.tolist() == running.result().sequences[0].token_ids.tolist()
    assert await asyncio.to_thread(is_asleep), "until the next request"
    assert (await sampler.sample(None, request)).sequences
    assert not await asyncio.to_thread(is_asleep)
    async with sampler.asleep():
        pass
    await sampler.close()
    assert not await asyncio.to_thread(is_asleep)
