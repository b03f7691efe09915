"""The cost of a text request: bare asyncio streams, ServerConnection (aiohttp), the whole engine, and httpx.

    python benchmarks/engine_requests.py [--check]

All four send the same bytes (about 1 KB of request, 2 KB of response) to the scripted server of the tests, which runs
in another process and repeats one response. Rounds alternate, so that drift affects every side equally. The
best round of each side counts, because other load on the machine can only add time. `engine.py` calls this too.
`--check` fails if a target is missed.
"""

import argparse
import asyncio
import multiprocessing
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx
from render import Report, milliseconds

from rollouts import GenerateRequest, SamplingParams
from rollouts.engines.http.connection import ServerConnection
from rollouts.engines.vllm import HttpLimits, VLLMEngine

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "rollouts" / "vllm"))

import fake_http
from fake_server import GENERATE, FakeVLLM

AT_ONCE = 512
IN_A_ROUND = 2048
ONE_BY_ONE = 256
ROUNDS = 5
LEAST_PER_SECOND = 1500
MOST_OVERHEAD = 0.001
PROMPT = tuple(100 + place % 200 for place in range(150))
TOKENS = 16

Send = Callable[[], Awaitable[object]]


class Cost(NamedTuple):
    """Seconds per request: `sequential` one by one, `concurrent` and `processor` time with 512 at once."""

    sequential: float
    concurrent: float
    processor: float


def compare_requests(report: Report) -> None:
    """One table: the cost of the same exchange on each side."""
    costs = asyncio.run(_costs())
    wire = costs["bare streams"]
    with report.table(
        f"A text request, {AT_ONCE} at once and one by one", "requests/s", "processor", "one by one", "beyond the wire"
    ) as table:
        for name, cost in costs.items():
            row = (name, f"{1 / cost.concurrent:,.0f}", milliseconds(cost.processor), milliseconds(cost.sequential))
            beyond = cost.sequential - wire.sequential
            if name != "VLLMEngine":
                table.add_row(*row, milliseconds(beyond), "", "")
                continue
            table.add_row(*row, "", *report.check(cost.concurrent, 1 / LEAST_PER_SECOND, f">= {LEAST_PER_SECOND:,}/s"))
            target_cells = report.check(beyond, MOST_OVERHEAD, f"<= {MOST_OVERHEAD * 1e3:.0f} ms")
            table.add_row("", "", "", "", milliseconds(beyond), *target_cells)


async def _costs() -> dict[str, Cost]:
    body = await _body_of_a_request()
    with server_elsewhere() as url:
        async with (
            _bare(url, body) as bare,
            _connection(url, body) as connection,
            _engine(url) as engine,
            _httpx(url, body) as other,
        ):
            sides = {"bare streams": bare, "ServerConnection": connection, "VLLMEngine": engine, "httpx": other}
            return await _measured(sides)


async def _measured(sides: dict[str, Send]) -> dict[str, Cost]:
    measured: dict[str, list[Cost]] = {name: [] for name in sides}
    for number in range(ROUNDS):
        for name, send in sides.items():
            if name == "httpx" and number:
                continue  # it takes longer than all the others together
            await _at_once(send, AT_ONCE)  # opens the connections that expired during the other sides' rounds
            measured[name].append(Cost(await _one_by_one(send), *await _at_once(send, IN_A_ROUND)))
    return {name: Cost(*map(min, zip(*costs, strict=True))) for name, costs in measured.items()}


async def _one_by_one(send: Send) -> float:
    seconds = []
    for _ in range(ONE_BY_ONE):
        start = time.perf_counter()
        await send()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


async def _at_once(send: Send, requests: int) -> tuple[float, float]:
    """Returns seconds and processor seconds per request."""
    numbers = iter(range(requests))

    async def work() -> None:
        for _ in numbers:
            await send()

    start, processor = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return (time.perf_counter() - start) / requests, (time.process_time() - processor) / requests


# The sides.


def _request(number: int) -> GenerateRequest:
    return GenerateRequest(PROMPT, SamplingParams(max_tokens=TOKENS, seed=1), request_id=f"request-{number:08d}")


@asynccontextmanager
async def _engine(url: str) -> AsyncIterator[Send]:
    engine = VLLMEngine(url, limits=HttpLimits(concurrency=AT_ONCE))
    numbers = count()

    async def send() -> None:
        result = await engine.generate(_request(next(numbers)))
        assert len(result.completions[0].token_ids) == TOKENS

    try:
        yield send
    finally:
        await engine.close()


@asynccontextmanager
async def _connection(url: str, body: bytes) -> AsyncIterator[Send]:
    connection = ServerConnection(url, limits=HttpLimits(concurrency=AT_ONCE))

    async def send() -> None:
        assert (await connection.request("POST", GENERATE, name="request", body=[body])).status == 200

    try:
        yield send
    finally:
        await connection.close()


@asynccontextmanager
async def _httpx(url: str, body: bytes) -> AsyncIterator[Send]:
    limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE, keepalive_expiry=3)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=None, trust_env=False) as client:

        async def send() -> None:
            headers = {"content-type": "application/json"}
            assert (await client.post(GENERATE, content=body, headers=headers)).status_code == 200

        yield send


@asynccontextmanager
async def _bare(url: str, body: bytes) -> AsyncIterator[Send]:
    """The minimum for Python's asyncio: only the length of the response is parsed."""
    place = urlsplit(url)
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    head = f"POST {GENERATE} HTTP/1.1\r\nhost: {place.netloc}\r\ncontent-type: application/json\r\n"
    message = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    async def send() -> None:
        reader, writer = idle.pop() if idle else await asyncio.open_connection(place.hostname, place.port)
        writer.write(message)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        idle.append((reader, writer))

    yield send
    for _, writer in idle:
        writer.close()


# The server.


async def _body_of_a_request() -> bytes:
    """The request body that the engine sends."""
    async with FakeVLLM() as server, VLLMEngine(server.base_url) as engine:
        await engine.generate(_request(0))
        return server.generations[-1].body


@contextmanager
def server_elsewhere() -> Iterator[str]:
    """The URL of a scripted server in another process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    yield ours.recv()
    ours.send(None)
    process.join()


class _Repeating(FakeVLLM):
    """Composes its first completion and repeats it, so that the cost of the server stays small."""

    _repeated: bytes = b""

    async def handle(self, seen: fake_http.Seen, connection: fake_http.Connection) -> None:
        if seen.path != GENERATE or b"request-0" not in seen.body:  # the requests of an engine's probe
            return await super().handle(seen, connection)
        if not self._repeated:
            body = (await self.respond(seen)).body
            head = (
                f"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
            )
            self._repeated = f"{head}\r\n\r\n".encode() + body
        connection.write(self._repeated)


def _serve(pipe: Connection) -> None:
    async def run() -> None:
        async with _Repeating() as server:
            pipe.send(server.base_url)
            await asyncio.to_thread(pipe.recv)

    asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description="What a text request costs beyond the wire.")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    options = parser.parse_args()
    report = Report()
    compare_requests(report)
    report.console.print(f"{report.missed} targets missed" if report.missed else "every target kept")
    if options.check and report.missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
