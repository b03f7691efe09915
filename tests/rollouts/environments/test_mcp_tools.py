"""Tools of real MCP servers: of a process, and over HTTP on this machine."""

import asyncio
import functools
import io
import json
import logging
import re
import subprocess
import sys
import wave
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import mcp as mcp_package
import numpy as np
import pytest
import pytest_asyncio
from PIL import Image
from reserved_ports import reserved_port
from runner_world import advance_clock

from renderers.errors import MissingExtraError
from renderers.installation import install_command
from rollouts import EpisodeSpec, SamplingParams, run_episodes
from rollouts.environments import HttpServer, McpTools, StdioServer, ToolEnvironment
from rollouts.environments.tools import ToolArgumentsError, ToolFailedError
from rollouts.environments.tools.errors import ToolUnavailableError
from rollouts.errors import ArgumentError, RolloutsError
from rollouts.testing import ScriptedEngine

SCRIPT = str(Path(__file__).with_name("mcp_tools_server.py"))

pytestmark = pytest.mark.asyncio(loop_scope="module")


def stdio(**options):
    return StdioServer(sys.executable, [SCRIPT], **options)


def by_name(mcp):
    return {tool.name: tool for tool in mcp.tools}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mcp():
    """The tools of one process, which most tests share as episodes do."""
    async with McpTools({"test": stdio(env={"GIVEN": "1", "PATH": "/nowhere"})}) as tools:
        yield tools


def is_running(pid):
    return Path(f"/proc/{pid}").exists()


def pixels(image):
    return np.asarray(Image.open(io.BytesIO(image))).tolist()


@pytest.mark.slow
async def test_a_tool_has_the_name_description_and_schema_of_the_server(mcp):
    function = by_name(mcp)["repeat"].spec["function"]
    assert (function["name"], function["description"]) == ("repeat", "Repeat a text.")
    assert function["parameters"]["properties"]["times"]["type"] == "integer"
    assert function["parameters"]["required"] == ["text"]
    assert by_name(mcp)["repeat"].timeout_seconds == 60.0


@pytest.mark.slow
async def test_texts_images_and_structured_content_become_the_result_of_the_call(mcp):
    tools = by_name(mcp)
    assert await tools["repeat"].call({"text": "ab", "times": 3}) == "ababab"
    assert json.loads(await tools["counted"].call({"word": "abc"})) == {"abc": 3}
    (image,) = await tools["picture"].call({"side": 2})
    assert pixels(image) == [[[200, 40, 2]] * 2] * 2
    before, image, after = await tools["captioned"].call({"side": 3})
    assert (before, after, len(pixels(image))) == ("before", "after", 3)


@pytest.mark.slow
async def test_an_error_of_a_tool_is_for_the_model(mcp):
    tools = by_name(mcp)
    with pytest.raises(ToolFailedError, match="no such file"):
        await tools["fail"].call({"reason": "no such file"})
    with pytest.raises(ToolFailedError, match="times"):
        await tools["repeat"].call({"text": "a", "times": "many"})


def text(value):
    return {"type": "text", "text": value}


