"""A gateway behind a real uvicorn on a loopback port, and what its trees are compared with."""

import asyncio
import base64
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import uvicorn
from images import png
from starlette.applications import Starlette

from rollouts import Trajectory
from rollouts.engines.protocol import TokenDelta
from rollouts.serve.gateway.routes import Gateway
from rollouts.testing import ScriptedEngine

IMAGE = np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3)
OTHER_IMAGE = IMAGE[::-1].copy()

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at a field.",
            "parameters": {"type": "object", "properties": {"row": {"type": "integer"}, "column": {"type": "string"}}},
        },
    }
]

CALL = '<tool_call>\n{"name": "look", "arguments": {"row": 1, "column": "left"}}\n</tool_call>'


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(pixels: np.ndarray) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(png(pixels))}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Server:
    """A running gateway. `base_url` is that of an OpenAI client."""

    def __init__(self, gateway: Gateway, port: int) -> None:
        self.gateway = gateway
        self.root = f"http://127.0.0.1:{port}"
        self.base_url = f"{self.root}/v1"

    def client(self, session_id: str | None = None, **options: Any) -> openai.OpenAI:
        headers = {"X-Session-ID": session_id} if session_id else {}
        options = {"base_url": self.base_url, "api_key": "none", "max_retries": 0, **options}
        return openai.OpenAI(default_headers=headers, **options)

    def async_client(self, session_id: str | None = None, **options: Any) -> openai.AsyncOpenAI:
        headers = {"X-Session-ID": session_id} if session_id else {}
        options = {"base_url": self.base_url, "api_key": "none", "max_retries": 0, **options}
        return openai.AsyncOpenAI(default_headers=headers, **options)

    def trajectory(self, session_id: str) -> Trajectory:
        return self.gateway.trajectory(session_id)


class _AnnouncingServer(uvicorn.Server):
    """Sets `listening` when it listens, and leaves signals to the tests."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    def capture_signals(self) -> Any:
        return nullcontext()


@asynccontextmanager
async def serving(engine: Any, renderer: Any, **options: Any) -> AsyncIterator[Server]:
    """Serve a gateway on the running event loop until the end of the block."""
    gateway = Gateway(engine, renderer, **options)
    app = Starlette(routes=gateway.routes())
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off")
    server = _AnnouncingServer(config)
    task = asyncio.create_task(server.serve())
    await server.listening.wait()
    try:
        yield Server(gateway, server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = True
        await task
        await gateway.close()


@contextmanager
def served(engine: Any, renderer: Any, **options: Any) -> Iterator[Server]:
    """Serve a gateway from a thread until the end of the block."""
    started: Future[tuple[Server, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        ended = asyncio.Event()
        async with serving(engine, renderer, **options) as server:
            started.set_result((server, asyncio.get_running_loop(), ended))
            await ended.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    server, loop, ended = started.result(30)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(30)
        assert not thread.is_alive()


class SteppedEngine(ScriptedEngine):
    """Reports one token at a time, and waits for `continued` after so many."""

    def __init__(self, script, renderer, *, pause_after=10**9, error=None):
        super().__init__(script, renderer=renderer)
        self.pause_after, self.error = pause_after, error
        self.continued, self.cancelled = asyncio.Event(), asyncio.Event()

    streams = True

    async def generate(self, request, listen=None):
        result = await super().generate(request)
        if listen is None:
            return result
        try:
            for completion in result.completions:
                for position, token in enumerate(completion.token_ids):
                    if position == self.pause_after:
                        await self.continued.wait()
                        if self.error is not None:
                            raise self.error
                    listen(TokenDelta(completion.index, completion.token_ids[position : position + 1], token))
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return replace(result)


class Conversation:
    """An environment that answers the turns of the model with given messages, and with results of its calls."""

    def __init__(self, first: Sequence[Any], answers: Sequence[Callable[[Any], Sequence[Any]]], tools: Any = None):
        self.first, self.answers, self.tools = first, list(answers), tools
        self.turn = 0

    def reset(self, seed: int) -> Sequence[Any]:
        return self.first

    def step(self, assistant: Any) -> Any:
        from rollouts import StepResult

        if self.turn == len(self.answers):
            return StepResult(reward=0.0, done=True)
        self.turn += 1
        return StepResult(self.answers[self.turn - 1](assistant), reward=0.0)


def plain_tree(trajectory: Trajectory) -> list[Any]:
    """What must be equal for two trees to be equal."""
    nodes = [
        (
            node.parent,
            node.token_ids.tolist(),
            node.sampled.tolist(),
            node.logprobs.tolist(),
            node.weight_spans,
            [(one.mm_hash, one.source.digest, one.placeholder) for one in node.media],
            None if node.content is None else node.content.tolist(),
            [_plain_message(message) for message in node.messages],
        )
        for node in trajectory.nodes
    ]
    turns = [(turn.node, turn.finish_reason, turn.message, turn.agent) for turn in trajectory.turns]
    return [nodes, turns, trajectory.forks]


def _plain_message(message: Any) -> Any:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts = [part if part["type"] == "text" else (part["type"], part[part["type"]].digest) for part in content]
    return {**message, "content": parts}
