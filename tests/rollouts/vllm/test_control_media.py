"""Caches of a server that takes media are never emptied under a request: vLLM would encode an image without pixels."""

import asyncio

import pytest
from engine_inputs import capabilities_of
from fake_server import FakeVLLM
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollouts.engines.http.connection import HttpLimits, ServerConnection
from rollouts.engines.vllm.control import ServerControl
from rollouts.errors import EngineError, ServerError

QUICK = HttpLimits(retries=1, backoff_seconds=0, longest_backoff_seconds=0)


class Fragile(FakeVLLM):
    """Runs one request that shows an image, and has put another back into its queue, as far as anyone lets it.

    It dies as vLLM 0.32 does: when its caches are emptied while it has either, and goes on with it. Takes no notice of
    what kind of prompts they are where it takes text alone.
    """

    def __init__(self, root):
        super().__init__(root=str(root))
        self.busy, self.queued = 1, 1
        self.paused_as = None
        self.doomed = False
        self.dead = False

    async def respond(self, seen):
        match seen.path:
            case "/pause":
                self.paused_as = seen.query["mode"]
                if self.paused_as == "abort":
                    self.queued = 0
                response = await super().respond(seen)
                if seen.query["clear_cache"] == "true":
                    self.clear()
                return response
            case "/resume":
                self.dead |= self.doomed
                self.busy, self.queued = 1, 1
            case "/reset_prefix_cache" if seen.query["reset_running_requests"] == "true" and self.busy:
                self.clear()
        return await super().respond(seen)

    def clear(self):
        self.doomed |= self.pixel_dtype is not None and bool(self.busy or self.queued)
        self.dead |= self.doomed and not self.paused


@pytest.fixture
async def server(reloadable_model_dir):
    async with Fragile(reloadable_model_dir) as server:
        yield server


def pauses(server):
    """Mode of each pause that the server got, and whether it was to empty its caches."""
    return [
        (seen.query["mode"], seen.query["clear_cache"] == "true") for seen in server.requests if seen.path == "/pause"
    ]


# One call at a time.


async def test_emptying_the_caches_under_frozen_requests_is_refused_and_the_error_names_the_cure(server, control):
    with pytest.raises(EngineError, match=r'Leave clear_cache out.*mode "abort"') as refused:
        await control.pause("keep", clear_cache=True)
    assert server.base_url in str(refused.value)
    assert pauses(server) == []
    assert not server.paused


async def test_a_pause_that_waits_ends_queued_requests_before_it_empties_the_caches(server, control):
    await control.pause("wait")
    assert pauses(server) == [("wait", False), ("abort", True)]
    await control.pause("wait", clear_cache=False)
    assert pauses(server)[2:] == [("wait", False)]


@pytest.mark.parametrize(
    ("takes_media", "in_flight", "expected"),
    [
        (True, "abort", [("abort", True)]),
        (True, "wait", [("wait", False), ("abort", True)]),
        (True, "keep", [("abort", True)]),
        (False, "abort", [("abort", True)]),
        (False, "wait", [("wait", True)]),
        (False, "keep", [("keep", True)]),
    ],
)
async def test_the_pauses_that_an_update_sends(server, control, reloadable_model_dir, takes_media, in_flight, expected):
    server.pixel_dtype = "uint8" if takes_media else None
    await control.update_weights(reloadable_model_dir, "v1", in_flight)
    assert pauses(server) == expected
    assert not server.dead


async def test_requests_of_a_server_that_takes_media_are_never_preempted(server, control):
    with pytest.raises(EngineError, match=r'pause\("abort"\)'):
        await control.reset_prefix_cache(preempt=True)
    assert server.requests[-1].query["reset_running_requests"] == "false"
    server.busy = 0
    await control.reset_prefix_cache(preempt=True)


# Any order of calls.

CALLS = {
    "pause": lambda control, mode, clear, _: control.pause(mode, clear_cache=clear),
    "resume": lambda control, *_: control.resume(),
    "reset": lambda control, mode, clear, _: control.reset_prefix_cache(preempt=bool(clear)),
    "update": lambda control, mode, clear, directory: control.update_weights(directory, "v", mode),
}
STEPS = st.tuples(
    st.sampled_from(sorted(CALLS)), st.sampled_from(["abort", "wait", "keep"]), st.sampled_from([None, True, False])
)


async def played(reloadable_model_dir, steps, *, call=None):
    async with Fragile(reloadable_model_dir) as server:
        connection = ServerConnection(server.base_url, limits=QUICK)
        control = ServerControl(connection, capabilities_of(server))
        for name, mode, clear in steps:
            try:
                await CALLS[name](control, mode, clear, reloadable_model_dir)
            except (EngineError, ServerError):
                continue
        await control.resume()
        if call is not None:
            await call(connection)
        await connection.close()
        return server.dead


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, max_size=6))
def test_no_order_of_control_calls_kills_a_server_that_takes_images(reloadable_model_dir, steps):
    assert not asyncio.run(played(reloadable_model_dir, steps))


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_the_planted_fault_the_bare_route_kills_the_scripted_server(reloadable_model_dir, mode):
    async def bare(connection):
        params = {"mode": mode, "clear_cache": True}
        await connection.request("POST", "/pause", name="bare", params=params)
        await connection.request("POST", "/resume", name="bare")

    assert asyncio.run(played(reloadable_model_dir, [], call=bare))
