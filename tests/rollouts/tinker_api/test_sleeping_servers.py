"""When servers of a sampler sleep, and who waits for whom; without servers."""

import asyncio

import pytest

from rollouts.errors import EngineError, ServerUnreachableError
from rollouts.tinker.sleeping_servers import SleepingServers


class Servers:
    """Takes the control calls, in their order."""

    def __init__(self):
        self.calls, self.fails = [], None

    async def call(self, name):
        await asyncio.sleep(0)
        self.calls.append(name)
        if self.fails is not None:
            raise self.fails


async def rounds(count=20):
    for _ in range(count):
        await asyncio.sleep(0)


async def in_block(block, name, log, release):
    async with block:
        log.append(f"{name} begins")
        await release.wait()
        log.append(f"{name} ends")


async def test_steps_and_requests_begin_in_the_order_of_their_arrival():
    servers, log, release = Servers(), [], asyncio.Event()
    rest = SleepingServers(servers.call)
    running = []
    for name in ("request 1", "request 2", "step 3", "step 4", "request 5", "step 6"):
        block = rest.awake() if name.startswith("request") else rest.asleep()
        running.append(asyncio.ensure_future(in_block(block, name, log, release)))
        await rounds()
    assert log == ["request 1 begins", "request 2 begins"]
    release.set()
    await asyncio.wait_for(asyncio.gather(*running), 60)
    begins = [entry.split()[1] for entry in log if entry.endswith("begins")]
    assert begins == ["1", "2", "3", "4", "5", "6"]
    assert log.index("request 2 ends") < log.index("step 3 begins")
    assert log.index("step 4 ends") < log.index("request 5 begins")
    assert servers.calls == ["wake_up", "sleep", "wake_up", "sleep"]
    await rest.end()
    assert servers.calls[-1] == "wake_up"


async def test_a_step_runs_without_a_server_and_fails_with_one_that_refuses_to_sleep():
    servers = Servers()
    rest = SleepingServers(servers.call)
    servers.fails = ServerUnreachableError("sleep", "nobody there")
    async with rest.asleep():
        pass
    servers.fails = EngineError("sleep", "no such route")
    with pytest.raises(EngineError, match="no such route"):
        async with rest.asleep():
            pytest.fail("the block must not run")
    servers.fails = None
    async with rest.awake():  # what failed waits for nothing
        pass


async def test_one_that_is_cancelled_while_it_waits_holds_up_nobody():
    servers, log, release = Servers(), [], asyncio.Event()
    rest = SleepingServers(servers.call)
    running = [asyncio.ensure_future(in_block(rest.awake(), "request", log, release))]
    await rounds()
    waiting = asyncio.ensure_future(in_block(rest.asleep(), "step", log, release))
    await rounds()
    running.append(asyncio.ensure_future(in_block(rest.awake(), "second", log, release)))
    await rounds()
    waiting.cancel()
    await rounds()
    assert log == ["request begins", "second begins"]
    release.set()
    await asyncio.gather(*running)
