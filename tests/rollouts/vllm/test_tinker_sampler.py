"""`VLLMSampler` over two servers: adapters are in both, the oldest ones leave them, and a server that fails is left."""

import asyncio
import os

import numpy as np
import pytest
from engine_inputs import write_adapter
from fake_server import FakeVLLM

from rollouts.engines.vllm import HttpLimits
from rollouts.errors import ArgumentError, EngineClosedError
from rollouts.tinker.requests import ModelInput, SampleRequest
from rollouts.tinker.vllm_sampler import VLLMSampler

REQUEST = SampleRequest(ModelInput(np.arange(5, 12), ()), num_samples=2, max_tokens=4, seed=1, stop=())


@pytest.fixture
async def servers():
    async with FakeVLLM(lora=True) as one, FakeVLLM(lora=True) as other:
        yield one, other


@pytest.fixture
async def sampler(servers, tiny_model_dir):
    sampler = VLLMSampler([each.base_url for each in servers], tiny_model_dir, max_adapters=2)
    yield sampler
    await sampler.close()


def loaded(servers):
    return [sorted(os.path.basename(directory) for directory in each.adapters.values()) for each in servers]


async def test_an_adapter_is_loaded_into_every_server_and_the_least_recently_used_one_leaves_them(
    servers, sampler, tmp_path
):
    assert not any(each.requests for each in servers), "nothing is asked before the first request"
    directories = {name: write_adapter(tmp_path / name) for name in "abc"}
    for name, expected in (("a", ["a"]), ("b", ["a", "b"]), ("a", ["a", "b"]), ("c", ["a", "c"])):
        result = await sampler.sample(directories[name], REQUEST)
        assert [len(each.token_ids) for each in result.sequences] == [4, 4]
        assert loaded(servers) == [expected] * 2
    await asyncio.gather(*(sampler.sample(directories["abc"[number % 3]], REQUEST) for number in range(30)))
    await sampler.close()
    assert loaded(servers) == [[], []]
    with pytest.raises(EngineClosedError):
        await sampler.sample(None, REQUEST)


async def test_an_adapter_that_an_earlier_program_has_left_is_loaded_again(servers, sampler, tiny_model_dir, tmp_path):
    directory = write_adapter(tmp_path / "a")
    killed = VLLMSampler([servers[0].base_url], tiny_model_dir)
    await killed.sample(directory, REQUEST)
    assert loaded(servers) == [["a"], []]
    assert (await sampler.sample(directory, REQUEST)).sequences
    assert loaded(servers) == [["a"], ["a"]]
    await killed._engine.close()


async def test_requests_of_a_share_with_many_do_not_keep_those_of_another_waiting(servers, tiny_model_dir):
    options = {"limits": HttpLimits(concurrency=2)}
    sampler, ended = VLLMSampler([servers[0].base_url], tiny_model_dir, **options), []

    async def sample(share):
        await sampler.sample(None, REQUEST, share=share)
        ended.append(share)

    cancelled = asyncio.ensure_future(sample("gone"))
    running = [asyncio.ensure_future(sample(share)) for share in ["many"] * 40 + ["gone"] * 3 + ["few", "other"]]
    await asyncio.sleep(0)
    for each in (cancelled, *running[40:43]):
        each.cancel()
    await asyncio.wait(running)
    assert ended.count("many") == 40
    assert {*ended[:8]} == {"many", "few", "other"}
    await sampler.close()


async def test_whole_models_and_directories_without_weights_are_refused(sampler, tiny_model_dir, tmp_path):
    with pytest.raises(ArgumentError, match="it is a whole model, and a vLLM server"):
        await sampler.sample(tiny_model_dir, REQUEST)
    with pytest.raises(ArgumentError, match="save the weights again"):
        await sampler.sample(tmp_path, REQUEST)