REASON = {"reason": "no such file"}
RESOURCE = {"type": "resource", "resource": {"uri": "file:///log", "text": "line 3: no such file"}}
LINK = {"type": "resource_link", "name": "log", "uri": "file:///log"}
PICTURE = {"type": "image", "data": "YmxvYg==", "mimeType": "image/png"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "structured", "told"),
    [
        ([], REASON, json.dumps(REASON)),
        ([text("it failed")], REASON, f"it failed\n{json.dumps(REASON)}"),
        ([text(json.dumps(REASON, indent=2))], REASON, json.dumps(REASON, indent=2)),
        ([text("it failed"), PICTURE, RESOURCE, LINK], None, "it failed\nline 3: no such file\nlog: file:///log"),
        ([PICTURE], None, "the tool gave no reason"),
    ],
)
async def test_the_reason_of_an_error_is_for_the_model_wherever_the_server_puts_it(mcp, content, structured, told):
    fields = {"content": content, "structuredContent": structured}
    result = by_name(mcp)["result"]
    with pytest.raises(ToolFailedError) as raised:
        await result.call({"fields": {**fields, "isError": True}})
    assert str(raised.value) == told
    if not content:
        assert await result.call({"fields": fields}) == told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "error"),
    [
        (-32602, ToolFailedError),
        (-32603, ToolUnavailableError),
        (-32050, ToolUnavailableError),
    ],
    ids=["invalid arguments", "internal", "of the server's own"],
)
async def test_only_refused_arguments_among_the_errors_of_the_protocol_are_for_the_model(mcp, code, error):
    tools = by_name(mcp)
    with pytest.raises(error, match=r'no such thing: \{"missing": "a/b"\}'):
        await tools["respond_with"].call({"code": code})
    assert await tools["repeat"].call({"text": "x"}) == "x"


NESTED = functools.reduce(lambda inner, _: [inner], range(300), 1)
CANNOT_BE_SENT = (ToolArgumentsError, "repeat: the arguments cannot be sent")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "error", "message"),
    [
        ("respond_with", {"code": -32000}, ToolUnavailableError, "there was an error in a call of .*no such thing"),
        ("repeat", {"text": "\ud83d"}, *CANNOT_BE_SENT),
        ("repeat", {"text": NESTED}, *CANNOT_BE_SENT),
    ],
    ids=["the code of a closed connection", "half of a surrogate pair", "nested too deeply"],
)
async def test_a_call_that_fails_ends_no_other_call(name, arguments, error, message):
    async with McpTools({"test": stdio()}) as mcp:
        tools = by_name(mcp)
        process = await tools["process"].call({})
        hanging = asyncio.create_task(tools["hang"].call({}))
        with pytest.raises(error, match=message):
            await tools[name].call(arguments)
        assert await tools["process"].call({}) == process
        assert not hanging.done()
        hanging.cancel()


async def test_use_on_another_event_loop_is_an_error(mcp):
    call = by_name(mcp)["repeat"].call({"text": "x"})
    with pytest.raises(ToolUnavailableError, match="another event loop"):
        await asyncio.to_thread(asyncio.run, call)


async def test_a_sound_is_an_audio_part(mcp):
    (part,) = await by_name(mcp)["sound"].call({"samples": 800})
    with wave.open(io.BytesIO(part["audio"])) as file:
        assert (part["type"], file.getnframes(), file.getframerate()) == ("audio", 800, 16_000)
    assert await by_name(mcp)["blob"].call({"mime_type": "audio/mpeg"}) == [{"type": "audio", "audio": b"blob"}]


async def test_content_that_no_message_can_hold_fails_the_episode(mcp):
    with pytest.raises(ToolUnavailableError, match=r"'test': the tool 'blob' returned resource \(application/pdf\)"):
        await by_name(mcp)["blob"].call({"mime_type": "application/pdf"})


async def test_the_process_gets_the_given_variables_and_no_other(mcp, monkeypatch):
    monkeypatch.setenv("API_KEY", "secret")
    variables = json.loads(await by_name(mcp)["variables"].call({}))
    variables.pop("LC_CTYPE", None)  # set by Python itself
    assert variables == {"GIVEN": "1", "PATH": "/nowhere"}


async def test_calls_of_many_episodes_run_at_the_same_time_on_one_process(mcp):
    tools = by_name(mcp)
    hanging = asyncio.create_task(tools["hang"].call({}))
    results = await asyncio.gather(*(tools["repeat"].call({"text": str(n), "times": 2}) for n in range(20)))
    assert results == [f"{n}{n}" for n in range(20)]
    assert len({await tools["process"].call({}) for _ in range(3)}) == 1
    assert not hanging.done()
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert await tools["repeat"].call({"text": "x"}) == "x", "the connection is usable after a cancelled call"


