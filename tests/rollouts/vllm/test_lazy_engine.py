"""Engines that are started with their first request: once, and never without need."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_inputs import generate_one, request, until
from fake_server import FakeVLLM
from reserved_ports import reserved_port
from runner_world import advance_clock

from rollouts.engines.fleet import EngineFleet, FleetLimits
from rollouts.engines.lazy import LazyEngine
from rollouts.errors import EngineError, EngineStartError, FleetMismatchError
from rollouts.testing import ScriptedEngine

SERVE = Path(__file__).with_name("fake_vllm_serve.py")


class Starts:
    """A function that makes engines, fails as often as it is told, and counts."""

    def __init__(self, failures=0):
        self.count = 0
        self._failures = failures

    async def __call__(self):
        self.count += 1
        if self.count <= self._failures:
            raise OSError("no GPU is free")
        await asyncio.sleep(0)
        return ScriptedEngine(lambda _: [7])


def served(tmp_path, *arguments, port=None, **options):
    port = port or reserved_port()
    command = [sys.executable, str(SERVE), str(port), *arguments]
    options = {"log_path": tmp_path / "server.log", "start_seconds": 60.0, **options}
    return LazyEngine.from_command(command, f"http://127.0.0.1:{port}", **options)


def child_of(log_path):
    return int(re.findall(r"child (\d+)", log_path.read_text())[-1])


async def ended(pid):
    await until(lambda: not is_running(pid))


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_running(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def test_a_failed_start_is_an_error_of_all_requests_and_nothing_is_started_again():
    start = Starts(failures=1)
    async with LazyEngine(start) as engine:
        calls = [generate_one(engine, request(request_id=f"r{n}")) for n in range(3)]
        failures = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(failure) for failure in failures] == [EngineStartError] * 3
        assert "OSError: no GPU is free" in str(failures[0])
        with pytest.raises(EngineStartError, match="no GPU is free"):
            await generate_one(engine, request())
    assert start.count == 1


async def test_a_server_that_was_killed_is_an_error_of_every_request(tmp_path):
    async with served(tmp_path) as engine:
        await generate_one(engine, request())
        first = child_of(tmp_path / "server.log")
        os.killpg(os.getpgid(first), signal.SIGKILL)
        await ended(first)
        await until(lambda: not engine._process.is_running)
        for _ in range(2):
            with pytest.raises(EngineStartError, match="it ended with status"):
                await generate_one(engine, request())
        assert child_of(tmp_path / "server.log") == first


async def test_a_server_that_is_not_ready_in_time_is_ended(tmp_path):
    log = tmp_path / "server.log"
    command = ["sh", "-c", "echo child $$; exec sleep 600"]
    url = f"http://127.0.0.1:{reserved_port()}"
    async with LazyEngine.from_command(command, url, log_path=log, start_seconds=60.0) as engine:
        generating = asyncio.create_task(generate_one(engine, request()))
        await until(lambda: log.exists() and log.read_text().endswith("\n"))
        advance_clock(60.0)
        with pytest.raises(EngineStartError, match="not ready after 60 s"):
            await generating
    await ended(child_of(log))


async def test_an_address_that_answers_already_is_not_taken_for_the_started_server(tmp_path):
    async with FakeVLLM() as other, served(tmp_path, port=int(other.base_url.rpartition(":")[2])) as engine:
        with pytest.raises(EngineStartError, match=r"a server runs at .* already"):
            await generate_one(engine, request())
    assert not (tmp_path / "server.log").exists()


@pytest.mark.slow
async def test_the_server_ends_when_its_program_is_killed(tmp_path):
    log, port = tmp_path / "server.log", reserved_port()
    program = f"""
import asyncio, sys
from rollouts.engines.lazy import LazyEngine
async def main():
    command = [sys.executable, {str(SERVE)!r}, "{port}"]
    await LazyEngine.from_command(command, "http://127.0.0.1:{port}", log_path={str(log)!r}).start()
    print("started", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(  # noqa: ASYNC220  it is killed below, whatever the event loop does
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment
    )
    assert await asyncio.to_thread(process.stdout.readline) == b"started\n"
    child = child_of(log)
    assert is_running(child)
    process.kill()
    process.wait()
    process.stdout.close()
    await ended(child)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent was killed")
async def test_the_server_ends_when_its_supervisor_is_killed(tmp_path):
    async with served(tmp_path) as engine:
        await engine.start()
        child = child_of(tmp_path / "server.log")
        server = parent_of(child)
        os.kill(parent_of(server), signal.SIGKILL)
        await ended(server)
        os.kill(child, signal.SIGKILL)  # a real server ends its processes itself at SIGTERM


async def test_a_request_moves_on_from_a_member_whose_server_was_killed(tmp_path):
    names = ("one", "two")
    engines = {name: served(tmp_path, log_path=tmp_path / f"{name}.log") for name in names}
    async with EngineFleet(engines, limits=FleetLimits(check_seconds=0.02)) as fleet:
        await asyncio.gather(*(engine.start() for engine in engines.values()))
        await generate_one(fleet, request(session_id="session"))
        child = child_of(tmp_path / "one.log")
        os.killpg(os.getpgid(child), signal.SIGKILL)
        await ended(child)
        await until(lambda: not engines["one"]._process.is_running)
        await generate_one(fleet, request(session_id="session"))
        await fleet.check()
        assert {member.name: str(member.state) for member in fleet.members} == {"one": "ejected", "two": "ready"}


async def test_a_request_moves_on_from_a_member_that_cannot_be_started():
    engines = {"one": LazyEngine(Starts(failures=100)), "two": LazyEngine(Starts())}
    async with EngineFleet(engines, limits=FleetLimits(check_seconds=0.05)) as fleet:
        for number in range(20):
            await generate_one(fleet, request(session_id=f"s{number}"))
        states = {member.name: str(member.state) for member in fleet.members}
    assert states == {"one": "ejected", "two": "ready"}


async def test_a_member_that_starts_with_another_model_samples_nothing():
    class OtherModel(ScriptedEngine):
        async def capabilities(self):
            return SimpleNamespace(model=self.model)

    def engine(model):
        made = OtherModel(lambda _: [7])
        made.model = model
        return made

    started = {name: engine(name) for name in ("one", "two")}
    engines = {name: LazyEngine(lambda name=name: started[name]) for name in started}
    async with EngineFleet(engines) as fleet:
        calls = [generate_one(fleet, request(session_id=f"s{number}")) for number in range(20)]
        failures = [
            each for each in await asyncio.gather(*calls, return_exceptions=True) if isinstance(each, Exception)
        ]
    assert {type(failure) for failure in failures} == {FleetMismatchError}
    assert "model 'two', one has 'one'" in str(failures[0]) or "model 'one', two has 'two'" in str(failures[0])
    assert sorted(bool(each.requests) for each in started.values()) == [False, True]


async def test_a_start_that_runs_on_another_event_loop_is_not_awaited():
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def start():
        begun.set()
        await may_end.wait()
        return ScriptedEngine(lambda _: [7])

    engine = LazyEngine(start)
    first = asyncio.create_task(generate_one(engine, request()))
    await begun.wait()
    with pytest.raises(EngineError, match="belongs to another event loop"):
        await asyncio.to_thread(asyncio.run, generate_one(engine, request()))
    may_end.set()
    assert (await first).token_ids.tolist() == [7]
