"""Tiny chunks, more connections than descriptors, interrupts: a server ends these with little work and no traceback."""

import contextlib
import http.client
import signal
import socket
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

from rollouts.serve import server as served

HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
)
SERVE = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from rollouts.serve.server import base_url, bound_socket, run_server
listener = bound_socket("127.0.0.1", 0)
app = Starlette(routes=[Route("/", lambda request: PlainTextResponse("alive"))])
run_server(app, listener, on_ready=lambda: print(base_url(listener), flush=True))
"""


def sent(url: str, data: bytes) -> bytes:
    """What a server answers to these bytes, of which it may read a part."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as client:
        with contextlib.suppress(OSError):
            client.sendall(data)
        answer = b""
        with contextlib.suppress(OSError):
            while piece := client.recv(2000):
                answer += piece
        return answer


def test_a_body_of_tiny_chunks_is_refused_after_few_of_them(open_server, monkeypatch):
    events = 0
    next_event = served._CountingConnection.next_event

    def counted(connection):
        nonlocal events
        events += 1
        return next_event(connection)

    monkeypatch.setattr(served._CountingConnection, "next_event", counted)
    for chunks in (50_000, 100_000):
        events = 0
        body = HEAD.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * chunks + b"0\r\n\r\n"
        answer = sent(open_server.base_url, body)
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"The body comes in tiny chunks, 4097 of 4097 bytes; send larger ones." in answer
        assert events < 5000
    assert open_server.get("/v1/models").status == 200


def test_a_body_of_many_chunks_of_usual_size_is_read(open_server):
    chunks = (b"100\r\n" + b" " * 256 + b"\r\n") * 5000 + b"2\r\n{}\r\n0\r\n\r\n"
    answer = sent(open_server.base_url, HEAD.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
    assert b"messages is missing" in answer


@pytest.mark.slow
def test_connections_beyond_the_descriptors_get_a_503_and_one_line_in_the_log(tmp_path):
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        address = urlsplit(process.stdout.readline().strip())
        with contextlib.ExitStack() as opened:
            clients = [
                opened.enter_context(socket.create_connection((address.hostname, address.port), timeout=60))
                for _ in range(400)
            ]
            refused = [client.recv(100) for client in clients[85:]]
            assert all(answer.startswith(b"HTTP/1.1 503") for answer in refused)
            clients[0].sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            assert clients[0].makefile("rb").read().endswith(b"alive")
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
        connection.request("GET", "/")
        assert connection.getresponse().read() == b"alive"
    finally:
        process.kill()
        process.wait()
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert "85 connections are open: further ones get HTTP 503. Raise the limit of open files" in line


STREAM = """
import asyncio, contextlib, uvicorn
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route
from rollouts.serve.server import base_url, bound_socket, run_server

config = uvicorn.Config
uvicorn.Config = lambda app, **options: config(app, **options | {"timeout_graceful_shutdown": 0})

async def endless(request):
    async def pieces():
        yield "begun"
        await asyncio.Event().wait()
    return StreamingResponse(pieces())

listener = bound_socket("127.0.0.1", 0)
app = Starlette(routes=[Route("/", endless)])
with contextlib.suppress(KeyboardInterrupt):
    run_server(app, listener, on_ready=lambda: print(base_url(listener), flush=True))
"""


def test_a_stream_that_an_interrupt_ends_leaves_no_traceback(tmp_path):
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-c", STREAM], stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        address = urlsplit(process.stdout.readline().strip())
        with socket.create_connection((address.hostname, address.port), timeout=60) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            while b"begun" not in client.recv(1000):
                pass
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "log").read_text().count("\n") == 1  # how many requests were cancelled
