"""Who is answered by `rollouts serve`: API keys, web pages of other origins, large bodies."""

import asyncio
import contextlib
import http.client
import json
import socket
import threading
from urllib.parse import urlsplit

import pytest
from served_in_thread import ServedInThread
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from rollouts.errors import ArgumentError, CommandFileError, RolloutsError
from rollouts.serve.access import BodyLimitMiddleware
from rollouts.serve.errors import RequestError
from rollouts.serve.server import HttpProtocol, bound_socket, check_protection, read_keys, run_server

CHAT = "/v1/chat/completions"


def test_every_route_but_that_of_health_needs_the_key(guarded):
    paths = {route.path: "GET" in route.methods for route in guarded.app.routes}
    assert len(paths) > 10
    for path, is_get in paths.items():
        answer = guarded.get(path) if is_get else guarded.post(path, {})
        assert answer.status == (200 if path == "/health" else 401)
        if answer.status != 200:
            assert answer.json["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer other", "bearer secret", "Basic secret", "Bearer sécret"])
def test_a_wrong_key_is_refused(guarded, value):
    assert guarded.get("/v1/models", {"Authorization": value.encode().decode("latin-1")}).status == 401


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_the_limit_is_refused(guarded, chunked):
    url = urlsplit(guarded.base_url)
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=30)
    pieces = iter([b"{" + b" " * 60_000] * 2) if chunked else b"{" + b" " * 120_000
    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    with contextlib.suppress(ConnectionError):  # the server may have answered already
        connection.request("POST", CHAT, pieces, headers, encode_chunked=chunked)
    response = connection.getresponse()
    assert response.status == 413
    body = response.read()
    assert b"100000 bytes" in body
    assert json.loads(body)["error"]["code"] == "body_too_large"
    connection.close()
    assert guarded.get("/health").status == 200


async def test_a_body_that_does_not_arrive_is_refused_and_the_end_of_a_connection_is_waited_for():
    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        await asyncio.wait_for(receive(), 30)

    pieces = iter([{"type": "http.request", "body": b"{", "more_body": True}])

    async def stalled():
        for piece in pieces:
            return piece
        await asyncio.Event().wait()

    limited = BodyLimitMiddleware(app, 100, seconds=0.01)
    with pytest.raises(RequestError, match=r"within 0\.01 s") as refused:
        await limited({"type": "http", "path": "/", "headers": []}, stalled, None)
    assert refused.value.status == 408

    async def complete():
        if messages:
            return messages.pop()
        await asyncio.sleep(0.05)  # longer than the body may take
        return {"type": "http.disconnect"}

    messages = [{"type": "http.request", "body": b"{}", "more_body": False}]
    await limited({"type": "http", "path": "/", "headers": []}, complete, None)


@pytest.mark.slow
def test_headers_that_do_not_arrive_end_the_connection_and_a_slow_answer_does_not():
    begun, released = threading.Event(), threading.Event()

    def answer(request):  # on a thread of Starlette
        begun.set()
        released.wait(60)
        return PlainTextResponse("answered")

    class Impatient(HttpProtocol):
        header_seconds = 0.2

    with ServedInThread(Starlette(routes=[Route("/", answer)]), Impatient) as server:
        url = urlsplit(server.base_url)
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
        connection.request("GET", "/")
        assert begun.wait(60)
        for part in (b"", b"GET / HTTP/1.1\r\nHost: a\r\n"):
            with socket.create_connection((url.hostname, url.port), timeout=60) as slow:
                slow.sendall(part)
                assert slow.recv(1) == b""  # the server has closed it, later than it would have closed the other one
        released.set()
        response = connection.getresponse()
        assert response.read() == b"answered"
        connection.sock.sendall(b"GET / HT")  # the next request of the connection
        assert connection.sock.recv(1) == b""
        connection.close()


def test_headers_have_a_limit_of_size(guarded):
    assert guarded.get("/health", {"X-Long": "x" * 10_000}).status == 200
    url = urlsplit(guarded.base_url)
    with socket.create_connection((url.hostname, url.port), timeout=60) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * 20_000)  # it does not end yet
        assert client.recv(12) == b"HTTP/1.1 400"


def test_without_a_key_web_pages_of_other_origins_are_refused(open_server):
    assert open_server.get("/v1/models").status == 200
    assert open_server.post("/sessions", {}, {"Origin": "https://example.org"}).status == 403
    assert open_server.post("/sessions", {}, {"Origin": "null"}).status == 403
    assert open_server.post("/sessions", {}, {"Origin": "http://["}).status == 403
    answer = open_server.post("/v1/chat/completions", {}, {"Origin": "https://example.org"})
    assert (answer.status, answer.json["error"]["code"]) == (403, "foreign_origin")
    own = open_server.base_url.removeprefix("http://")
    assert open_server.post("/sessions", {}, {"Origin": f"http://{own}"}).status == 201
    for host in ("example.org", "example.org:80", "127.0.0.1.example.org", "[", "[::1", ""):
        assert open_server.get("/v1/models", {"Host": host}).status == 403
    for host in ("localhost", "127.0.0.1:1234", "[::1]:80"):
        assert open_server.get("/v1/models", {"Host": host}).status == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_an_address_that_others_reach_needs_a_key(host):
    with pytest.raises(ArgumentError, match="--api-key-file"):
        check_protection(host, None)
    check_protection(host, "key")
    for own in ("127.0.0.1", "::1", "localhost", "127.9.9.9"):
        check_protection(own, None)


def test_a_key_is_read_from_a_file_that_holds_one(tmp_path):
    file = tmp_path / "key"
    file.write_text("  s3cret\n")
    assert read_keys(file, most=1) == ("s3cret",)
    for content in ("", "\n", "two keys", "two\nkeys", "clé"):
        file.write_text(content)
        with pytest.raises(CommandFileError) as caught:
            read_keys(file, most=1)
        assert not content.strip() or content not in str(caught.value)
    with pytest.raises(CommandFileError, match="No such file"):
        read_keys(tmp_path / "absent")


def test_a_port_on_which_another_program_has_begun_to_listen_since_is_an_error_with_its_cure():
    with bound_socket("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bound_socket("127.0.0.1", port) as second:
            first.listen()
            with pytest.raises(RolloutsError, match=f"port {port}.*--port 0"):
                run_server(Starlette(), second, on_ready=lambda: None)
