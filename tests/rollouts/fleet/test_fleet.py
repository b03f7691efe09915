"""Requests of a fleet: affinity, failover, ejection, admission, and members that come and go."""

import asyncio
from types import SimpleNamespace

import pytest
from fleet_engines import MemberEngine, request, states, until

from rollouts.engines.fleet import EngineFleet, FleetLimits
from rollouts.engines.lazy import LazyEngine
from rollouts.errors import (
    ArgumentError,
    EngineClosedError,
    EngineError,
    FleetMismatchError,
    InvalidRequestError,
    ServerError,
    ServerUnreachableError,
)

REFUSED = ServerUnreachableError("r", "connection refused")


def fleet_of(count, **limits):
    engines = {name: MemberEngine() for name in "abcdefgh"[:count]}
    return engines, EngineFleet(engines, limits=FleetLimits(**{"check_seconds": 0.01, "wait_seconds": 5.0, **limits}))


async def running_request(engines, fleet):
    """A request that its member holds; the names of that member and of the other one, which answers at once."""
    for engine in engines.values():
        engine.gate.clear()
    running = asyncio.create_task(fleet.generate(request("s")))
    await until(lambda: any(engine.running for engine in engines.values()))
    first = next(name for name, engine in engines.items() if engine.running)
    (other,) = engines.keys() - {first}
    engines[other].gate.set()
    return running, first, other


async def test_a_request_whose_server_is_gone_is_answered_by_another_and_the_session_stays_there():
    engines, fleet = fleet_of(3)
    async with fleet:
        await fleet.generate(request("s"))
        (first,) = [name for name, engine in engines.items() if engine.sessions]
        engines[first].failure, engines[first].is_healthy = REFUSED, False
        await fleet.generate(request("s"))
        assert states(fleet)[first] == "ejected"
        (second,) = [name for name, engine in engines.items() if engine.sessions and name != first]
        engines[first].failure, engines[first].is_healthy = None, True
        await fleet.check()
        assert states(fleet)[first] == "ready"
        await fleet.generate(request("s"))
        assert len(engines[second].sessions) == 2


async def test_the_context_of_a_fleet_is_known_though_a_member_gives_no_answer_and_another_was_not_started():
    class Server(MemberEngine):
        max_model_len = None

        async def capabilities(self):
            self.max_model_len = 100
            return await super().capabilities()

    silent, started = MemberEngine(), []
    silent.is_slow = True
    engines = {"silent": silent, "lazy": LazyEngine(lambda: started.append(1)), "server": Server()}
    async with EngineFleet(engines, limits=FleetLimits(check_timeout=0.05)) as fleet:
        assert await fleet.context_length() == 100
        assert not started


async def test_a_fleet_is_healthy_while_a_member_may_serve():
    engines, fleet = fleet_of(2, eject_after=1)
    async with fleet:
        await fleet.check_health()
        engines["a"].is_healthy = False
        await fleet.check()
        await fleet.check_health()
        engines["b"].is_healthy = False
        await fleet.check()
        with pytest.raises(ServerUnreachableError, match=r"a: .*health"):
            await fleet.check_health()


@pytest.mark.parametrize("fault", [{"is_healthy": False}, {"is_slow": True}], ids=["refuses", "is slow"])
async def test_a_member_that_alone_fails_its_checks_is_ejected_by_the_second_one(fault):
    engines, fleet = fleet_of(2, eject_after=2, check_seconds=60.0, check_timeout=0.1)
    async with fleet:
        await fleet.check()
        vars(engines["a"]).update(fault)
        await fleet.check()
        assert states(fleet) == {"a": "ready", "b": "ready"}
        await fleet.check()
        assert states(fleet) == {"a": "ejected", "b": "ready"}