@pytest.mark.slow
async def test_a_server_that_ends_fails_the_call_and_is_started_again_by_the_next(renderer):
    async with McpTools({"test": stdio()}) as mcp:
        tools = by_name(mcp)
        first = await tools["process"].call({})
        waiting = asyncio.create_task(tools["hang"].call({}))
        with pytest.raises(ToolUnavailableError, match=r"(?s)'die'.*the disk is gone"):
            await tools["die"].call({})
        with pytest.raises(ToolUnavailableError, match="the connection ended during a call of 'hang'"):
            await waiting
        pids = await asyncio.gather(*(tools["process"].call({}) for _ in range(3)))
        assert len(set(pids)) == 1
        assert pids[0] != first

        engine = ScriptedEngine(['<tool_call>\n{"name": "die", "arguments": {}}\n</tool_call>'], renderer=renderer)
        (trajectory,) = await run_episodes(
            lambda: ToolEnvironment(None, tools=mcp.tools, messages=lambda task: [{"role": "user", "content": "go"}]),
            [EpisodeSpec(0)],
            engine=engine,
            renderer=renderer,
            sampling=SamplingParams(max_tokens=999),
            max_turns=3,
        )
        assert "MCP server 'test'" in trajectory.error
    assert not is_running(pids[0])
    with pytest.raises(ToolUnavailableError, match="McpTools is not open"):
        await tools["process"].call({})
    with pytest.raises(ToolUnavailableError, match="McpTools is not open"):
        _ = mcp.tools


@pytest.mark.slow
async def test_servers_with_the_same_names_are_an_error_unless_the_names_get_a_prefix():
    servers = {"one": stdio(env={"NUMBER": "1"}), "two": stdio(env={"NUMBER": "2"})}
    async with McpTools(servers, prefix_names=True) as mcp:
        tools = by_name(mcp)
        numbers = [json.loads(await tools[f"{name}__variables"].call({}))["NUMBER"] for name in ("one", "two")]
        assert numbers == ["1", "2"]
        assert tools["two__repeat"].spec["function"]["name"] == "two__repeat"

    mcp = McpTools(servers)
    clash = r"'one', 'two' have tools of the same name: .*\bpicture\b.*prefix_names"
    with pytest.raises(RolloutsError, match=clash):
        await mcp.__aenter__()
    assert not [task for task in asyncio.all_tasks() if task.get_name() in ("mcp-server-one", "mcp-server-two")]


@asynccontextmanager
async def http_server(port):
    """A server over HTTP, in a process."""
    process = subprocess.Popen([sys.executable, SCRIPT, str(port)], stderr=subprocess.DEVNULL)  # noqa: ASYNC220  a start is short
    try:
        while process.poll() is None:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                break
        yield f"http://127.0.0.1:{port}/mcp", process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_tools_over_http(mode, monkeypatch, caplog):
    """ "legacy" is what is spoken with older servers: sessions, and results as events of a stream."""
    monkeypatch.setattr("mcp.Client", partial(mcp_package.Client, mode=mode))
    caplog.set_level(logging.CRITICAL, "mcp")
    port = reserved_port()
    async with (
        http_server(port) as (url, process),
        McpTools({"web": HttpServer(url, {"Authorization": "Bearer a-key-of-1234"})}) as mcp,
    ):
        tools = by_name(mcp)
        assert await tools["repeat"].call({"text": "ab", "times": 2}) == "abab"
        (image,) = await tools["picture"].call({"side": 2})
        assert pixels(image) == [[[200, 40, 2]] * 2] * 2
        (large,) = await tools["noise"].call({"side": 1200})
        assert len(large) > 1_400_000
        for code in (-32602, -32603):
            with pytest.raises((ToolFailedError, ToolUnavailableError), match=r"no key \.\.\. is known"):
                await tools["respond_with"].call({"code": code, "message": "no key a-key-of-1234 is known"})
        hanging = asyncio.create_task(tools["hang"].call({}))
        assert await tools["process"].call({}) == str(process.pid)
        process.kill()
        process.wait()
        with pytest.raises(ToolUnavailableError, match="'web'"):
            await hanging
        with pytest.raises(ToolUnavailableError, match="'web'"):
            await tools["repeat"].call({"text": "ab"})
        async with http_server(port):
            assert await tools["repeat"].call({"text": "ab"}) == "ab"


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (StdioServer("no-such-program-here"), "there is no program 'no-such-program-here'"),
        (StdioServer(sys.executable, ["-c", "print('no protocol', flush=True); raise SystemExit('bye')"]), "bye"),
        (HttpServer("http://127.0.0.1:9/mcp"), "could not be opened"),
    ],
    ids=["no program", "a program that ends", "no server"],
)
async def test_a_server_that_cannot_be_opened_is_named_with_its_reason(server, reason, caplog):
    caplog.set_level(logging.CRITICAL, "mcp")
    with pytest.raises(ToolUnavailableError, match=f"(?s)MCP server 'x'.*{reason}"):
        await McpTools({"x": server}).__aenter__()


