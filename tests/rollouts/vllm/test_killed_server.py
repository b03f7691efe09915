"""A server process that is killed with kill -9: the error names the request and the server, and nothing hangs."""

import asyncio
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine_inputs import image, request, until
from fake_server import GENERATE, LABEL, MM, RELOAD

from rollouts.engines.vllm import HttpLimits, ServerRenderer, VLLMEngine
from rollouts.errors import ServerUnreachableError, WeightUpdateError

LIMITS = HttpLimits(retries=2, backoff_seconds=0.01, longest_backoff_seconds=0.05)
SECONDS = 60  # far more than any of it takes; a hang, where it ends


@dataclass
class Killable:
    """`held` comes back once the request that was to be held has arrived."""

    base_url: str
    process: asyncio.subprocess.Process

    async def held(self):
        assert await asyncio.wait_for(self.process.stdout.readline(), SECONDS) == b"held\n"

    async def kill(self):
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def killable(model_dir, path=None):
    program = Path(__file__).parent / "killable_server.py"
    arguments = [str(program), str(model_dir), *([] if path is None else [path])]
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    try:
        address = await asyncio.wait_for(process.stdout.readline(), SECONDS)
        yield Killable(address.decode().strip(), process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def killed_while(server, call):
    """The error of a call whose server is killed once it holds what it was to hold."""
    running = asyncio.ensure_future(call)
    await server.held()
    await server.kill()
    with pytest.raises(Exception) as caught:
        await asyncio.wait_for(running, SECONDS)
    return caught.value


def generating(*images):
    return lambda engine, directory: engine.generate(request(*images, request_id="turn-7"))


def updating(engine, directory):
    return engine.control.update_weights(directory, "v1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "call", "error", "name"),
    [
        (GENERATE, generating(), ServerUnreachableError, "turn-7"),  # whole answers
        (GENERATE, generating(image()), ServerUnreachableError, "turn-7"),  # the first token has come
        ("/version", generating(), ServerUnreachableError, "turn-7"),  # the first question to the server
        ("/metrics", generating(image()), ServerUnreachableError, "turn-7"),
        ("/pause", lambda engine, directory: engine.control.pause("wait"), ServerUnreachableError, "pause"),
        ("/pause", updating, ServerUnreachableError, "update_weights"),
        (RELOAD, updating, WeightUpdateError, "start it again"),
        (MM, updating, WeightUpdateError, ""),
        (LABEL, updating, WeightUpdateError, ""),
        ("/resume", updating, ServerUnreachableError, "update_weights"),
    ],
)
async def test_a_call_whose_server_is_killed_is_named_together_with_the_server(
    reloadable_model_dir, path, call, error, name
):
    async with killable(reloadable_model_dir, path) as server, VLLMEngine(server.base_url, limits=LIMITS) as engine:
        caught = await killed_while(server, call(engine, reloadable_model_dir))
    assert type(caught) is error
    assert name in str(caught)
    assert server.base_url in str(caught)
    if error is ServerUnreachableError:
        assert (caught.request_id, caught.server) == (name, server.base_url)
        assert "Is the server running" in str(caught)


@pytest.mark.slow
async def test_all_who_wait_for_the_first_question_get_an_error_of_their_own(reloadable_model_dir):
    async with (
        killable(reloadable_model_dir, "/version") as server,
        VLLMEngine(server.base_url, limits=LIMITS) as engine,
    ):
        names = [f"turn-{number}" for number in range(5)]
        calls = [asyncio.ensure_future(engine.generate(request(request_id=name))) for name in names]
        await server.held()
        await server.kill()
        errors = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), SECONDS)
    assert [error.request_id for error in errors] == names
    assert all(server.base_url in str(error) for error in errors)


@pytest.mark.slow
async def test_a_completion_that_waits_for_the_end_of_a_pause_is_told_when_the_server_is_gone(reloadable_model_dir):
    async with killable(reloadable_model_dir) as server, VLLMEngine(server.base_url, limits=LIMITS) as engine:
        await engine.control.pause()
        running = asyncio.ensure_future(engine.generate(request(request_id="turn-7")))
        await until(lambda: "turn-7" in engine._requests.ids())
        await server.kill()
        with pytest.raises(ServerUnreachableError, match="request turn-7") as caught:
            await asyncio.wait_for(running, SECONDS)
    assert server.base_url in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions/render"])
async def test_a_renderer_whose_server_is_killed_says_which(reloadable_model_dir, path):
    async with killable(reloadable_model_dir, path) as server:
        renderer = ServerRenderer.connect(server.base_url, limits=LIMITS)
        error = await killed_while(server, renderer.render([{"role": "user", "content": "a"}]))
        await renderer.close()
    assert isinstance(error, ServerUnreachableError)
    assert server.base_url in str(error)
    assert error.server == server.base_url