async def test_members_that_are_all_slow_at_once_are_not_ejected_and_keep_their_requests(caplog):
    engines, fleet = fleet_of(3, check_timeout=0.02, eject_after=1)
    async with fleet:
        await fleet.check()
        for engine in engines.values():
            engine.gate.clear()
            engine.is_slow = True
        checks = engines["a"].health_checks
        running = asyncio.create_task(fleet.generate(request("s")))
        await until(lambda: engines["a"].health_checks >= checks + 4)
        assert caplog.text.count("no member answers its checks in time") == 1
        assert set(states(fleet).values()) == {"ready"}
        for engine in engines.values():
            engine.gate.set()
        await running
    assert sum(len(engine.sessions) for engine in engines.values()) == 1


async def test_a_request_that_kills_servers_does_not_reach_all_of_them():
    engines, fleet = fleet_of(6, failovers=2)
    for engine in engines.values():
        engine.failure = ServerError("r", "the engine died", status=500, body="EngineDeadError")
    async with fleet:
        with pytest.raises(ServerUnreachableError) as failure:
            await fleet.generate(request("s"))
    assert str(failure.value).count("the engine died") == 3
    assert sum(len(engine.sessions) for engine in engines.values()) == 3
    assert isinstance(failure.value, ServerUnreachableError)  # what a runner retries


async def test_an_invalid_request_is_not_sent_to_a_second_server():
    engines, fleet = fleet_of(3)
    for engine in engines.values():
        engine.failure = InvalidRequestError("r", "the prompt is empty")
    async with fleet:
        with pytest.raises(InvalidRequestError, match="the prompt is empty"):
            await fleet.generate(request("s"))
    assert sum(len(engine.sessions) for engine in engines.values()) == 1


async def test_a_request_waits_for_a_server_to_come_back():
    engines, fleet = fleet_of(1)
    engines["a"].is_healthy = False
    async with fleet:
        waiting = asyncio.create_task(fleet.generate(request("s")))
        await until(lambda: engines["a"].health_checks >= 3)
        assert not waiting.done()
        engines["a"].is_healthy = True
        assert (await waiting).completions[0].token_ids.tolist() == [7]


async def test_without_any_server_the_error_names_each_and_why():
    engines, fleet = fleet_of(2, wait_seconds=0.0)
    for engine in engines.values():
        engine.is_healthy = False
    async with fleet:
        with pytest.raises(
            ServerUnreachableError, match=r"a: .*its health check failed.*; b: .*its health check failed"
        ):
            await fleet.generate(request("s"))


async def test_a_fleet_without_members_says_so_at_the_first_request():
    async with EngineFleet({}) as fleet:
        with pytest.raises(ServerUnreachableError, match="no members; add one"):
            await fleet.generate(request("s"))
        engine = MemberEngine()
        await fleet.add("a", engine)
        await fleet.generate(request("s"))
    assert engine.sessions == ["s"]


@pytest.mark.parametrize(
    ("field", "one", "other"),
    [("model", "tiny", "large"), ("pixel_dtype", "uint8", "float32"), ("max_model_len", 4096, 8192)],
)
async def test_servers_that_differ_are_refused_before_the_first_request(field, one, other):
    engines = {"a": MemberEngine(**{field: one}), "b": MemberEngine(**{field: other})}
    async with EngineFleet(engines) as fleet:
        with pytest.raises(FleetMismatchError, match=field) as failure:
            await fleet.generate(request("s"))
        assert {repr(one), repr(other)} <= set(str(failure.value).replace(",", " ").replace(":", " ").split())
    assert not any(engine.sessions for engine in engines.values())


async def test_a_server_that_is_started_again_with_another_model_between_two_checks_samples_nothing():
    engines, fleet = fleet_of(2, check_seconds=600.0)
    async with fleet:
        await fleet.generate(request("s"))
        with pytest.raises(FleetMismatchError, match="model"):
            await fleet.add("c", MemberEngine(model="large"))
        other = next(name for name, engine in engines.items() if engine.sessions)
        engines[other].served["model"] = "other"
        await fleet.generate(request("s"))
        assert engines[other].sessions == ["s"]
        assert states(fleet) == {"a": "ready", "b": "ready"} | {other: "ejected"}


