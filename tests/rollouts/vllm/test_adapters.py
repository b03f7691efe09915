"""LoRA adapters of servers: loaded, chosen by requests, replaced and unloaded, at one server and in a fleet."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from engine_inputs import FAST_RETRIES, expected, generate_one, held, request, until, write_adapter
from fake_http import error_response
from fake_server import GENERATE, LOAD, FakeVLLM

from rollouts import FinishReason
from rollouts.engines.lora import LoRAEngine
from rollouts.engines.vllm import VLLMEngine
from rollouts.errors import (
    ArgumentError,
    CapabilityError,
    EngineClosedError,
    FleetControlError,
    UnknownAdapterError,
    WeightUpdateError,
)


@pytest.fixture
async def server():
    async with FakeVLLM(lora=True) as server:
        yield server


@pytest.fixture
async def servers():
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(FakeVLLM(lora=True)) for _ in range(3)]


@pytest.fixture
def adapter(tmp_path):
    return write_adapter(tmp_path / "adapter")


@pytest.fixture
async def policy(engine, adapter):
    """An adapter as an engine, with its first weights."""
    policy = LoRAEngine(engine, "policy")
    await policy.update_weights(adapter, "policy@1")
    return policy


def sampled_by(server):
    return [seen.json["model"] for seen in server.generations]


def versions(completion):
    return [(span.version, span.start, span.end) for span in completion.weight_spans]


async def test_a_request_names_its_adapter_and_its_tokens_are_labelled_with_it(engine, server, adapter):
    await engine.load_adapter("judge", adapter)
    assert await engine.adapters() == {"judge": str(adapter)}
    of_judge = await generate_one(engine, request(adapter="judge", request_id="a"))
    of_model = await generate_one(engine, request(request_id="b"))
    assert sampled_by(server) == ["judge", "tiny-qwen3vl"]
    assert versions(of_judge) == [("judge", 0, 6)]
    assert versions(of_model) == [("default", 0, 6)]
    assert engine.weight_version == "default"


async def test_tokens_over_other_base_weights_than_at_the_loading_are_labelled_with_both(engine, server, adapter):
    await engine.load_adapter("judge", adapter)
    server.weight_version = "v2"
    completion = await generate_one(engine, request(adapter="judge"))
    assert versions(completion) == [("judge on v2", 0, 6)]


async def test_an_unknown_adapter_is_an_error_that_lists_the_loaded_ones_and_nothing_is_sent(engine, server, adapter):
    await engine.load_adapter("one", adapter)
    with pytest.raises(UnknownAdapterError, match=r"'two' is not loaded \(loaded: 'one'\)") as caught:
        await engine.generate(request(adapter="two"))
    assert (caught.value.adapter, caught.value.loaded) == ("two", ["one"])
    assert server.generations == []


async def test_a_directory_without_an_adapter_is_refused_before_the_server_is_asked(engine, server, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightUpdateError, match=r"lacks adapter_config\.json and adapter_model\.safetensors"):
        await engine.load_adapter("one", tmp_path / "empty")
    assert not [seen for seen in server.requests if seen.path == LOAD]
    with pytest.raises(WeightUpdateError, match="No adapter found"):
        await engine.load_adapter("one", tmp_path / "empty", check=False)


async def test_a_server_without_adapters_is_an_error_with_the_flags_to_start_it_with(adapter):
    async with FakeVLLM() as server, VLLMEngine(server.base_url, limits=FAST_RETRIES) as engine:
        with pytest.raises(CapabilityError, match=r"--enable-lora.*VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
            await engine.load_adapter("one", adapter)


async def test_an_adapter_is_unloaded_after_its_requests_have_ended(engine, server, adapter):
    await engine.load_adapter("one", adapter)
    sampling, proceed = await held(server, GENERATE, generate_one(engine, request(adapter="one")))
    unloading = asyncio.ensure_future(engine.unload_adapter("one"))
    await generate_one(engine, request(request_id="other"))
    assert "one" in server.adapters
    proceed.set()
    await sampling
    await unloading
    assert server.adapters == {}
    with pytest.raises(UnknownAdapterError, match="loaded: none"):
        await engine.unload_adapter("one")


# An adapter as an engine.


async def test_an_adapter_is_an_engine_whose_updates_load_the_new_weights_and_unload_the_old(engine, server, adapter):
    policy = LoRAEngine(engine, "policy")
    assert policy.weight_version == "default"
    assert versions(await generate_one(policy, request(request_id="a"))) == [("default", 0, 6)]
    for number in (1, 2):
        await policy.update_weights(adapter, f"policy@{number}")
        assert policy.weight_version == f"policy@{number}"
        completion = await generate_one(policy, request(request_id=f"b{number}"))
        assert versions(completion) == [(f"policy@{number}", 0, 6)]
        assert list(server.adapters) == [f"policy@{number}"]
    await policy.close()
    assert server.adapters == {}
    with pytest.raises(EngineClosedError):
        await policy.generate(request())
    assert await generate_one(engine, request())  # the engine itself is open


@pytest.mark.parametrize("version", ["3", "other@3", "policy"])
async def test_a_version_that_does_not_name_the_adapter_is_refused(engine, server, adapter, version):
    with pytest.raises(ArgumentError, match='such as "policy@3"'):
        await LoRAEngine(engine, "policy").update_weights(adapter, version)
    assert server.adapters == {}


async def test_weights_that_are_not_loaded_leave_the_adapter_of_before_in_use(policy, server, adapter):
    server.script[LOAD] = [error_response(500, "rank 64 is above 16")]
    with pytest.raises(WeightUpdateError, match="rank 64"):
        await policy.update_weights(adapter, "policy@2")
    assert policy.weight_version == "policy@1"
    assert versions(await generate_one(policy, request())) == [("policy@1", 0, 6)]


@pytest.mark.parametrize("in_flight", ["abort", "keep"])
async def test_requests_in_flight_continue_with_the_new_weights_from_their_tokens(policy, server, adapter, in_flight):
    cut = request(sampling={"max_tokens": 9})
    sampling, _ = await held(server, GENERATE, generate_one(policy, cut), tokens_before=4)
    await policy.update_weights(adapter, "policy@2", in_flight=in_flight)
    completion = await sampling
    assert completion.token_ids.tolist() == expected(cut)
    assert versions(completion) == [("policy@1", 0, 4), ("policy@2", 4, 9)]
    assert completion.finish_reason is not FinishReason.ABORT
    assert list(server.adapters) == ["policy@2"]


async def test_requests_in_flight_end_with_the_old_weights_beside_new_requests_with_the_new_ones(
    policy, server, adapter
):
    sampling, proceed = await held(server, GENERATE, generate_one(policy, request(request_id="old")))
    updating = asyncio.ensure_future(policy.update_weights(adapter, "policy@2", in_flight="wait"))
    await server.requests_seen(2, LOAD)
    await until(lambda: policy.weight_version == "policy@2")
    assert versions(await generate_one(policy, request(request_id="new"))) == [("policy@2", 0, 6)]
    assert not updating.done()
    proceed.set()
    assert versions(await sampling) == [("policy@1", 0, 6)]
    await updating
    assert list(server.adapters) == ["policy@2"]


# A fleet.


async def test_an_adapter_of_a_fleet_is_loaded_everywhere_and_serves_sessions_anywhere(fleet, servers, adapter):
    policy = LoRAEngine(fleet, "policy")
    await policy.update_weights(adapter, "policy@1")
    assert [list(server.adapters) for server in servers] == [["policy@1"]] * 3
    for number in range(20):
        completion = await generate_one(policy, request(session_id=f"s{number}", request_id=f"r{number}"))
        assert versions(completion) == [("policy@1", 0, 6)]
    await policy.update_weights(adapter, "policy@2")
    assert [list(server.adapters) for server in servers] == [["policy@2"]] * 3
    assert await fleet.adapters() == {"policy@2": str(adapter)}


async def test_an_adapter_that_one_server_refuses_is_unloaded_at_the_others(fleet, servers, adapter):
    servers[1].script[LOAD] = [error_response(500, "no memory")]
    with pytest.raises(FleetControlError, match="no memory") as caught:
        await fleet.load_adapter("one", adapter)
    assert list(caught.value.errors) == [servers[1].base_url]
    assert [server.adapters for server in servers] == [{}, {}, {}]
    with pytest.raises(UnknownAdapterError, match="loaded: none"):
        await fleet.unload_adapter("one")


async def test_a_server_that_was_restarted_gets_the_adapters_again_before_it_samples(fleet, servers, adapter):
    await fleet.load_adapter("one", adapter)
    for server in servers:
        server.adapters.clear()
    for number in range(20):
        completion = await generate_one(fleet, request(session_id=f"s{number}", request_id=f"r{number}", adapter="one"))
        assert versions(completion) == [("one", 0, 6)]
    assert [list(server.adapters) for server in servers] == [["one"]] * 3


async def test_adapters_do_not_share_a_cache_salt_within_a_session(engine, server, adapter):
    for name in ("one", "two"):
        await engine.load_adapter(name, adapter)
    for number, name in enumerate(["one", "two", "one", None]):
        await engine.generate(request(session_id="s", adapter=name, request_id=f"r{number}"))
    one, two, one_again, without = [seen.json["cache_salt"] for seen in server.generations]
    assert one == one_again
    assert len({one, two, without}) == 3
