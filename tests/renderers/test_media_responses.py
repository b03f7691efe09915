"""Limits on fetched responses, errors of broken ones, and redaction of URLs in errors and logs."""

import gzip
import logging
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from fetched_media import PNG, SECRET, policy
from hostile_server import (
    Exchange,
    HostileServer,
    answer,
    dripping,
    endless,
    head,
    head_only,
    redirect,
    serving,
)

from renderers.errors import (
    MediaError,
    MediaFetchError,
    MediaLimitError,
)
from renderers.media.fetching import fetch


def test_an_endless_body_is_cut_off_at_the_byte_limit(server: HostileServer) -> None:
    with pytest.raises(MediaLimitError, match="max_bytes=1000000"):
        fetch(server.on("/a", endless), policy(max_bytes=10**6))


def test_a_body_of_exactly_the_limit_is_read(server: HostileServer) -> None:
    url = server.on("/a", answer(PNG))
    assert fetch(url, policy(max_bytes=len(PNG))) == PNG
    with pytest.raises(MediaLimitError):
        fetch(url, policy(max_bytes=len(PNG) - 1))


def late(url: str, **options: Any) -> None:
    """The fetch ends soon after its deadline with the error that says so."""
    started = time.monotonic()
    with pytest.raises(MediaFetchError, match=r"timeout=0\.5 s"):
        fetch(url, policy(timeout=0.5, **options))
    assert 0.4 < time.monotonic() - started < 30


@pytest.mark.slow
def test_a_body_sent_byte_by_byte_is_ended_by_the_deadline(server: HostileServer) -> None:
    late(server.on("/body", dripping(head(f"Content-Length: {len(PNG)}") + PNG)))
    late(server.on("/head", dripping(b"HTTP/1.1 200 OK\r\n" + b"X-More: x\r\n" * 1000)))
    late(server.on("/hints", dripping(head(status="103 Early Hints") * 1000)))
    late(server.on("/silence", dripping(b"H", pause=20)))


@pytest.mark.slow
def test_a_redirect_does_not_restart_the_deadline(server: HostileServer) -> None:
    def slow(exchange: Exchange) -> None:
        exchange.wait(0.2)
        redirect("/slow")(exchange)

    late(server.on("/slow", slow), max_redirects=100)


@pytest.mark.slow
def test_a_resolver_that_does_not_answer_is_abandoned_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: over.wait(20))
    try:
        late("http://example.test/a")
    finally:
        over.set()


# The body.


def test_a_body_shorter_than_announced_is_a_fetch_error(server: HostileServer) -> None:
    url = server.on("/a", answer(PNG, length=len(PNG) + 1))
    with pytest.raises(MediaFetchError, match=f"after {len(PNG)} of {len(PNG) + 1} bytes"):
        fetch(url, policy())


def test_a_body_longer_than_announced_is_a_fetch_error(server: HostileServer) -> None:
    for handler in (
        answer(PNG, length=len(PNG) - 1),
        lambda exchange: exchange.send(b"HTTP/1.1 200 OK\nContent-Length: 100\n\n" + PNG),
    ):
        with pytest.raises(MediaFetchError, match="more bytes"):
            fetch(server.on("/a", handler), policy())


@pytest.mark.parametrize("status", ["204 No Content", "206 Partial Content", "404 Not Found", "500 Oops", "300 Many"])
def test_any_status_but_200_is_a_fetch_error_that_names_it(server: HostileServer, status: str) -> None:
    with pytest.raises(MediaFetchError, match=status[:3]):
        fetch(server.on("/a", answer(b"" if status[0] == "2" else PNG, status=status)), policy())