@pytest.mark.slow
async def test_a_server_that_does_not_answer_is_ended_after_the_time_to_open(tmp_path):
    record = tmp_path / "pid"
    program = f"import os, time; open({str(record)!r}, 'w').write(str(os.getpid())); time.sleep(600)"

    async def open_it():
        tools = McpTools({"x": StdioServer(sys.executable, ["-c", program])}, open_seconds=60.0)
        opening = asyncio.create_task(tools.__aenter__())
        while not (record.exists() and record.read_text()):  # noqa: ASYNC110  the process writes it
            await asyncio.sleep(0.01)
        advance_clock(60.0)
        await opening

    with pytest.raises(ToolUnavailableError, match="was not ready within 60 seconds"):
        await asyncio.to_thread(asyncio.run, open_it())  # the event loop of the other tests keeps its clock
    assert not is_running(record.read_text())


async def test_a_failed_server_closes_the_others():
    with pytest.raises(ToolUnavailableError, match="'bad'"):
        await McpTools({"good": stdio(), "bad": StdioServer("no-such-program-here")}).__aenter__()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("mcp-server-good")]


@pytest.mark.parametrize(
    "make",
    [
        lambda: McpTools({"x": stdio()}, call_seconds=0),
        lambda: StdioServer("python", "-c"),
        lambda: StdioServer("python", env={"A": 1}),
    ],
    ids=["call_seconds", "args", "value"],
)
async def test_wrong_arguments_are_refused(make):
    with pytest.raises(ArgumentError):
        make()


async def test_a_missing_or_old_package_is_named(monkeypatch):
    def missing(name):
        raise __import__("importlib.metadata").metadata.PackageNotFoundError(name)

    monkeypatch.setattr("rollouts.environments.mcp.tools.version", missing)
    with pytest.raises(MissingExtraError, match=re.escape(install_command("mcp"))):
        McpTools({"x": stdio()})
    for old in ("1.12.0", "2.0.0"):  # verifiers 0.4 pins the second
        monkeypatch.setattr("rollouts.environments.mcp.tools.version", lambda name, old=old: old)
        with pytest.raises(MissingExtraError, match=f"2.3 or later .{re.escape(old)} cannot limit"):
            McpTools({"x": stdio()})


async def test_the_text_of_a_server_has_no_variables_or_headers_which_may_be_secret():
    server = StdioServer("mcp-files", env={"API_KEY": "sk-secret"})
    assert repr(server) == "StdioServer(command='mcp-files', args=(), cwd=None)"
    assert "sk-secret" not in repr(HttpServer("http://127.0.0.1/mcp", headers={"Authorization": "sk-secret"}))
    with pytest.raises(ArgumentError, match="KEY") as error:
        StdioServer("python", env={"KEY": b"sk-secret"})
    assert "sk-secret" not in str(error.value)