async def test_a_drain_waits_for_what_still_runs_and_after_a_time_limit_moves_it():
    engines, fleet = fleet_of(2)
    async with fleet:
        running, first, other = await running_request(engines, fleet)
        draining = asyncio.create_task(fleet.drain(first))
        await until(lambda: states(fleet)[first] == "draining")
        await fleet.generate(request("s"))
        assert [len(engines[first].sessions), len(engines[other].sessions)] == [1, 1]
        assert not draining.done()
        await fleet.remove(first, seconds=0.01)
        assert (await running).completions[0].token_ids.tolist() == [7]
        await draining
        assert engines[first].closed
        assert list(states(fleet)) == [other]


async def test_a_closed_fleet_refuses_requests_and_leaves_no_task():
    engines, fleet = fleet_of(2)
    await fleet.generate(request("s"))
    await fleet.close()
    assert all(engine.closed for engine in engines.values())
    with pytest.raises(EngineClosedError):
        await fleet.generate(request("s"))
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})


async def test_closing_a_fleet_closes_every_engine_before_it_raises_the_error_of_one():
    engines, fleet = fleet_of(2)

    async def fail():
        raise REFUSED

    async def close_slowly():
        await asyncio.sleep(0.01)
        engines["b"].closed = True

    engines["a"].close, engines["b"].close = fail, close_slowly
    with pytest.raises(ServerUnreachableError):
        await fleet.close()
    assert engines["b"].closed


async def test_a_timeout_of_the_caller_is_not_taken_for_a_failure_of_the_member():
    engines, fleet = fleet_of(2)
    for engine in engines.values():
        engine.gate.clear()
    async with fleet:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fleet.generate(request("s", n=3)), 0.02)
        assert sum(len(engine.sessions) for engine in engines.values()) == 1
        assert not any(engine.running for engine in engines.values())
        assert [member.in_flight for member in fleet.members] == [0, 0]


def test_a_fleet_serves_several_event_loops_one_after_another():
    engines, fleet = fleet_of(2)
    for engine in engines.values():
        engine.control = SimpleNamespace(resume=lambda: asyncio.sleep(0.001))

    async def run():
        await fleet.generate(request("s"))
        assert await fleet.control.resume() == {"a": None, "b": None}

    asyncio.run(run())
    asyncio.run(run())
    assert sorted(len(engine.sessions) for engine in engines.values()) == [0, 2]


async def test_a_fleet_refuses_another_event_loop_while_its_own_is_open():
    engines, fleet = fleet_of(2)
    async with fleet:
        await fleet.generate(request("s"))
        for call in (fleet.generate(request("t")), fleet.control.resume(), fleet.drain(next(iter(engines)))):
            with pytest.raises(EngineError, match="the engine belongs to another event loop"):
                await asyncio.to_thread(asyncio.run, call)
        await fleet.generate(request("s"))


@pytest.mark.parametrize("engine", [MemberEngine, 3], ids=["class", "number"])
def test_wrong_engines_are_refused(engine):
    with pytest.raises(ArgumentError):
        EngineFleet({"a": engine})


@pytest.mark.parametrize(
    ("one", "again"),
    [
        ("http://127.0.0.1:1", "http://127.0.0.1:1"),
        ("http://127.0.0.1:1", "http://127.0.0.1:1/"),
        ("http://127.0.0.1:1", "http://localhost:1"),
        ("http://[::1]:1", "http://LOCALHOST:1"),
        ("http://10.0.0.1", "http://10.0.0.1:80"),
        ("http://10.0.0.1:1", "http://user:secret@10.0.0.1:1"),
    ],
)
def test_a_server_is_named_once(one, again):
    with pytest.raises(ArgumentError, match="once") as caught:
        EngineFleet.from_urls([one, again])
    assert "secret" not in str(caught.value)