def test_no_server_and_no_name_are_fetch_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as gone:
        url = gone.url("/a")
    with pytest.raises(MediaFetchError, match="no connection"):
        fetch(url, policy())

    def unknown(*args: Any, **options: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(MediaFetchError, match="cannot be resolved"):
        fetch("http://nowhere.test/a", policy())


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"<!DOCTYPE html><html><body>Not found</body></html>", "text/html"),
        (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "image/svg"),
        (b'{"error": "expired"}', "application/json"),
        (gzip.compress(PNG), "application/gzip"),
        (b"%PDF-1.7", "application/pdf"),
    ],
)
def test_a_body_of_another_type_is_named_whatever_its_declared_type(
    server: HostileServer, body: bytes, named: str
) -> None:
    url = server.on("/a.png", answer(body, "Content-Type: image/png"))
    with pytest.raises(MediaError, match=named) as caught:
        fetch(url, policy())
    assert "declared as image/png" in str(caught.value)


def test_a_compressed_body_is_refused_before_it_is_read(server: HostileServer) -> None:
    bomb = gzip.compress(bytes(10**7))
    for handler in (answer(bomb, "Content-Encoding: gzip"), head_only("Content-Encoding: br", "Content-Length: 9")):
        with pytest.raises(MediaFetchError, match="compressed"):
            fetch(server.on("/bomb", handler), policy())
    with pytest.raises(MediaFetchError):
        fetch(server.on("/te", answer(bomb, "Transfer-Encoding: gzip, chunked")), policy())


# Secrets.


def hostile_exchanges(server: HostileServer) -> list[str]:
    """URLs that fail in every way there is, and one that does not."""
    away = f"http://user:{SECRET}@127.0.0.1:{server.port}/x?token={SECRET}"
    private = f"http://127.0.0.2/x?token={SECRET}#{SECRET}"
    handlers: dict[str, Callable[[Exchange], None]] = {
        "/good": answer(PNG, f"Set-Cookie: {SECRET}"),
        "/html": answer(b"<html>"),
        "/short": answer(PNG, length=10**4),
        "/status": answer(b"", f"X-Echo: {SECRET}", status=f"404 {SECRET}"),
        "/noise": lambda exchange: exchange.send(f"{exchange.path}\r\n\r\n".encode()),
        "/limit": head_only(f"Content-Length: {2**40}"),
        "/credentials": redirect(away),
        "/private": redirect(private),
        "/file": redirect(f"file:///{SECRET[:0]}?{SECRET}"),
        "/loop": lambda exchange: redirect(exchange.path)(exchange),
        "/slow": dripping(head(f"X: {SECRET}") * 100),
        "/unreadable": redirect(f"http://[{SECRET}"),
    }
    for path, handler in handlers.items():
        server.on(path, handler)
    port = server.port
    return [
        *(f"http://127.0.0.1:{port}{path}?token={SECRET}#{SECRET}" for path in handlers),
        f"http://user:{SECRET}@127.0.0.1:{port}/good",
        f"http://{SECRET}@127.0.0.1:{port}/good",
        f"http://user:{SECRET}/x@127.0.0.1:{port}/good",
        f"http://user:{SECRET}?@127.0.0.1:{port}/good",
        f"http:user:{SECRET}@127.0.0.1",
        f"http://127.0.0.2:{port}/?{SECRET}",
        f"http://127.0.0.1:1/?{SECRET}",
        f"http://127.0.0.1:{port}/\n?{SECRET}",
        f"http://nowhere.invalid/?{SECRET}",
        f"https://127.0.0.1:{port}/good?{SECRET}",
    ]


@pytest.mark.slow
def test_no_error_and_no_log_record_contains_credentials_or_a_query(
    server: HostileServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    shown: list[str] = []
    for url in hostile_exchanges(server):
        try:
            fetch(url, policy(timeout=0.5))
        except MediaError as error:
            shown += [str(error), repr(error), "".join(traceback.format_exception(error))]
            chained: BaseException | None = error
            while chained is not None:  # what a debugger shows beyond the traceback
                shown.append(repr(chained))
                chained = chained.__cause__ or chained.__context__
    assert len(shown) > 60
    assert not [text for text in shown if SECRET in text]
    logged = [record.getMessage() for record in caplog.records]
    assert any("fetched http://127.0.0.1" in line for line in logged)
    assert not [line for line in logged if SECRET in line]
