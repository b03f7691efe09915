"""A fleet of servers over real sockets: images after a failover, restarts, and a list of servers that changes."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from engine_inputs import expected, generate_one, held, image, request, until
from fake_responses import hold
from fake_server import GENERATE, FakeVLLM

from rollouts.engines.fleet import EngineFleet, FleetLimits

QUICK = FleetLimits(check_seconds=0.02, check_timeout=5.0)


@pytest.fixture
async def servers():
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(FakeVLLM()) for _ in range(2)]


def fleet_of(servers):
    return EngineFleet.from_urls([server.base_url for server in servers], limits=QUICK)


@asynccontextmanager
async def checked(fleet, servers):
    """The fleet after its first checks; the requests of these are removed from the servers."""
    async with fleet:
        await fleet.check()
        for server in servers:
            server.requests.clear()
        yield fleet


def following(monkeypatch, *urls):
    """The addresses that the actors of a Ray cluster have; the fleet of them follows what a test makes of the list."""
    named = list(urls)

    class Names:
        def __init__(self, names, namespace):
            self.known = list(named)

        def read(self):
            return list(named)

        def read_if_changed(self):
            changed, self.known = self.known != named, list(named)
            return list(named) if changed else None

    monkeypatch.setattr("rollouts.engines.fleet.fleet.RayServerNames", Names)
    return named


def sampled(server):
    """The requests that were to be sampled; the probe of a server sends one without sampling parameters."""
    return [seen for seen in server.generations if "sampling_params" in seen.json]


def serving(servers):
    """The server that has sampled, and the other one."""
    return sorted(servers, key=lambda server: not sampled(server))


@pytest.mark.slow
async def test_a_server_that_dies_loses_its_session_to_another_which_gets_the_images_again(servers, caplog):
    async with checked(fleet_of(servers), servers) as fleet:
        await generate_one(fleet, request(image(), session_id="s"))
        first, other = serving(servers)
        sent = request(image(), image("dog"), session_id="s")
        running, _ = await held(first, GENERATE, generate_one(fleet, sent))
        await first.stop()
        completion = await running
        assert completion.token_ids.tolist() == expected(sent)
        # A warning for each request of a server that has ended would be thousands.
        assert "could not abort" not in caplog.text
        assert [sorted(seen.shipped) for seen in other.generations] == [["cat", "dog"]]
        assert [str(member.state) for member in fleet.members if member.name == first.base_url] == ["ejected"]

        await first.start()
        await fleet.check()
        assert {str(member.state) for member in fleet.members} == {"ready"}
        await generate_one(fleet, request(image(), session_id="s"))
        assert len(other.generations) == 2


async def test_a_request_that_waits_for_a_server_is_sampled_by_one_that_the_list_names_meanwhile(
    servers, monkeypatch, caplog
):
    named = following(monkeypatch, "http://127.0.0.1:9")  # nothing listens there
    async with checked(EngineFleet.from_ray(["actors"], limits=QUICK), servers) as fleet:
        running = asyncio.create_task(generate_one(fleet, request(session_id="s")))
        await until(lambda: "is ejected" in caplog.text)
        named[:] = [servers[0].base_url]
        await running
        assert len(sampled(servers[0])) == 1


async def test_a_list_that_becomes_unusable_changes_nothing_and_is_logged(servers, monkeypatch, caplog):
    named = following(monkeypatch, *(server.base_url for server in servers))
    arrived, release = asyncio.Event(), asyncio.Event()
    async with checked(EngineFleet.from_ray(["actors"], limits=QUICK), servers) as fleet:
        for server in servers:
            server.script[GENERATE] = [hold(release, arrived)]
        running = asyncio.create_task(generate_one(fleet, request(session_id="s")))
        await arrived.wait()
        named[:] = ["ftp://example.org"]
        await until(lambda: "stay as they are" in caplog.text)
        assert len(fleet.members) == 2
        release.set()
        await running
