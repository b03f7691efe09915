"""A real vllm-router in front of servers: sessions stay with a server, and a router that loses them is reported."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest
from controlled_server import Controlled
from engine_inputs import FAST_RETRIES, expected, generate_one, image, request
from fake_responses import answer, hold
from fake_server import ABORT, GENERATE
from router_process import router_process
from safetensors.numpy import save_file

from rollouts.engines.fleet import RoutedEngine
from rollouts.errors import ArgumentError, FleetMismatchError, WeightUpdateError

pytest.importorskip("vllm_router")


@pytest.fixture
def checkpoint(tmp_path):
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    save_file({"a": np.zeros(2, np.float32)}, directory / "model.safetensors")
    return directory


@pytest.fixture
async def servers(checkpoint):
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Controlled(checkpoint)) for _ in range(2)]


@asynccontextmanager
async def routed(servers, tmp_path, policy="consistent_hash"):
    """An engine through a router of this policy."""
    urls = [server.base_url for server in servers]
    async with (
        router_process(urls, tmp_path / "router.log", policy) as router_url,
        RoutedEngine(router_url, urls, limits=FAST_RETRIES) as engine,
    ):
        await engine.capabilities()
        for server in servers:
            server.requests.clear()
        yield engine


def sessions_of(server):
    return {seen.headers["x-session-id"] for seen in server.generations if "x-session-id" in seen.headers}


def with_data(server, name):
    """The sessions that have sent the data of an image to a server, a request each."""
    found = []
    for seen in server.generations:
        features = seen.json.get("features") or {}
        hashes = features.get("mm_hashes", {}).get("image", [])
        data = (features.get("kwargs_data") or {}).get("image") or [None] * len(hashes)
        found += [seen.headers["x-session-id"] for mm_hash, item in zip(hashes, data, strict=True) if item is not None]
    return found


async def turns_of(engine, session, images, number=0):
    """A turn with the first image, one with the first two, and so on."""
    for turn in range(len(images)):
        asked = request(*images[: turn + 1], session_id=session, request_id=f"{session}.{number}.{turn}")
        assert (await generate_one(engine, asked)).token_ids.tolist() == expected(asked)


@pytest.mark.slow
async def test_a_session_stays_at_one_server_which_gets_each_of_its_images_once(servers, tmp_path, caplog):
    async with routed(servers, tmp_path) as engine:
        sessions = 0
        while not all(map(sessions_of, servers)):  # the servers' ports, and thus the router's hashes, are random
            await turns_of(engine, f"s{sessions}", [image(f"{sessions}-{turn}") for turn in range(3)])
            sessions += 1
            assert sessions < 100
        assert engine.lost_sessions == 0
        counts = engine.media_cache_counts
    one, two = map(sessions_of, servers)
    assert not one & two
    assert one | two == {f"s{number}" for number in range(sessions)}
    assert (counts.included_items, counts.omitted_items) == (sessions * 3, sessions * 3)
    assert not [record for record in caplog.records if "X-Session-ID" in record.message]


@pytest.mark.slow
async def test_a_router_that_does_not_keep_sessions_is_reported_once_and_every_completion_is_right(
    servers, tmp_path, caplog
):
    async with routed(servers, tmp_path, "round_robin") as engine:
        for number in range(8):
            await turns_of(engine, f"s{number}", [image(f"{number}-{turn}") for turn in range(5)])
        assert engine.lost_sessions >= 3
    assert sessions_of(servers[0]) & sessions_of(servers[1])
    (report,) = [record.message for record in caplog.records if "X-Session-ID" in record.message]
    assert "consistent_hash" in report


@pytest.mark.slow
async def test_images_that_a_pause_has_cleared_are_no_sign_of_a_lost_session(servers, tmp_path):
    async with routed(servers, tmp_path) as engine:
        for number in range(3):
            for session in ("a", "b", "c", "d"):
                await turns_of(engine, session, [image(f"{session}-{turn}") for turn in range(2)], number)
            await engine.control.pause("abort")
            for server in servers:
                server.cached.clear()
            await engine.control.resume()
        assert engine.lost_sessions == 0


@pytest.mark.slow
async def test_control_calls_reach_every_server(servers, tmp_path, checkpoint):
    async with routed(servers, tmp_path) as engine:
        await engine.update_weights(checkpoint, "v1")
        assert [server.loaded[1:] for server in servers] == [[str(checkpoint)]] * 2
        assert [server.weight_version for server in servers] == ["v1", "v1"]
        assert engine.weight_version == "v1"
        for number in range(8):
            completion = await generate_one(engine, request(session_id=f"s{number}", request_id=f"r{number}"))
            assert [span.version for span in completion.weight_spans] == ["v1"]
        assert await engine.control.world_size() == {server.base_url: 4 for server in servers}


@pytest.mark.slow
async def test_a_completion_that_a_pause_cuts_off_continues_when_all_servers_run_again(servers, tmp_path):
    async with routed(servers, tmp_path) as engine:
        arrived = asyncio.Event()
        for server in servers:
            server.script[GENERATE] = [hold(asyncio.Event(), arrived, tokens_before=2)]
        asked = request(session_id="s")
        sampling = asyncio.ensure_future(generate_one(engine, asked))
        await arrived.wait()
        await engine.control.pause("abort")
        assert not sampling.done()
        for server in servers:
            server.script[GENERATE].clear()
        await engine.control.resume()
        assert (await sampling).token_ids.tolist() == expected(asked)


@pytest.mark.slow
async def test_an_abort_reaches_the_server_that_runs_the_request(servers, tmp_path):
    async with routed(servers, tmp_path) as engine:
        arrived = asyncio.Event()
        for server in servers:
            server.script[GENERATE] = [hold(asyncio.Event(), arrived, tokens_before=2)]
        sampling = asyncio.ensure_future(generate_one(engine, request(session_id="s", request_id="mine")))
        await arrived.wait()
        await engine.abort(["mine"])
        assert len((await sampling).token_ids) == 2
        for server in servers:
            assert [seen.json for seen in server.requests if seen.path == ABORT] == [
                {"request_ids": ["generate-tokens-mine"]}
            ]


@pytest.mark.slow
async def test_a_server_that_refuses_new_weights_is_an_error_because_the_router_goes_on_using_it(
    servers, tmp_path, checkpoint
):
    async with routed(servers, tmp_path) as engine:
        servers[1].script["/collective_rpc"] = [answer({"error": "it broke"}, status=500)]
        with pytest.raises(WeightUpdateError, match="take these servers out of it") as caught:
            await engine.update_weights(checkpoint, "v1")
        assert servers[1].base_url in str(caught.value)
        await engine.update_weights(checkpoint, "v1")
        assert [server.weight_version for server in servers] == ["v1", "v1"]


@pytest.mark.slow
async def test_a_server_that_is_out_of_the_fleet_is_an_error_of_the_next_update_too(servers, tmp_path, checkpoint):
    async with routed(servers, tmp_path) as engine:
        servers[1].script["/collective_rpc"] = [answer({"error": "it broke"}, status=500)] * 9
        for version in ("v1", "v2"):
            with pytest.raises(WeightUpdateError, match="take these servers out of it") as caught:
                await engine.update_weights(checkpoint, version)
            assert servers[1].base_url in str(caught.value)
        assert servers[0].weight_version == "v2"


async def test_servers_that_differ_are_an_error_at_the_first_request(checkpoint, tmp_path):
    async with AsyncExitStack() as stack:
        root = checkpoint
        differing = [await stack.enter_async_context(Controlled(root, model=name)) for name in ("one", "two")]
        async with RoutedEngine(differing[0].base_url, [server.base_url for server in differing]) as engine:
            with pytest.raises(FleetMismatchError, match="model"):
                await engine.generate(request())


def test_a_router_without_servers_is_refused():
    with pytest.raises(ArgumentError, match="name the servers"):
        RoutedEngine("http://127.0.0.1:1", [])
