"""Control calls of a fleet: all members or none, results for each, and updates of weights that some members fail."""

from contextlib import AsyncExitStack

import pytest
from engine_inputs import generate_one, held, request
from fake_http import error_response
from fake_server import RELOAD, FakeVLLM

from rollouts.engines.fleet import EngineFleet
from rollouts.errors import (
    CapabilityError,
    EngineError,
    FleetControlError,
    WeightUpdateError,
)
from rollouts.testing import ScriptedEngine


@pytest.fixture
async def servers(reloadable_model_dir):
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(FakeVLLM(root=str(reloadable_model_dir))) for _ in range(3)]


def states(fleet):
    return [str(member.state) for member in fleet.members]


async def test_a_pause_stops_all_members_and_a_resume_starts_them(servers, fleet):
    assert await fleet.control.pause() == {server.base_url: None for server in servers}
    assert [server.paused for server in servers] == [True, True, True]
    await fleet.control.resume()
    assert [server.paused for server in servers] == [False, False, False]


async def test_a_pause_that_fails_at_one_member_is_taken_back_at_the_others(servers, fleet):
    servers[1].script["/pause"] += [error_response()]
    with pytest.raises(FleetControlError, match=f"1 of 3 members failed.*{servers[1].base_url}.*it broke") as failure:
        await fleet.control.pause()
    assert [server.paused for server in servers] == [False, False, False]
    assert set(failure.value.undone) == {servers[0].base_url, servers[2].base_url}
    assert failure.value.errors.keys() == {servers[1].base_url}


async def test_a_member_that_fails_an_update_is_ejected_and_named_and_the_others_serve_one_version(
    servers, fleet, other
):
    servers[1].bad.add(str(other))
    outcomes = await fleet.control.update_weights(other, "v1")
    assert isinstance(outcomes[servers[1].base_url], WeightUpdateError)
    assert states(fleet) == ["ready", "ejected", "ready"]
    versions = set()
    for number in range(12):
        completion = await generate_one(fleet, request(session_id=f"s{number}"))
        versions |= {span.version for span in completion.weight_spans}
    assert versions == {"v1"}
    servers[1].requests.clear()
    await fleet.check()
    assert states(fleet) == ["ready", "ejected", "ready"]


async def test_weights_that_no_member_takes_leave_all_serving_the_old_ones(servers, fleet, other):
    for server in servers:
        server.bad.add(str(other))
    with pytest.raises(WeightUpdateError, match="no member of the fleet has taken the weights 'v1'"):
        await fleet.update_weights(other, "v1")
    assert states(fleet) == ["ready", "ready", "ready"]
    assert fleet.weight_version == "default"
    await generate_one(fleet, request())


async def test_a_second_update_is_refused_while_one_runs(servers, fleet, other):
    first, release = await held(servers[0], RELOAD, fleet.update_weights(other, "v1"))
    with pytest.raises(EngineError, match="another update"):
        await fleet.update_weights(other, "v2")
    release.set()
    await first
    assert fleet.weight_version == "v1"


async def test_engines_without_control_calls_are_named():
    async with EngineFleet({"script": ScriptedEngine([])}) as fleet:
        with pytest.raises(FleetControlError, match="script is a ScriptedEngine, which has no control calls"):
            await fleet.control.pause()


async def test_a_fleet_of_which_no_member_serves_says_so(servers, fleet, other):
    for server in servers:
        await server.stop()
    await fleet.check()
    with pytest.raises(CapabilityError, match="no member of the fleet serves"):
        await fleet.update_weights(other, "v1")
